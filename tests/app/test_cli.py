"""`launch.py say`: exit codes, and that a file is either whole or not there."""

import os
import sys
import wave
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest

import launch
from app.audio_format import to_pcm16
from app.figures import notice
from runtime import OFFICIAL, Checkpoint, Mode, SpeechRequest, SpokenSentence, resolve_checkpoint
from tests.app.fake_engine import RATE, FakeEngine, FakeStream, tone


def say(engine: FakeEngine, *flags: object) -> int:
    return launch.main(["say", *map(str, flags)], {}, lambda settings: engine)


def samples_of(path: Path) -> bytes:
    with wave.open(str(path)) as file:
        assert file.getframerate() == RATE
        return file.readframes(file.getnframes())


def test_say_writes_every_sample(tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(seconds=1.0)
    assert say(engine, "--reference", reference, "--text", "Hello.", "--out", tmp_path / "out.wav", "--seed", 5) == 0
    assert samples_of(tmp_path / "out.wav") == to_pcm16(tone(0, RATE))
    told = capsys.readouterr()
    assert told.out == ""
    for figure in (
        "1.00 s of speech",
        "first audio",
        "RTF",
        "25 tokens",
        "seed 5",
        "cross-lingual",
        "stop",
        "untrained",
    ):
        assert figure in told.err
    assert engine.closed


def test_pipe_gets_the_same_samples_as_the_file(
    tmp_path: Path, reference: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "out.wav"
    assert say(FakeEngine(), "--reference", reference, "--text", "Hello.", "--out", out, "--stream-to", "-") == 0
    assert capsysbinary.readouterr().out == samples_of(out) != b""


def test_flags_reach_the_request(tmp_path: Path, reference: Path) -> None:
    engine = FakeEngine(seconds=0.1)
    words = tmp_path / "words.txt"
    words.write_text("你好 there", encoding="utf-8-sig")
    common = ("--reference", reference, "--out", tmp_path / "out.wav")
    say(engine, *common, "--text-file", words, "--transcript", "la", "--speed", 1.5, "--trim", "--no-stream")
    say(engine, *common, "--text", "a", "--instruct", "softly", "--no-normalize")
    say(engine, *common, "--source-audio", reference)
    first, second, _ = engine.requests
    assert (first.text, first.transcript, first.speed, first.trim, first.streaming) == (
        "你好 there",
        "la",
        1.5,
        True,
        False,
    )
    assert (second.instruction, second.normalize, second.trim, second.streaming) == ("softly", False, False, True)
    assert [request.mode for request in engine.requests] == [Mode.ZERO_SHOT, Mode.INSTRUCT, Mode.CONVERSION]


def test_text_comes_from_stdin(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(seconds=0.1)
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO("Grüße".encode())))
    assert say(engine, "--reference", reference, "--text", "-", "--out", tmp_path / "out.wav") == 0
    assert engine.requests[0].text == "Grüße"


BAD = {
    "no such reference": (["--reference", "nobody.wav", "--text", "a", "--out", "out.wav"], "nobody.wav"),
    "broken reference": (["--reference", "broken.wav", "--text", "a", "--out", "out.wav"], "broken.wav"),
    "long reference": (["--reference", "long.wav", "--text", "a", "--out", "out.wav"], "40.0 s"),
    "empty text": (["--reference", "a voice.wav", "--text", " ", "--out", "out.wav"], "text is empty"),
    "no such text": (["--reference", "a voice.wav", "--text-file", "none.txt", "--out", "out.wav"], "none.txt"),
    "text in Latin-1": (["--reference", "a voice.wav", "--text-file", "latin.txt", "--out", "out.wav"], "UTF-8"),
    "no output": (["--reference", "a voice.wav", "--text", "a"], "--out"),
    "no such folder": (["--reference", "a voice.wav", "--text", "a", "--out", "none/out.wav"], "no folder"),
    "a folder": (["--reference", "a voice.wav", "--text", "a", "--out", "folder.wav"], "is a folder"),
    "another format": (["--reference", "a voice.wav", "--text", "a", "--out", "out.mp3"], ".wav"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_2_and_leaves_no_file(
    name: str, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.wav").write_bytes(os.urandom(999))
    Path("latin.txt").write_bytes("Grüße".encode("latin-1"))
    Path("folder.wav").mkdir()
    with wave.open("long.wav", "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(to_pcm16(np.tile(tone(0, 8000), 40)))
    before = sorted(tmp_path.iterdir())
    flags, message = BAD[name]
    assert say(FakeEngine(), *flags) == 2
    assert sorted(tmp_path.iterdir()) == before
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told


@pytest.mark.parametrize("flags", [["--text", "a"], ["--reference", "x.wav", "--text", "a", "--source-audio", "y.wav"]])
def test_contradicting_flags_exit_2(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        say(FakeEngine(), *flags)
    assert exit_code.value.code == 2


def test_failed_generation_exits_1_and_leaves_no_file(
    tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(fails_after=2)
    assert say(engine, "--reference", reference, "--text", "a", "--out", tmp_path / "out.wav") == 1
    assert list(tmp_path.iterdir()) == [reference]
    assert "the model produced NaN" in capsys.readouterr().err


def test_silence_is_a_failure(tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(FakeEngine(seconds=0), "--reference", reference, "--text", "a", "--out", tmp_path / "out.wav") == 1
    assert list(tmp_path.iterdir()) == [reference]
    assert "without a sound" in capsys.readouterr().err


def test_interruption_leaves_no_file_and_closes_the_stream(tmp_path: Path, reference: Path) -> None:
    engine = FakeEngine(fails_after=2, failure=KeyboardInterrupt())
    assert say(engine, "--reference", reference, "--text", "a", "--out", tmp_path / "out.wav") == 130
    assert list(tmp_path.iterdir()) == [reference]
    assert engine.streams[0].closed_at is not None and engine.closed


def test_a_reader_that_goes_away_ends_the_stream(
    reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        engine = FakeEngine()
        assert say(engine, "--reference", reference, "--text", "a", "--stream-to", "-") == 1
    assert "cannot be written" in capsys.readouterr().err
    assert engine.streams[0].closed_at is not None


def test_missing_checkpoint_exits_2(tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--reference", str(reference), "--text", "a", "--out", str(tmp_path / "out.wav")]
    assert launch.main(["say", "--model", str(tmp_path), *flags], {}) == 2
    assert "cosyvoice3.yaml" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [reference]


def test_unknown_device_exits_2(
    tiny_checkpoint: Checkpoint, tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--reference", str(reference), "--text", "a", "--out", str(tmp_path / "out.wav"), "--device", "abacus"]
    assert launch.main(["say", "--model", str(tiny_checkpoint.folder), *flags], {}) == 2
    assert "abacus" in capsys.readouterr().err


def test_say_speaks_with_a_real_engine(
    tiny_checkpoint: Checkpoint, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    voice = Path(__file__).parents[1] / "audio" / "zero_shot_prompt.wav"
    out = tmp_path / "out.wav"
    flags = ["--reference", str(voice), "--text", "Hello there.", "--seed", "3", "--out", str(out), "--stream-to", "-"]
    assert launch.main(["say", "--model", str(tiny_checkpoint.folder), *flags], {}) == 0
    samples = samples_of(out)
    assert len(samples) % (2 * 960) == 0 and samples  # whole tokens
    assert capsysbinary.readouterr().out == samples


def test_words_and_pauses_reach_the_sound(
    tiny_checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    voice = Path(__file__).parents[1] / "audio" / "zero_shot_prompt.wav"
    words = tmp_path / "words.txt"
    words.write_text("PyTorch = pie torch", encoding="utf-8")
    common = ["say", "--model", str(tiny_checkpoint.folder), "--reference", str(voice), "--words", str(words)]
    common += ["--text", "PyTorch. [pause 1.5s] It costs 5 euros.", "--seed", "3"]
    assert launch.main([*common, "--plan"], {}) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split(" s  ")[-1].strip() for line in told] == [
        "pie torch.",
        "PyTorch.",
        "(pause)",
        "It costs five euros.",
        "It costs 5 euros.",
    ]
    assert launch.main([*common, "--out", str(tmp_path / "out.wav")], {}) == 0
    samples = np.frombuffer(samples_of(tmp_path / "out.wav"), "<i2")
    runs = np.diff(np.flatnonzero(np.abs(samples) > 30))
    assert abs((runs.max() - 1) / RATE - 1.5) < 0.05


def test_a_broken_word_list_exits_2(tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tmp_path / "words.txt"
    words.write_text("no sign", encoding="utf-8")
    flags = ["--reference", reference, "--text", "a", "--words", words, "--out", tmp_path / "out.wav"]
    assert say(FakeEngine(), *flags) == 2
    assert "line 1" in capsys.readouterr().err


def test_a_sentence_whose_length_does_not_fit_is_told(
    tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class OddEngine(FakeEngine):
        def stream(self, request: SpeechRequest) -> FakeStream:
            stream = super().stream(request)
            stream.stats.spoken.append(SpokenSentence("A text", 9.0, RATE, samples=RATE, complete=True))
            return stream

    engine = OddEngine(seconds=1.0, makes_speech=True)
    say(engine, "--reference", reference, "--text", "a", "--out", tmp_path / "out.wav")
    assert "sentence 1 took 1.0 s where about 9.0 s" in capsys.readouterr().err


def test_the_demo_voice_says_what_it_is(tiny_checkpoint: Checkpoint) -> None:
    demo = resolve_checkpoint("demo")
    assert demo.is_demo and demo.makes_speech
    assert "small demo voice" in str(notice(demo)) and OFFICIAL in str(notice(demo))
    assert "noise" in str(notice(tiny_checkpoint)) and not tiny_checkpoint.is_demo
