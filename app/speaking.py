"""A stream as messages for the player (player.js): the state, and while it speaks PCM16 in base64 with the figures.

What is spoken is kept in the history sentence by sentence. The last message comes with the finished files and the
list of sentences. One tab speaks one request at a time.
"""

import base64
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradio as gr
import soundfile

from app.audio_format import FILE_FORMATS, to_pcm16, write_sound
from app.figures import Pace, Progress, figures, remarks
from app.history import Keeping
from app.history_entry import Entry
from app.script import ScriptStream
from runtime import (
    AudioChunk,
    EndReason,
    Engine,
    GenerationError,
    RequestError,
    SpeechError,
    SpeechStream,
    StreamStats,
    expected_seconds,
)

Message = dict[str, Any]
Outputs = tuple[Any, ...]  # message, files in each format, sentences

_LATER = (gr.skip(),) * (len(FILE_FORMATS) + 1)
_NO_FILES = (None,) * len(FILE_FORMATS)


class Question(RequestError):
    """Something looks wrong; the same click once more goes on."""


@dataclass
class Tab:
    """One open page. The browser numbers its jobs, rising: a newer one ends the older. Scripts leave them all at 0."""

    stopped_job: int = -1  # jobs up to this one must not speak
    job: int = -1
    stream: SpeechStream | ScriptStream | None = None
    asked: tuple[object, ...] | None = None  # what the last question was about
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, job: int, stream: SpeechStream | ScriptStream) -> None:
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


class Tabs:
    """The open tabs. Gradio calls from many threads."""

    def __init__(self) -> None:
        self._tabs: dict[str, Tab] = {}

    def of(self, http: gr.Request) -> Tab:
        return self._tabs.setdefault(str(http.session_hash), Tab())

    def leave(self, http: gr.Request) -> None:
        """The tab was closed: nobody listens any more."""
        tab = self._tabs.pop(str(http.session_hash), None)
        if tab is not None and tab.stream is not None:
            tab.stream.close()


@dataclass
class Job:
    """What is about to be spoken, and where it is kept."""

    stream: SpeechStream | ScriptStream
    expected: float  # seconds
    keeping: Keeping | None = None
    note: str = ""  # what to know besides, as when nothing can be kept


Finish = Callable[[Job, bytes], tuple[bytes, Entry | None]]  # the sound of the files and the entry that is shown


def whole_of_the_stream(job: Job, made: bytes) -> tuple[bytes, Entry | None]:
    return made, job.keeping.entry if job.keeping else None


class Speaker:
    """Speaks jobs of one engine, and remembers how fast it is."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pace: float | None = None  # seconds of work per second of sound, of the last job

    @property
    def judges_lengths(self) -> bool:
        """Whether a length tells something: sound of untrained weights is as long as it is."""
        return self._engine.checkpoint.makes_speech

    def perform(
        self, tab: Tab, number: int, opening: Callable[[], Job], finish: Finish = whole_of_the_stream
    ) -> Iterator[Outputs]:
        """Speaks one job. Ends early, with what was made, when the tab stops it or goes away."""
        if number <= tab.stopped_job:  # Stop was pressed while it waited in line
            yield {"job": number, "state": "stopped", "message": ""}, *_NO_FILES, {}
            return
        yield {"job": number, "state": "preparing"}, *_NO_FILES, {}
        made, backlog, job = bytearray(), Backlog(), None
        try:
            with ExitStack() as opened:
                job = opening()
                opened.enter_context(job.stream)
                if job.keeping is not None:
                    opened.enter_context(job.keeping)
                tab.take(number, job.stream)
                for message in self._messages(job, made, backlog):
                    yield {"job": number, **message}, *_LATER
            if not made and job.stream.stats.ended is not EndReason.CANCELLED:
                raise GenerationError("the model ended without a sound; try another seed or a longer text")
            pcm, entry = finish(job, bytes(made))
            with files(pcm, job.stream.stats) as paths:
                shown = sentences(entry, self.judges_lengths)
                yield {"job": number, "earlier": backlog.recent(), **_ending(job, shown)}, *paths, shown
        except SpeechError as error:
            kept = job.keeping.entry if job is not None and job.keeping is not None else None
            with files(bytes(made), job.stream.stats) if job is not None else nullcontext(_NO_FILES) as paths:
                state = "asked" if isinstance(error, Question) else "failed"
                message = {"job": number, "earlier": backlog.recent(), "state": state, "message": str(error)}
                yield message, *paths, sentences(kept, self.judges_lengths)
            # The panel shows it in place.
            raise gr.Error(str(error), visible=False, print_exception=False) from error

    def _messages(self, job: Job, made: bytearray, backlog: "Backlog") -> Iterator[Message]:
        """What the player gets while the stream speaks; the PCM16 of it is added to `made`."""
        stats = job.stream.stats
        progress = Progress([sentence.text for sentence in stats.spoken] or [""] * stats.sentences, job.expected)
        pace = Pace(self._pace)
        for chunk in job.stream:
            pcm = to_pcm16(chunk.samples)
            made += pcm
            encoded = encode(pcm, chunk) | {"pace": pace.after(chunk), "expected": job.expected}
            message = {"earlier": backlog.recent(), "progress": progress.after(chunk), "figures": figures(stats)}
            backlog.add(encoded)
            try:
                yield {"state": "speaking", **encoded, **message}
            finally:  # even if the page is gone; after it was sent, as writing must not hold up what is to be heard
                if job.keeping is not None:
                    job.keeping.take(chunk)
        self._pace = pace.measured or self._pace


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


def encode(pcm: bytes, chunk: AudioChunk) -> Message:
    encoded = base64.b64encode(pcm).decode("ascii")
    return {"index": chunk.index, "rate": chunk.sample_rate, "pcm": encoded, "last": chunk.is_last}


def _ending(job: Job, shown: Message) -> Message:
    stats = job.stream.stats
    said = [*remarks(stats), *filter(None, (job.note, job.keeping.problem if job.keeping else None))]
    if any(sentence["odd"] for sentence in shown.get("sentences", ())):
        said.append("a sentence is too short or too long for its text; listen to it below and say it again")
    state = "stopped" if stats.ended is EndReason.CANCELLED else "done"
    return {"state": state, "message": " · ".join(said), "figures": figures(stats)}


def sentences(entry: Entry | None, judge_lengths: bool) -> Message:
    """What the list of sentences shows of an entry. Lengths are judged where the weights were trained."""
    if entry is None or not entry.sentences or entry.mode == "voice conversion":
        return {}
    speed = float(entry.settings["speed"])
    return {
        "id": entry.id,
        "sentences": [
            {
                "index": sentence.index,
                "text": sentence.written or sentence.text,
                "seconds": sentence.samples / entry.sample_rate,
                "expected": expected_seconds(sentence.text, speed),
                "odd": judge_lengths and sentence.odd_length,
                "again": sentence.seed is not None,
            }
            for sentence in entry.sentences
        ],
    }


@contextmanager
def files(pcm: bytes, stats: StreamStats) -> Iterator[tuple[str | None, ...]]:
    """Paths that live as long as the block: Gradio copies them into its own cache, which it empties itself."""
    if not pcm:
        yield _NO_FILES
        return
    with TemporaryDirectory(prefix="mynah-") as folder:
        paths = [Path(folder) / f"mynah-{stats.seed}.{name}" for name in FILE_FORMATS]
        for path in paths:
            write_sound(path, pcm, stats.sample_rate, f"Seed {stats.seed}, {stats.mode.value}.")
        yield tuple(map(str, paths))


def read_pcm16(path: Path) -> bytes:
    return soundfile.read(path, dtype="int16")[0].astype("<i2").tobytes()
