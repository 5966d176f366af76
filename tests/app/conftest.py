"""A voice file for page and command."""

from pathlib import Path

import pytest

from app.audio_format import to_pcm16, wav_file
from tests.app.fake_engine import RATE, tone


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    path = tmp_path / "a voice.wav"
    with wav_file(path, RATE) as file:
        file.writeframes(to_pcm16(tone(0, 2 * RATE)))
    return path
