"""The functions behind the buttons.

`speak` yields small messages for the player (player.js): the state, and while it speaks PCM16 in base64 with the
figures so far. Its last yield also carries the finished files. One tab speaks one request at a time.
"""

import base64
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradio as gr

from app import languages
from app.audio_format import FILE_FORMATS, to_pcm16, write_sound
from app.figures import Progress, expected_seconds, figures, remarks
from app.reference_check import cut, transcript_doubt
from app.reference_handlers import Part, ReferenceHandlers, Shown
from app.settings import Settings
from runtime import (
    AudioClip,
    EndReason,
    Engine,
    GenerationError,
    RequestError,
    SamplingParams,
    SpeechError,
    SpeechRequest,
    SpeechStream,
    StreamStats,
    load_clip,
)

SAY, INSTRUCT, CONVERT = "say", "instruct", "convert"  # what the page offers; the engine's mode follows from the fields

Message = dict[str, Any]
_NO_FILES = (None,) * len(FILE_FORMATS)
_LATER = (gr.skip(),) * len(FILE_FORMATS)
_PASTED_PROMPT = re.compile(r"^\s*You are a helpful assistant\..{0,300}?<\|endofprompt\|>", re.DOTALL)
_CONTROL_TOKEN = re.compile(r"<\|\s*([^<>|]*?)\s*\|>")


class Question(RequestError):
    """Something looks wrong; the same click once more goes on."""


@dataclass
class Tab:
    """One open page. The browser numbers its jobs, rising: a newer one ends the older. Scripts leave them all at 0."""

    stopped_job: int = -1  # jobs up to this one must not speak
    job: int = -1
    stream: SpeechStream | None = None
    asked: tuple[object, ...] | None = None  # what the last question was about
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

    def ask(self, about: tuple[object, ...], question: str) -> None:
        """Raises the question, unless it was about the same the last time."""
        if self.asked != about:
            self.asked = about
            raise Question(question)


class Handlers:
    """Holds the engine and the open tabs. Gradio calls its methods from many threads."""

    def __init__(self, engine: Engine, settings: Settings, voices: ReferenceHandlers) -> None:
        self._engine = engine
        self._settings = settings
        self._voices = voices
        self._tabs: dict[str, Tab] = {}

    def speak(
        self,
        reference: str | None,
        part: Shown | None,
        consent: bool,
        task: str,
        transcript: str | None,
        instruction: str | None,
        source: str | None,
        text: str | None,
        language: str,
        speed: float,
        seed: str | None,
        temperature: float,
        top_p: float,
        top_k: float,
        trim: bool,
        normalize: bool,
        job: float,
        http: gr.Request,
    ) -> Iterator[tuple[Any, ...]]:
        """One click on Speak. Ends early, with what was made, when the tab stops it or goes away."""
        job, tab = int(job), self._tab(http)
        if job <= tab.stopped_job:  # Stop was pressed while it waited in line
            yield {"job": job, "state": "stopped", "message": ""}, *_NO_FILES
            return
        yield {"job": job, "state": "preparing"}, *_NO_FILES
        made, backlog = bytearray(), Backlog()
        try:
            voice = self._voice(reference, part, consent)
            words = _words(transcript) if task == SAY else ""
            if words:
                self._question_transcript(tab, words, voice, Part.of(part))
            request = SpeechRequest(
                reference=voice,
                text="" if task == CONVERT else self._text(text),
                transcript=without_tokens(words) or None,
                instruction=_instruction(instruction) if task == INSTRUCT else None,
                source=_clip(source, "add the recording whose words should be spoken") if task == CONVERT else None,
                sampling=self._sampling(temperature, top_p, int(top_k)),
                seed=_seed(seed),
                speed=speed,
                normalize=normalize and languages.is_normalized(language),
                trim=trim,
            )
            with self._engine.stream(request) as stream:
                tab.take(job, stream)
                for message in _messages(stream, expected_seconds(request), made, backlog):
                    yield {"job": job, **message}, *_LATER
            if not made and stream.stats.ended is not EndReason.CANCELLED:
                raise GenerationError("the model ended without a sound; try another seed or a longer text")
            with _files(made, stream.stats) as paths:
                yield {"job": job, "earlier": backlog.recent(), **_ending(stream.stats)}, *paths
        except SpeechError as error:
            state = "asked" if isinstance(error, Question) else "failed"
            with _files(made, stream.stats) if made else nullcontext(_NO_FILES) as paths:
                yield {"job": job, "earlier": backlog.recent(), "state": state, "message": str(error)}, *paths
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

    # What the fields say

    def _voice(self, reference: str | None, part: Shown | None, consent: bool) -> AudioClip:
        clip = _clip(reference, "add a voice first: upload or record a few seconds of somebody speaking")
        if not consent:
            raise RequestError("a voice belongs to a person: tick that it is yours or that its owner agrees")
        return cut(clip, Part.of(part).window)

    def _question_transcript(self, tab: Tab, words: str, voice: AudioClip, part: Part) -> None:
        stale = "The recording has changed since its words were written." if words == part.stale_words else None
        doubts = filter(None, (stale, transcript_doubt(words, self._voices.speech_seconds(voice))))
        if question := " ".join(doubts):
            tab.ask((words, part), question)

    def _text(self, written: str | None) -> str:
        text, limit = without_tokens(_words(written)), self._settings.longest_text
        if len(text) > limit:
            raise RequestError(f"the text has {len(text)} characters; shorten it to {limit} or speak it in parts")
        return text

    def _sampling(self, temperature: float, top_p: float, top_k: int) -> SamplingParams | None:
        """None where nothing was changed: then the checkpoint's own holds, its window and threshold included."""
        ras = self._engine.checkpoint.config.lm.ras
        if (temperature, top_p, top_k) == (1.0, ras.top_p, ras.top_k):
            return None
        return SamplingParams("ras", temperature, top_p, top_k, window=ras.win_size, repeat_threshold=ras.tau_r)


def without_tokens(text: str) -> str:
    """A control token that somebody typed is text: its brackets go, its word stays.

    A prompt that was pasted from elsewhere goes as a whole: nobody wants to hear it, and the front end adds its own.
    """
    return _CONTROL_TOKEN.sub(r" \1 ", _PASTED_PROMPT.sub("", text)).strip()


def text_notices(text: str | None, language: str) -> str:
    """What to know before a text is spoken, as Markdown lines."""
    said = languages.notices(_words(text), language)
    if without_tokens(_words(text)) != _words(text):
        said.append("Control tokens are not needed; what stands in their brackets is read as text.")
    return "\n\n".join(said)


def show_fields(task: str) -> tuple[Any, ...]:
    """Visibility of the transcript's box, instruction, source and text's box for what is to be done."""
    return tuple(
        gr.update(visible=shown) for shown in (task == SAY, task == INSTRUCT, task == CONVERT, task != CONVERT)
    )


class Backlog:
    """What was sent a moment ago and is sent again: of values that arrive together a busy page shows only the last."""

    CHUNKS, SECONDS = 8, 2.0

    def __init__(self) -> None:
        self._sent: deque[tuple[float, Message]] = deque(maxlen=self.CHUNKS)

    def add(self, chunk: Message) -> None:
        self._sent.append((time.monotonic(), chunk))

    def recent(self) -> list[Message]:
        now = time.monotonic()
        return [chunk for sent, chunk in self._sent if now - sent < self.SECONDS]


def _messages(stream: SpeechStream, expected: float, made: bytearray, backlog: Backlog) -> Iterator[Message]:
    """What the player gets while the stream speaks; the PCM16 of it is added to `made`."""
    began = time.monotonic()
    progress = Progress([sentence.text for sentence in stream.speech.sentences], expected)
    for chunk in stream:
        pcm = to_pcm16(chunk.samples)
        made += pcm
        seconds = len(made) / 2 / chunk.sample_rate
        encoded: Message = {
            "index": chunk.index,
            "rate": chunk.sample_rate,
            "pcm": base64.b64encode(pcm).decode("ascii"),
            "last": chunk.is_last,
            "pace": (time.monotonic() - began) / seconds if made else None,  # seconds of work per second of sound
            "expected": expected,  # seconds
        }
        earlier = backlog.recent()
        backlog.add(encoded)
        yield {
            "state": "speaking",
            **encoded,
            "earlier": earlier,
            "progress": progress.after(chunk),
            "figures": figures(stream.stats),
        }


def _ending(stats: StreamStats) -> Message:
    state = "stopped" if stats.ended is EndReason.CANCELLED else "done"
    return {"state": state, "message": " · ".join(remarks(stats)), "figures": figures(stats)}


@contextmanager
def _files(pcm: bytearray, stats: StreamStats) -> Iterator[tuple[str | None, ...]]:
    """Paths that live as long as the block: Gradio copies them into its own cache, which it empties itself."""
    if not pcm:
        yield _NO_FILES
        return
    with TemporaryDirectory(prefix="mynah-") as folder:
        paths = [Path(folder) / f"mynah-{stats.seed}.{name}" for name in FILE_FORMATS]
        for path in paths:
            write_sound(path, bytes(pcm), stats.sample_rate, f"Seed {stats.seed}, {stats.mode.value}.")
        yield tuple(map(str, paths))


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
    instruction = without_tokens(_words(written))
    if not instruction:
        raise RequestError("write how it should be said, or choose to speak the text as it is")
    return instruction
