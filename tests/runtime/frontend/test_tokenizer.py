import json
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import CheckpointError
from runtime.frontend.tokenizer import SPECIAL_TOKENS, TextTokenizer
from tests.golden import meta
from tests.runtime.frontend.qwen_bpe import write_text_folder


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    """A vocabulary of its own: 256 bytes and two merges, `he` and `hel`."""
    h, e, letter_l = (ord(letter) - ord("!") for letter in "hel")
    return write_text_folder(tmp_path / "text", np.array([[h, e], [256, letter_l]]))


def test_encode_equals_the_official_tokenizer(qwen: TextTokenizer) -> None:
    for text, ids in meta("text_frontend")["encode"]:
        assert qwen.encode(text) == ids, text


def test_special_tokens_have_the_official_ids(qwen: TextTokenizer) -> None:
    golden = meta("special_tokens")
    assert list(SPECIAL_TOKENS) == sorted(golden["tokens"], key=golden["tokens"].get)
    assert {name: qwen.id_of(name) for name in SPECIAL_TOKENS} == golden["tokens"]
    assert qwen.size == golden["total_size"]
    assert qwen.end_of_prompt == golden["tokens"]["<|endofprompt|>"]


def test_decomposed_letters_are_composed(qwen: TextTokenizer) -> None:
    assert qwen.encode("cafe\u0301") == qwen.encode("caf\u00e9")


def test_a_small_vocabulary_has_ids_of_its_own(small_folder: Path) -> None:
    tokenizer = TextTokenizer(small_folder)
    assert tokenizer.size == 258 + len(SPECIAL_TOKENS)
    assert tokenizer.end_of_prompt == 258 + SPECIAL_TOKENS.index("<|endofprompt|>")
    assert tokenizer.encode("hel<|endofprompt|>he") == [257, tokenizer.end_of_prompt, 256]


def test_every_byte_has_a_token(small_folder: Path) -> None:
    tokenizer = TextTokenizer(small_folder)
    assert tokenizer.count("ü 好 😀") == len("ü 好 😀".encode())


def test_special_tokens_that_the_vocabulary_has_keep_their_ids(small_folder: Path) -> None:
    vocabulary = json.loads((small_folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary["<|endofprompt|>"] = len(vocabulary)
    (small_folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = TextTokenizer(small_folder)
    assert tokenizer.end_of_prompt == 258
    assert tokenizer.size == 258 + len(SPECIAL_TOKENS)
    assert tokenizer.encode("<|endofprompt|>") == [258]


def test_a_checkpoint_may_bring_its_own_list(small_folder: Path) -> None:
    (small_folder / "special_tokens.json").write_text(json.dumps(["<|endofprompt|>", "[hm]"]), encoding="utf-8")
    tokenizer = TextTokenizer(small_folder)
    assert tokenizer.special_tokens == ("<|endofprompt|>", "[hm]")
    assert tokenizer.encode("[hm]<|endofprompt|>") == [259, 258]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("vocab.json", "{", "cannot be read"),
        ("vocab.json", "[]", "number its tokens"),
        ("vocab.json", '{"a": 0, "b": 2}', "number its tokens"),
        ("vocab.json", '{"a": 0, "b": 1}', "byte tokens"),
        ("merges.txt", "h e\nx\n", "does not know: 'x'"),
        ("merges.txt", "h e\nhe q\n", "does not know"),
        ("special_tokens.json", '{"a": 1}', "no list of strings"),
        ("special_tokens.json", '["[breath]"]', "lacks <|endofprompt|>"),
    ],
)
def test_broken_files_are_named(small_folder: Path, name: str, content: str, told: str) -> None:
    (small_folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name) as error:
        TextTokenizer(small_folder)
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_a_missing_file_is_named(small_folder: Path, name: str) -> None:
    (small_folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        TextTokenizer(small_folder)
