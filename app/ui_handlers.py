"""The functions behind the buttons.

`speak` yields small messages for the player (player.js): the state, and while it speaks PCM16 in base64 with the
figures so far. Its last yield also carries the finished WAV. One tab speaks one request at a time.
"""

import base64
import html
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradio as gr
import numpy as np

from app.audio_format import to_pcm16, wav_file
from app.figures import expected_seconds, figures, remarks
from runtime import (
    AudioClip,
    EndReason,
    Engine,
    GenerationError,
    RequestError,
    SpeechError,
    SpeechRequest,
    SpeechStream,
    StreamStats,
    load_clip,
)

SAY, INSTRUCT, CONVERT = "say", "instruct", "convert"  # what the page offers; the engine's mode follows from the fields

Message = dict[str, Any]


@dataclass
class Tab:
    """One open page. The browser numbers its jobs, rising: a newer one ends the older. Scripts leave them all at 0."""

    stopped_job: int = -1  # jobs up to this one must not speak
    job: int = -1
    stream: SpeechStream | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, job: int, stream: SpeechStream) -> None:
        """Makes `stream` the tab's own; it is closed at once when Stop was pressed before it was ready."""
        with self.lock:
            former = self.stream if self.job < job else None
            self.job, self.stream = job, stream
            stopped = job <= self.stopped_job
        if former is not None:
            former.close()
        if stopped:
            stream.close()

    def stop(self, job: int) -> None:
        with self.lock:
            self.stopped_job = max(self.stopped_job, job)
            stream = self.stream if self.job <= job else None
        if stream is not None:
            stream.close()


class Handlers:
    """Holds the engine and the open tabs. Gradio calls its methods from many threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tabs: dict[str, Tab] = {}

    def speak(
        self,
        reference: str | None,
        task: str,
        transcript: str | None,
        instruction: str | None,
        source: str | None,
        text: str | None,
        speed: float,
        seed: str | None,
        trim: bool,
        normalize: bool,
        job: float,
        http: gr.Request,
    ) -> Iterator[tuple[Message, Any]]:
        """One click on Speak. Ends early, with what was made, when the tab stops it or goes away."""
        job, tab = int(job), self._tab(http)
        if job <= tab.stopped_job:  # Stop was pressed while it waited in line
            yield {"job": job, "state": "stopped", "message": ""}, None
            return
        yield {"job": job, "state": "preparing"}, None
        made = bytearray()
        try:
            request = SpeechRequest(
                reference=_clip(reference, "add a voice first: upload or record a few seconds of somebody speaking"),
                text="" if task == CONVERT else _words(text),
                transcript=_words(transcript) or None if task == SAY else None,
                instruction=_instruction(instruction) if task == INSTRUCT else None,
                source=_clip(source, "add the recording whose words should be spoken") if task == CONVERT else None,
                seed=_seed(seed),
                speed=speed,
                normalize=normalize,
                trim=trim,
            )
            with self._engine.stream(request) as stream:
                tab.take(job, stream)
                for message in _messages(stream, expected_seconds(request), made):
                    yield {"job": job, **message}, gr.skip()
            if not made and stream.stats.ended is not EndReason.CANCELLED:
                raise GenerationError("the model ended without a sound; try another seed or a longer text")
            with _file(made, stream.stats) as path:
                yield {"job": job, **_ending(stream.stats)}, path
        except SpeechError as error:
            with _file(made, stream.stats) if made else nullcontext() as path:
                yield {"job": job, "state": "failed", "message": str(error)}, path
            raise gr.Error(str(error), visible=False, print_exception=False) from error  # the panel shows it in place

    def stop(self, job: float, http: gr.Request) -> None:
        """Ends the tab's stream at once, or keeps a job that still waits in line from speaking."""
        self._tab(http).stop(int(job))

    def leave(self, http: gr.Request) -> None:
        """The tab was closed: nobody listens any more."""
        tab = self._tabs.pop(str(http.session_hash), None)
        if tab is not None and tab.stream is not None:
            tab.stream.close()

    def _tab(self, http: gr.Request) -> Tab:
        return self._tabs.setdefault(str(http.session_hash), Tab())


def judge_reference(path: str | None) -> str:
    """What is known of a recording at upload, as HTML; a broken file is told here and not after the click."""
    if path is None:
        return ""
    try:
        clip = load_clip(Path(path))
    except RequestError as error:
        return f'<div class="mynah-verdict bad" role="alert">{html.escape(str(error))}</div>'
    return f'<div class="mynah-verdict">{clip.seconds:.1f} s at {clip.sample_rate / 1000:g} kHz</div>'


def import_recording(path: str) -> tuple[int, np.ndarray]:
    """Sound of a file that the browser does not take for audio, such as webm or mp4, as samples for gr.Audio."""
    try:
        clip = load_clip(Path(path))
    except RequestError as error:
        raise gr.Error(str(error), title="Not a recording", print_exception=False) from error
    return clip.sample_rate, np.frombuffer(to_pcm16(clip.samples), "<i2")


def show_fields(task: str) -> tuple[Any, ...]:
    """Visibility of transcript, instruction, source and text for what is to be done."""
    return tuple(
        gr.update(visible=shown) for shown in (task == SAY, task == INSTRUCT, task == CONVERT, task != CONVERT)
    )


def _messages(stream: SpeechStream, expected: float, made: bytearray) -> Iterator[Message]:
    """What the player gets while the stream speaks; the PCM16 of it is added to `made`."""
    began = time.monotonic()
    for chunk in stream:
        pcm = to_pcm16(chunk.samples)
        made += pcm
        seconds = len(made) / 2 / chunk.sample_rate
        yield {
            "state": "speaking",
            "index": chunk.index,
            "rate": chunk.sample_rate,
            "pcm": base64.b64encode(pcm).decode("ascii"),
            "pace": (time.monotonic() - began) / seconds if made else None,  # seconds of work per second of sound
            "expected": expected,  # seconds
            "last": chunk.is_last,
            "figures": figures(stream.stats),
        }


def _ending(stats: StreamStats) -> Message:
    state = "stopped" if stats.ended is EndReason.CANCELLED else "done"
    return {"state": state, "message": "; ".join(remarks(stats)), "figures": figures(stats)}


@contextmanager
def _file(pcm: bytearray, stats: StreamStats) -> Iterator[str | None]:
    """Path of a WAV that lives as long as the block: Gradio copies it into its own cache, which it empties itself."""
    if not pcm:
        yield None
        return
    with TemporaryDirectory(prefix="mynah-") as folder:
        path = Path(folder) / f"mynah-{stats.seed}.wav"
        with wav_file(path, stats.sample_rate) as file:
            file.writeframes(bytes(pcm))
        yield str(path)


def _clip(path: str | None, missing: str) -> AudioClip:
    if path is None:
        raise RequestError(missing)
    return load_clip(Path(path))


def _words(written: str | None) -> str:
    """What was written into a field; one that was never shown holds None."""
    return (written or "").strip()


def _seed(written: str | None) -> int | None:
    try:
        return int(_words(written)) if _words(written) else None
    except ValueError:
        raise RequestError(f"the seed is {written!r}; write a whole number, or nothing for a new one") from None


def _instruction(written: str | None) -> str:
    if not _words(written):
        raise RequestError("write how it should be said, or choose to speak the text as it is")
    return _words(written)
