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
from app.ui_handlers import CONVERT, INSTRUCT, SAY, Handlers, import_recording, judge_reference, show_fields
from runtime import Mode
from tests.app.fake_engine import RATE, FakeEngine, tone

TAB = SimpleNamespace(session_hash="one tab")


def speak(
    handlers: Handlers, reference: Path | None, job: int = 1, **given: Any
) -> Iterator[tuple[dict[str, Any], Any]]:
    fields = {"task": SAY, "transcript": "", "instruction": "", "source": None, "text": "Hello.", "speed": 1.0}
    fields |= {"seed": "", "trim": False, "normalize": True, "job": job, "http": TAB} | given
    return handlers.speak(str(reference) if reference else None, **fields)


def test_messages_carry_every_sample_in_order_and_the_last_one_the_file(reference: Path) -> None:
    handlers = Handlers(FakeEngine(seconds=1.0))
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
    messages = speak(Handlers(engine), reference)
    next(messages), next(messages)
    messages.close()
    assert engine.streams[0].closed_at is not None


def test_stop_ends_a_stream_that_is_between_chunks_and_keeps_what_was_made(reference: Path) -> None:
    engine = FakeEngine(seconds=60, rtf=1.0, chunk_seconds=0.2)
    handlers = Handlers(engine)
    messages = speak(handlers, reference, job=7)
    next(messages), next(messages)
    threading.Timer(0.05, handlers.stop, (7, TAB)).start()
    message, result = next(messages)
    assert message["state"] == "stopped" and message["figures"]["ended"] == "cancelled"
    with wave.open(result) as file:
        assert file.getnframes() == 0.2 * RATE


def test_stop_keeps_a_job_in_line_from_speaking(reference: Path) -> None:
    engine = FakeEngine()
    handlers = Handlers(engine)
    handlers.stop(7, TAB)
    assert [message["state"] for message, _ in speak(handlers, reference, job=7)] == ["stopped"]
    assert engine.streams == []
    assert [message["state"] for message, _ in speak(handlers, reference, job=8)][-1] == "done"


def test_newer_click_of_a_tab_ends_the_older_one(reference: Path) -> None:
    engine = FakeEngine()
    handlers = Handlers(engine)
    older, newer = speak(handlers, reference, job=1), speak(handlers, reference, job=2)
    next(older), next(older)
    next(newer), next(newer)
    assert next(older)[0]["state"] == "stopped"
    assert next(newer)[0]["state"] == "speaking"


def test_tabs_do_not_stop_each_other(reference: Path) -> None:
    handlers = Handlers(FakeEngine())
    mine = speak(handlers, reference, job=1)
    next(mine), next(mine)
    handlers.stop(9, SimpleNamespace(session_hash="another tab"))
    assert [message["state"] for message, _ in mine][-1] == "done"


def test_closing_the_tab_closes_its_stream(reference: Path) -> None:
    engine = FakeEngine()
    handlers = Handlers(engine)
    messages = speak(handlers, reference)
    next(messages), next(messages)
    handlers.leave(TAB)
    assert engine.streams[0].closed_at is not None
    handlers.leave(TAB)


def test_a_failure_is_told_in_our_words_and_what_was_made_is_kept(reference: Path) -> None:
    sent = []
    with pytest.raises(gr.Error, match="produced NaN"):
        for message, result in speak(Handlers(FakeEngine(fails_after=2)), reference):
            sent.append(message)
            if message["state"] == "failed":
                with wave.open(result) as file:
                    assert file.getnframes() == 0.8 * RATE
    assert sent[-1]["state"] == "failed" and "produced NaN" in sent[-1]["message"]


def test_bad_input_is_told_without_a_path(tmp_path: Path, reference: Path) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF nonsense")
    handlers = Handlers(FakeEngine())
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
        list(speak(Handlers(engine), reference, task=task, **given))
    assert [request.mode for request in engine.requests] == [Mode.ZERO_SHOT, Mode.INSTRUCT, Mode.CONVERSION]
    said, instructed, converted = engine.requests
    assert (said.transcript, said.instruction, said.source, said.seed, said.speed) == ("la", None, None, 5, 1.5)
    assert (instructed.transcript, instructed.instruction) == (None, "softly")
    assert (converted.text, converted.transcript) == ("", None)


def test_a_recording_is_judged_when_it_arrives(tmp_path: Path, reference: Path) -> None:
    broken = tmp_path / "<b>.wav"
    broken.write_bytes(b"")
    assert "2.0 s at 24 kHz" in judge_reference(str(reference))
    assert 'role="alert"' in judge_reference(str(broken)) and "&lt;b&gt;" in judge_reference(str(broken))
    assert judge_reference(None) == ""
    with pytest.raises(gr.Error, match="empty"):
        import_recording(str(broken))
    assert import_recording(str(reference))[0] == RATE


def test_each_task_shows_its_fields() -> None:
    shown = {task: [update["visible"] for update in show_fields(task)] for task in (SAY, INSTRUCT, CONVERT)}
    assert shown[SAY] == [True, False, False, True]  # transcript, instruction, source, text
    assert shown[INSTRUCT] == [False, True, False, True]
    assert shown[CONVERT] == [False, False, True, False]
