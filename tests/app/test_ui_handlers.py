"""The functions behind the buttons, without a browser: what is sent, and that every stream is closed."""

import base64
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.audio_format import to_pcm16
from app.form import CONVERT, INSTRUCT, SAY, FormReader, text_notices, without_tokens
from app.history import History
from app.reference_handlers import ReferenceHandlers
from app.settings import Settings
from app.speaking import Speaker, Tabs
from app.transcribe import Transcriber
from app.ui_handlers import Handlers, show_fields
from app.visits import Visits
from runtime import EndReason, Mode, SamplingParams
from tests.app.fake_engine import RATE, FakeEngine, tone

TAB = SimpleNamespace(session_hash="one tab")
VOICES = ReferenceHandlers(Transcriber("small"), [])


def handlers_of(engine: FakeEngine, settings: Settings | None = None) -> Handlers:
    settings = settings or Settings()
    return Handlers(engine, Speaker(engine), FormReader(engine, settings, VOICES), Visits(settings), Tabs())


def speak(
    handlers: Handlers, reference: Path | None, job: int = 1, **given: Any
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Messages, each with the path of the WAV or what stands for none."""
    fields = {"task": SAY, "transcript": "", "instruction": "", "source": None, "text": "Hello.", "speed": 1.0}
    fields |= {"part": None, "consent": True, "language": "auto", "temperature": 1.0, "top_p": 0.8, "top_k": 25}
    fields |= {"seed": "", "trim": False, "normalize": True, "saved": "", "words": ""}
    fields |= {"script": False, "visit": "", "job": job, "http": TAB} | given
    messages = handlers.speak(str(reference) if reference else None, **fields)
    try:
        for message, wav, *_ in messages:
            yield message, wav
    finally:
        messages.close()


def test_messages_carry_every_sample_in_order_and_the_last_one_the_file(reference: Path) -> None:
    handlers = handlers_of(FakeEngine(seconds=1.0))
    sent, file = [], b""
    for message, result in speak(handlers, reference):
        sent.append(message)
        if message["state"] == "done":
            with wave.open(result) as opened:
                file = opened.readframes(opened.getnframes())
    assert [message["state"] for message in sent] == ["preparing", "speaking", "speaking", "speaking", "done"]
    spoken = sent[1:-1]
    assert [message["index"] for message in spoken] == [0, 1, 2]
    assert [message["last"] for message in spoken] == [False, False, True]
    assert {message["job"] for message in sent} == {1} and {message["rate"] for message in spoken} == {RATE}
    pcm = b"".join(base64.b64decode(message["pcm"]) for message in spoken)
    assert pcm == file == to_pcm16(tone(0, RATE))
    assert sent[-1]["figures"]["tokens"] == 25 and sent[-1]["figures"]["ended"] == "stop"


def test_leaving_the_generator_closes_the_stream(reference: Path) -> None:
    """Trap 29: Gradio closes the generator when a request is cancelled."""
    engine = FakeEngine()
    messages = speak(handlers_of(engine), reference)
    next(messages), next(messages)
    messages.close()
    assert engine.streams[0].closed_at is not None


def test_stop_ends_a_stream_that_is_between_chunks_and_keeps_what_was_made(reference: Path) -> None:
    engine = FakeEngine(seconds=60, rtf=1.0, chunk_seconds=0.2)
    handlers = handlers_of(engine)
    messages = speak(handlers, reference, job=7)
    next(messages), next(messages)
    threading.Timer(0.05, handlers.stop, (7, TAB)).start()
    message, result = next(messages)
    assert message["state"] == "stopped" and message["figures"]["ended"] == "cancelled"
    with wave.open(result) as file:
        assert file.getnframes() == 0.2 * RATE


def test_stop_keeps_a_job_in_line_from_speaking(reference: Path) -> None:
    engine = FakeEngine()
    handlers = handlers_of(engine)
    handlers.stop(7, TAB)
    assert [message["state"] for message, _ in speak(handlers, reference, job=7)] == ["stopped"]
    assert engine.streams == []
    assert [message["state"] for message, _ in speak(handlers, reference, job=8)][-1] == "done"


def test_newer_click_of_a_tab_ends_the_older_one(reference: Path) -> None:
    engine = FakeEngine()
    handlers = handlers_of(engine)
    older, newer = speak(handlers, reference, job=1), speak(handlers, reference, job=2)
    next(older), next(older)
    next(newer), next(newer)
    assert next(older)[0]["state"] == "stopped"
    assert next(newer)[0]["state"] == "speaking"


def test_tabs_do_not_stop_each_other(reference: Path) -> None:
    handlers = handlers_of(FakeEngine())
    mine = speak(handlers, reference, job=1)
    next(mine), next(mine)
    handlers.stop(9, SimpleNamespace(session_hash="another tab"))
    assert [message["state"] for message, _ in mine][-1] == "done"


def test_closing_the_tab_closes_its_stream(reference: Path) -> None:
    engine = FakeEngine()
    handlers = handlers_of(engine)
    messages = speak(handlers, reference)
    next(messages), next(messages)
    handlers.leave(TAB)
    assert engine.streams[0].closed_at is not None
    handlers.leave(TAB)


def test_a_failure_is_told_in_our_words_and_what_was_made_is_kept(reference: Path) -> None:
    sent = []
    with pytest.raises(gr.Error, match="produced NaN"):
        for message, result in speak(handlers_of(FakeEngine(fails_after=2)), reference):
            sent.append(message)
            if message["state"] == "failed":
                with wave.open(result) as file:
                    assert file.getnframes() == 0.8 * RATE
    assert sent[-1]["state"] == "failed" and "produced NaN" in sent[-1]["message"]


def test_bad_input_is_told_without_a_path(tmp_path: Path, reference: Path) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF nonsense")
    handlers = handlers_of(FakeEngine())
    cases: list[tuple[Path | None, dict[str, Any], str]] = [
        (None, {}, "voice first"),
        (broken, {}, "broken.wav"),
        (reference, {"text": "  "}, "empty"),
        (reference, {"seed": "five"}, "whole number"),
        (reference, {"task": INSTRUCT}, "how it should be said"),
        (reference, {"task": CONVERT}, "whose words"),
    ]
    for voice, given, words in cases:
        with pytest.raises(gr.Error) as told:
            list(speak(handlers, voice, **given))
        assert words in told.value.message and str(tmp_path) not in told.value.message


def test_only_the_fields_of_the_task_reach_the_engine(reference: Path) -> None:
    engine = FakeEngine(seconds=0.1)
    given = {"transcript": "la", "instruction": "softly", "source": str(reference), "seed": " 5 ", "speed": 1.5}
    for task in (SAY, INSTRUCT, CONVERT):
        list(speak(handlers_of(engine), reference, task=task, **given))
    assert [request.mode for request in engine.requests] == [Mode.ZERO_SHOT, Mode.INSTRUCT, Mode.CONVERSION]
    said, instructed, converted = engine.requests
    assert (said.transcript, said.instruction, said.source, said.seed, said.speed) == ("la", None, None, 5, 1.5)
    assert (instructed.transcript, instructed.instruction) == (None, "softly")
    assert (converted.text, converted.transcript) == ("", None)


def test_each_task_shows_its_fields() -> None:
    shown = {task: [update["visible"] for update in show_fields(task)] for task in (SAY, INSTRUCT, CONVERT)}
    assert shown[SAY] == [True, False, False, True]  # transcript, instruction, source, text
    assert shown[INSTRUCT] == [False, True, False, True]
    assert shown[CONVERT] == [False, False, True, False]


def test_without_consent_nothing_is_cloned(reference: Path) -> None:
    engine = FakeEngine()
    with pytest.raises(gr.Error, match="belongs to a person"):
        list(speak(handlers_of(engine), reference, consent=False))
    assert engine.requests == []


def test_the_engine_gets_the_part_that_was_chosen(reference: Path) -> None:
    engine = FakeEngine(seconds=0.1)
    list(speak(handlers_of(engine), reference, part={"window": [0.5, 1.75]}))
    assert engine.requests[0].reference.seconds == pytest.approx(1.25 + 0.2)  # it ends in full sound
    assert not engine.requests[0].reference.samples[-RATE // 5 :].any()


def test_doubtful_words_are_questioned_once_before_the_engine_starts() -> None:
    engine = FakeEngine(seconds=0.1)
    handlers = handlers_of(engine)
    clip = Path(__file__).parents[1] / "audio" / "zero_shot_prompt.wav"
    good, wrong = "希望你以后能够做的比我还好呦。", "希望你以后能够做的比我还好呦。" * 5
    list(speak(handlers, clip, transcript=good))
    sent = []
    with pytest.raises(gr.Error, match="too many"):
        sent += [message for message, _ in speak(handlers, clip, transcript=wrong)]
    assert len(engine.requests) == 1
    list(speak(handlers, clip, transcript=wrong))  # the same once more is an answer
    stale = {"window": [0.0, 3.4], "stale_words": good}
    with pytest.raises(gr.Error, match="has changed"):
        list(speak(handlers, clip, transcript=good, part=stale))
    list(speak(handlers, clip, transcript=good, part=stale))
    list(speak(handlers, clip, transcript=good, part=stale | {"stale_words": None}))
    assert [request.transcript for request in engine.requests] == [good, wrong, good, good]


def test_control_tokens_that_were_typed_are_text(reference: Path) -> None:
    assert without_tokens("You are a helpful assistant.<|endofprompt|>Hello.") == "Hello."
    assert without_tokens("Hi <|endofprompt|> there, [laughter] you") == "Hi  endofprompt  there, [laughter] you"
    engine = FakeEngine(seconds=0.1)
    list(speak(handlers_of(engine), reference, text="a <|im_start|> b", transcript="<|x|>", consent=True))
    assert "<|" not in engine.requests[0].text + str(engine.requests[0].transcript)
    assert "brackets" in text_notices("a <|im_start|> b", "auto") and text_notices("Hello.", "auto") == ""


def test_sampling_is_the_checkpoints_own_until_it_is_changed(reference: Path) -> None:
    engine = FakeEngine(seconds=0.1)
    list(speak(handlers_of(engine), reference))
    list(speak(handlers_of(engine), reference, temperature=0.7, top_k=10))
    untouched, changed = (request.sampling for request in engine.requests)
    assert untouched is None
    assert changed == SamplingParams("ras", 0.7, 0.8, 10, window=10, repeat_threshold=0.1)


def test_the_chosen_language_reaches_the_engine(reference: Path) -> None:
    engine = FakeEngine(seconds=0.1)
    for language in ("auto", "de"):
        list(speak(handlers_of(engine), reference, text="Die 3 Tische.", language=language))
    assert [request.language for request in engine.requests] == ["auto", "de"]


def test_a_text_over_the_limit_is_refused_with_it(reference: Path) -> None:
    engine = FakeEngine()
    with pytest.raises(gr.Error, match="11 characters; shorten it to 10"):
        list(speak(handlers_of(engine, Settings(longest_text=10)), reference, text="Hello there"))
    assert engine.requests == []


def test_progress_goes_over_the_sentences(reference: Path) -> None:
    engine = FakeEngine(seconds=2.0, chunk_seconds=0.25, splits=True)
    text = "One is here. Two is here. Three is here. Four is here"
    made = [m["progress"] for m, _ in speak(handlers_of(engine), reference, text=text) if "progress" in m]
    assert [p["sentence"] for p in made] == [1, 1, 2, 2, 3, 3, 4, 4] and {p["sentences"] for p in made} == {4}
    fractions = [p["fraction"] for p in made]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and made[-1]["left"] >= 0


def test_a_finished_sentence_is_kept_when_the_page_is_gone_the_moment_it_was_sent(
    reference: Path, tmp_path: Path
) -> None:
    """Complaint 21. Gradio closes the generator where it stands: right after a chunk was sent."""
    settings = Settings(history=tmp_path)
    handlers = handlers_of(FakeEngine(seconds=2.0, chunk_seconds=0.5, splits=True), settings)
    messages = speak(handlers, reference, text="One. Two. Three. Four")
    for message, _ in messages:
        if message["state"] == "speaking" and message["index"] == 1:
            break
    messages.close()
    (entry,) = History(tmp_path).entries()
    assert [sentence.text for sentence in entry.sentences] == ["One", "Two"]
    assert entry.resumable and entry.ended is EndReason.CANCELLED


def test_a_history_that_cannot_be_written_ends_no_speech(reference: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    handlers = handlers_of(FakeEngine(seconds=0.4), Settings(history=tmp_path / "file"))
    *_, (last, wav) = speak(handlers, reference)
    assert last["state"] == "done" and wav and "cannot be written" in last["message"]


def test_the_pace_is_that_of_the_work_after_the_first_chunk(reference: Path) -> None:
    """A cost that is paid once made a short first chunk look slow, and the player wait for nothing."""
    handlers = handlers_of(FakeEngine(seconds=1.0, rtf=0.2, chunk_seconds=0.25, first_chunk_delay=0.4))
    paces = [[m["pace"] for m, _ in speak(handlers, reference) if m["state"] == "speaking"] for _ in range(2)]
    assert paces[0][0] is None  # nothing is known yet
    assert all(0.1 < pace < 0.6 for pace in paces[0][1:] + paces[1]), paces
