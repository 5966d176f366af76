import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile

from app.audio_format import FILE_FORMATS, to_pcm16, wav_file, write_sound
from runtime import GenerationError


def test_loud_samples_saturate_and_never_wrap() -> None:
    """Trap 54: a sample beyond full scale keeps its sign."""
    samples = np.array([1.0, 1.0001, 2.0, 1e30, -1.0, -1.00005, -2.0, -1e30], np.float32)
    pcm = np.frombuffer(to_pcm16(samples), "<i2")
    assert pcm.tolist() == [32767, 32767, 32767, 32767, -32767, -32768, -32768, -32768]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(bad: float) -> None:
    """Trap 54: what NaN becomes as an integer differs from machine to machine."""
    with pytest.raises(GenerationError, match="NaN"):
        to_pcm16(np.array([0.0, bad], np.float32))


def test_samples_are_rounded_and_not_cut() -> None:
    assert np.frombuffer(to_pcm16(np.array([0.6, -0.6]) / 32767), "<i2").tolist() == [1, -1]


def test_no_samples_are_no_bytes() -> None:
    assert to_pcm16(np.empty(0, np.float32)) == b""


def test_wav_holds_the_very_samples(tmp_path: Path) -> None:
    pcm = to_pcm16(np.linspace(-1, 1, 999, dtype=np.float32))
    with wav_file(tmp_path / "out.wav", 24_000) as file:
        file.writeframes(pcm[:500])
        assert not (tmp_path / "out.wav").exists()
        file.writeframes(pcm[500:])
    with wave.open(str(tmp_path / "out.wav")) as written:
        assert (written.getframerate(), written.getnchannels(), written.getsampwidth()) == (24_000, 1, 2)
        assert written.readframes(999) == pcm


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_error_leaves_the_former_file_and_no_half_one(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "out.wav"
    out.write_bytes(b"former")
    with pytest.raises(error), wav_file(out, 24_000) as file:
        file.writeframes(b"\0\0")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out.wav"]
    assert out.read_bytes() == b"former"


def test_every_format_says_that_it_is_generated_and_keeps_its_length(tmp_path: Path) -> None:
    pcm = to_pcm16(0.3 * np.sin(np.arange(24_000) / 20, dtype=np.float32))
    for name in FILE_FORMATS:
        path = tmp_path / f"speech.{name}"
        write_sound(path, pcm, 24_000, "Seed 7, zero-shot.")
        with soundfile.SoundFile(path) as file:
            said = file.copy_metadata()
            assert "Generated speech" in said["comment"] and "Seed 7" in said["comment"], name
            assert (file.samplerate, file.channels, file.frames) == (24_000, 1, 24_000)
            samples = file.read(dtype="int16")
        if name != "mp3":
            assert samples.tobytes() == pcm
