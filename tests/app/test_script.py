"""Scripts with several voices: read, refused and spoken as one stream."""

from pathlib import Path

import numpy as np
import pysubs2
import pytest
import soundfile

import launch
from app.script import Line, ScriptStream, VoiceLeveller, parse_script
from app.voices import VoiceLibrary
from runtime import AudioClip, EndReason, GenerationError, RequestError, SpeechRequest, loudness
from tests.app.fake_engine import RATE, FakeEngine, tone
from tests.conftest import TESTS

PAUSE = round(0.4 * RATE)


def test_lines_are_read_with_their_numbers() -> None:
    text = "\ufeff# a play\n\nAda: Where: there?\r\n 爸爸： 你好。 \n\tBob Lee:[pause 1s] At 5:30."
    assert parse_script(text.removeprefix("\ufeff")) == [
        Line(3, "Ada", "Where: there?"),
        Line(4, "爸爸", "你好。"),
        Line(5, "Bob Lee", "[pause 1s] At 5:30."),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Ada: a\nno name here", "line 2"),
        ("Ada:", "line 1"),
        (": text", "line 1"),
        ("\n# nothing\n", "is empty"),
        ("Ada: a\n" * 1001, "1001 lines"),
    ],
)
def test_what_is_no_script_is_told(text: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        parse_script(text)


def alone(engine, request: SpeechRequest) -> np.ndarray:
    with engine.stream(request) as stream:
        return np.concatenate([chunk.samples for chunk in stream])


def test_lines_sound_as_they_do_alone_with_pauses_between(engine, voice):
    requests = [
        SpeechRequest(voice, text="One. [pause 1s] Two.", seed=3),
        SpeechRequest(voice, text="Three.", seed=3, transcript="words"),
        SpeechRequest(voice, text="四。", seed=4),
    ]
    with ScriptStream(engine, requests) as stream:
        chunks = list(stream)
    first, *others = [alone(engine, request) for request in requests]
    expected = np.concatenate([first, *(part for other in others for part in (np.zeros(PAUSE, np.float32), other))])
    made = np.concatenate([chunk.samples for chunk in chunks])
    assert np.array_equal(made, expected)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    stats = stream.stats
    assert stats.samples == len(made) and stats.sentences == len(stats.spoken) == 4
    assert stats.ended in (EndReason.STOP, EndReason.LENGTH) and stats.tokens == sum(s.tokens for s in stats.spoken)
    assert stats.spoken[2].start == len(first) + PAUSE and all(sentence.complete for sentence in stats.spoken)
    assert all(made[sentence.start : sentence.start + 480].any() for sentence in stats.spoken)


def test_a_line_that_cannot_be_spoken_is_told_before_any_sound(voice):
    engine = FakeEngine()
    requests = [SpeechRequest(voice, text=text) for text in ("a", " ", "b")]
    with pytest.raises(RequestError, match="spoken line 2"):
        ScriptStream(engine, requests)
    assert engine.streams[0].stats.samples == 0


def test_closing_ends_the_line_and_all_that_follow(voice):
    engine = FakeEngine(seconds=2.0)
    with ScriptStream(engine, [SpeechRequest(voice, text="a")] * 3) as stream:
        for chunk in stream:
            if chunk.index == 6:  # of the second line
                stream.close()
    assert stream.stats.ended is EndReason.CANCELLED
    assert engine.streams[1].stats.ended is EndReason.CANCELLED and engine.streams[2].stats.samples == 0


def test_a_failure_ends_the_whole(voice):
    with (
        pytest.raises(GenerationError),
        ScriptStream(FakeEngine(fails_after=1), [SpeechRequest(voice, text="a")] * 2) as stream,
    ):
        list(stream)
    assert stream.stats.ended is EndReason.ERROR


@pytest.fixture
def voices(tmp_path: Path) -> Path:
    library = VoiceLibrary(tmp_path / "voices")
    for name, start in (("Ada", 0), ("爸爸", 9)):
        soundfile.write(tmp_path / "clip.wav", tone(start, RATE), RATE)
        library.add(name, tmp_path / "clip.wav", consent="mine", transcript=f"words of {name}")
    return library.folder


def run(engine: FakeEngine, *flags: object) -> int:
    return launch.main(["say", *map(str, flags)], {}, lambda settings: engine)


def test_say_speaks_a_script(tmp_path: Path, voices: Path) -> None:
    script, out = tmp_path / "script.txt", tmp_path / "out.wav"
    script.write_text("Ada: Hello.\n爸爸：你好。\nada: Bye.", encoding="utf-8-sig")
    engine = FakeEngine(seconds=0.5)
    assert run(engine, "--script", script, "--voices", voices, "--out", out, "--seed", 5) == 0
    assert [(r.text, r.transcript, r.seed) for r in engine.requests] == [
        ("Hello.", "words of Ada", 5),
        ("你好。", "words of 爸爸", 5),
        ("Bye.", "words of Ada", 5),
    ]
    assert soundfile.info(out).frames == 3 * RATE // 2 + 2 * PAUSE


@pytest.mark.parametrize(
    ("content", "flags", "told"),
    [
        ("Ada: a\nBob: b", [], "line 2 of the script: no voice is called 'Bob'"),
        ("Ada: a\n", ["--text", "b"], "a script holds its text"),
        ("no names", [], "line 1"),
    ],
)
def test_a_script_that_cannot_be_spoken_exits_2(
    tmp_path: Path, voices: Path, capsys: pytest.CaptureFixture[str], content: str, flags: list[str], told: str
) -> None:
    (tmp_path / "script.txt").write_text(content, encoding="utf-8")
    common = ("--script", tmp_path / "script.txt", "--voices", voices, "--out", tmp_path / "out.wav")
    assert run(FakeEngine(), *common, *flags) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "out.wav").exists()


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_a_script_gets_pauses_and_subtitles_from_a_real_engine(tiny_checkpoint, tmp_path, voices, kind):
    (tmp_path / "script.txt").write_text("Ada: Hello. [pause 1s] You.\n爸爸: 你好。", encoding="utf-8")
    library = VoiceLibrary(voices)
    library.add("Ada", TESTS / "audio" / "en_clean_24k.m4a", consent="mine", replace=True)
    flags = ["--script", tmp_path / "script.txt", "--voices", voices, "--out", tmp_path / "out.wav", "--seed", 3]
    flags += ["--model", tiny_checkpoint.folder, "--subtitles", tmp_path / f"out.{kind}"]
    assert launch.main(["say", *map(str, flags)], {}) == 0
    read = pysubs2.load(str(tmp_path / f"out.{kind}"))
    assert [event.plaintext for event in read] == ["Hello.", "You.", "你好。"]
    assert read[1].start - read[0].end == pytest.approx(1000, abs=50)
    assert read[2].start - read[1].end == pytest.approx(400, abs=50)
    assert read[2].end == pytest.approx(1000 * soundfile.info(tmp_path / "out.wav").duration, abs=2)


def test_voices_of_different_loudness_come_to_one_and_keep_their_own_lines() -> None:
    loud, quiet = (AudioClip(np.ones(RATE, np.float32), RATE) for _ in range(2))
    leveller = VoiceLeveller(RATE, None)
    first = leveller.apply(0.4 * tone(0, RATE), loud)
    assert np.array_equal(first, 0.4 * tone(0, RATE))  # the first stays as it is
    raised = leveller.apply(0.2 * tone(0, RATE), quiet)
    assert loudness(raised, RATE) == pytest.approx(loudness(first, RATE), abs=0.05)
    softer = leveller.apply(0.1 * tone(0, RATE), quiet)  # a line that was meant to be softer
    assert loudness(raised, RATE) - loudness(softer, RATE) == pytest.approx(6.0, abs=0.1)
    assert leveller.target_lufs == pytest.approx(loudness(first, RATE))


def test_no_voice_is_raised_into_clipping() -> None:
    leveller = VoiceLeveller(RATE, target_lufs=-3.0)
    peaky = 0.01 * tone(0, RATE)
    peaky[100] = 0.6
    assert np.abs(leveller.apply(peaky, AudioClip(peaky, RATE))).max() <= 0.7
