"""Qwen's text vocabulary as the released checkpoint has it."""

from pathlib import Path

import pytest

from runtime.frontend.tokenizer import TextTokenizer
from tests.runtime.frontend.qwen_bpe import write_text_folder


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> TextTokenizer:
    return TextTokenizer(qwen_folder)
