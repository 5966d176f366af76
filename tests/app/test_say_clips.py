"""`say` on real recordings of every kind, through the real engine: a valid file, or a message and no file."""

from pathlib import Path

import pytest
import soundfile

from launch import main
from tests.conftest import TESTS

CLIPS = sorted(path.name for path in (TESTS / "audio").iterdir() if path.suffix != ".md")
TOO_LONG = "multilingual_60s_24k.mp3"


@pytest.fixture
def say(engine, monkeypatch, tmp_path):
    """Runs `say` on the shared engine; gives exit code and output path."""
    monkeypatch.setattr(engine, "close", lambda: None)

    def run(clip: Path, *flags: str) -> tuple[int, Path]:
        out = tmp_path / "out.wav"
        arguments = ["say", "--reference", str(clip), "--seed", "3", "--out", str(out), *flags]
        return main(arguments, {}, lambda settings: engine), out

    return run


@pytest.mark.parametrize("text", ["Hello.", "你好。"])
@pytest.mark.parametrize("name", [name for name in CLIPS if name != TOO_LONG])
def test_every_clip_speaks_english_and_chinese(say, capsys, name, text):
    code, out = say(TESTS / "audio" / name, "--text", text)
    told = capsys.readouterr().err
    assert code == 0, told
    with soundfile.SoundFile(out) as file:
        assert (file.samplerate, file.channels, file.subtype) == (24000, 1, "PCM_16")
        samples = file.read()
    tokens = int(told.split(" tokens")[0].split()[-1])
    assert len(samples) == tokens * 960 > 0
    assert samples.std() > 1e-4


def test_a_clip_of_a_minute_needs_trim(say, capsys):
    code, out = say(TESTS / "audio" / TOO_LONG, "--text", "Hello.")
    assert code == 2 and not out.exists()
    assert "59.9" in capsys.readouterr().err
    code, out = say(TESTS / "audio" / TOO_LONG, "--text", "Hello.", "--trim")
    assert code == 0 and soundfile.info(out).frames > 0


def test_the_known_transcript_makes_it_zero_shot(say, capsys):
    transcript = "希望你以后能够做的比我还好呦。"
    code, out = say(TESTS / "audio" / "zero_shot_prompt.wav", "--transcript", transcript, "--text", "你好。")
    assert code == 0 and out.exists()
    assert "zero-shot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"not a recording", "cannot be decoded"), (b"RIFF\x24\0\0\0WAVEfmt ", "cannot be decoded")],
)
def test_a_bad_recording_gets_its_message_and_leaves_no_file(say, capsys, tmp_path, content, message):
    clip = tmp_path / "clip.wav"
    clip.write_bytes(content)
    code, _ = say(clip, "--text", "Hello.")
    told = capsys.readouterr().err
    assert code == 2 and "clip.wav" in told and message in told and "Traceback" not in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.wav"]


@pytest.mark.parametrize("text", ["", "   ", "?!...", "😀"])
def test_a_text_without_words_is_told_and_leaves_no_file(say, capsys, text):
    code, out = say(TESTS / "audio" / "en_u8_44k1_mono.wav", "--text", text)
    assert code == 2 and not out.exists()
    assert "error: " in capsys.readouterr().err
