"""Behind the place for a voice: verdicts for the page, videos, examples, and transcription that may not be there."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import numpy as np
import pytest

from app.examples import load_examples
from app.reference_handlers import Part, ReferenceHandlers, import_recording
from app.transcribe import Transcriber
from benchmarks.words import whisper_base, word_errors
from runtime import EngineUnavailable, RequestError, load_clip
from tests.app.fake_engine import RATE

AUDIO = Path(__file__).parents[1] / "audio"
transcribe = importlib.import_module("app.transcribe")


@pytest.fixture(scope="module")
def voices() -> ReferenceHandlers:
    return ReferenceHandlers(Transcriber("small"), [])


def test_a_verdict_has_what_the_page_draws(voices: ReferenceHandlers) -> None:
    shown = next(voices.judge(str(AUDIO / "en_clean_24k.m4a")))
    assert shown is not None and shown["headline"] == "A good recording."
    assert shown["window"] == shown["proposed"] and len(shown["peaks"]) == 320
    assert json.loads(json.dumps(shown)) == shown  # it crosses to the browser and back
    assert Part.of(shown).window == tuple(shown["window"])


def test_what_takes_longer_refines_the_verdict(voices: ReferenceHandlers) -> None:
    first, *more = voices.judge(str(AUDIO / "two_voices_16k_stereo.wav"))
    assert first is not None and "channels" not in " ".join(first["remarks"])
    assert "channels hold different voices" in " ".join(more[-1]["remarks"]) and more[-1]["key"] == first["key"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.wav", b""),
        ("random.mp3", np.random.default_rng(1).bytes(20_000)),
        ("half.wav", b"RIFF\x24\x00\x00\x00WAVEfm"),
        ("header.wav", (AUDIO / "en_u8_44k1_mono.wav").read_bytes()[:44]),
    ],
    ids=("zero", "random", "half", "header"),
)
def test_broken_files_are_one_sentence_without_a_path(
    voices: ReferenceHandlers, tmp_path: Path, name: str, content: bytes
) -> None:
    broken = tmp_path / name
    broken.write_bytes(content)
    (shown,) = voices.judge(str(broken))
    assert shown is not None and shown["level"] == "bad" and "window" not in shown
    assert name in shown["headline"] and str(tmp_path) not in shown["headline"]
    with pytest.raises(gr.Error, match=name):
        import_recording(str(broken))


def test_the_content_decides_and_not_the_name(voices: ReferenceHandlers, tmp_path: Path) -> None:
    lying = tmp_path / "aac named.wav"
    lying.write_bytes((AUDIO / "en_clean_24k.m4a").read_bytes())
    shown = next(voices.judge(str(lying)))
    assert shown is not None and shown["level"] == "good"


def test_no_recording_is_no_verdict(voices: ReferenceHandlers) -> None:
    assert list(voices.judge(None)) == [None]


def test_what_comes_back_from_a_page_is_checked() -> None:
    assert Part.of(None) == Part.of({"headline": "x"}) == Part()
    assert Part.of({"window": [1, 2.5], "stale_words": "old"}) == Part((1.0, 2.5), "old")
    for wrong in ([1], ["a", 2], None, 5):
        with pytest.raises(RequestError, match="begin and end"):
            Part.of({"window": wrong})


def test_sound_of_a_video_becomes_a_recording(reference: Path) -> None:
    assert import_recording(str(reference))[0] == RATE


def test_transcription_says_what_is_missing(
    voices: ReferenceHandlers, monkeypatch: pytest.MonkeyPatch, reference: Path
) -> None:
    monkeypatch.setitem(sys.modules, "faster_whisper", None)
    with pytest.raises(gr.Error, match="extra `asr`"):
        voices.transcribe(str(reference), None)
    with pytest.raises(gr.Error, match="add a voice first"):
        voices.transcribe(None, None)

    def absent(*_: object, **given: object) -> None:
        assert given["local_files_only"] is True  # nothing is fetched behind anybody's back
        raise FileNotFoundError

    monkeypatch.setitem(sys.modules, "faster_whisper", SimpleNamespace(WhisperModel=absent))
    with pytest.raises(EngineUnavailable, match="hf download Systran/faster-whisper-tiny"):
        transcribe.load("tiny")
    with pytest.raises(EngineUnavailable, match=r"^a voice\.wav holds no transcription model"):  # nor is a path told
        transcribe.load(str(reference))


def test_a_real_model_writes_down_what_is_said() -> None:
    transcriber = Transcriber(str(whisper_base()))
    for example in load_examples()[:2]:
        written = transcriber.transcribe(load_clip(example.sound))
        errors, due = word_errors(example.transcript, written)
        assert errors <= due // 10, written


def test_only_the_part_that_is_used_is_written_down(monkeypatch: pytest.MonkeyPatch, voices: ReferenceHandlers) -> None:
    heard: list[int] = []

    class Whisper:
        """The surface of faster-whisper's model that is used."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def transcribe(self, samples: np.ndarray, **_: object) -> tuple[list[SimpleNamespace], None]:
            heard.append(len(samples))
            return [SimpleNamespace(text=" And so, "), SimpleNamespace(text="my fellow ")], None

    monkeypatch.setitem(sys.modules, "faster_whisper", SimpleNamespace(WhisperModel=Whisper))
    words = voices.transcribe(str(AUDIO / "jfk_44k1_stereo.flac"), {"window": [0.5, 2.5]})
    assert words == "And so, my fellow" and heard == [2 * 16_000]


def test_examples_are_voices_with_name_words_and_consent(tmp_path: Path) -> None:
    assert load_examples(tmp_path / "absent") == []
    (tmp_path / "ada.wav").write_bytes((AUDIO / "zero_shot_prompt.wav").read_bytes())
    (tmp_path / "ada.txt").write_text("Good morning.\n", encoding="utf-8")
    (example,) = examples = load_examples(tmp_path)
    assert (example.name, example.transcript) == ("Ada", "Good morning.")
    (rate, samples), words, agreed = ReferenceHandlers(Transcriber("small"), examples).example(0)
    clip = load_clip(example.sound)
    assert words == "Good morning." and agreed and (rate, len(samples)) == (clip.sample_rate, len(clip.samples))
    (tmp_path / "bob.wav").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"bob\.txt"):
        load_examples(tmp_path)


def test_the_bundled_voices_can_be_tried() -> None:
    assert [example.name for example in load_examples()] == ["Heron", "Linnet", "Robin", "Rook", "Wren"]
