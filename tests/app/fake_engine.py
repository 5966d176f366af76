"""The engine's surface with a tone instead of a model: player, page and command are tested at any speed, in seconds."""

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from runtime import (
    AudioChunk,
    AudioClip,
    EndReason,
    GenerationError,
    PlannedSentence,
    RequestError,
    SamplingParams,
    SpeechPlan,
    SpeechRequest,
    SpokenSentence,
    StreamStats,
)

RATE = 24_000


@dataclass
class FakeEngine:
    """Speaks 440 Hz. `rtf` is the seconds of work per second of sound; chunks are `chunk_seconds` long."""

    seconds: float = 2.0
    rtf: float = 0.0
    chunk_seconds: float = 0.4
    first_chunk_delay: float = 0.0
    fails_after: int | None = None  # chunks
    failure: BaseException = field(default_factory=lambda: GenerationError("the model produced NaN; try another seed"))
    makes_speech: bool = False
    splits: bool = False  # into sentences of equal length, at every ". ", and tells of them
    expects: float = 1.0  # seconds of each sentence
    streams: list["FakeStream"] = field(default_factory=list)
    requests: list[SpeechRequest] = field(default_factory=list)
    closed: bool = False

    @property
    def checkpoint(self) -> SimpleNamespace:
        ras = SimpleNamespace(top_p=0.8, top_k=25, win_size=10, tau_r=0.1)
        return SimpleNamespace(
            makes_speech=self.makes_speech, is_demo=False, config=SimpleNamespace(lm=SimpleNamespace(ras=ras))
        )

    def memory(self) -> str:
        return "0.5 GB"

    def describe(self) -> dict[str, str]:
        return {"model": "fake", "device": "cpu"}

    def prepare(self, request: SpeechRequest) -> None:
        if request.source is None and not request.text.strip():
            raise RequestError("the text is empty; write what should be spoken")
        if request.reference.seconds > 30 and not request.trim:
            raise RequestError(f"reference is {request.reference.seconds:.1f} s long; cut it to 30 s or less")

    def stream(self, request: SpeechRequest) -> "FakeStream":
        self.prepare(request)
        self.requests.append(request)
        stream = FakeStream(self, request)
        self.streams.append(stream)
        return stream

    def plan(self, request: SpeechRequest) -> SpeechPlan:
        self.prepare(request)
        sentences = [PlannedSentence(text, text, 1.0, 0.0, 0.0) for text in self.cut(request)]
        return SpeechPlan(request.mode, tuple(sentences), ())

    def cut(self, request: SpeechRequest) -> list[str]:
        return request.text.split(". ")[request.first_sentence :] if self.splits else [request.text]

    def speaker_vector(self, clip: AudioClip) -> np.ndarray:
        return np.ones(4, np.float32)

    def close(self) -> None:
        self.closed = True


class FakeStream:
    def __init__(self, engine: FakeEngine, request: SpeechRequest) -> None:
        self._engine = engine
        self._closed = threading.Event()
        self._started_at = time.monotonic()
        self.first_at: float | None = None  # epoch seconds, like the next
        self.closed_at: float | None = None
        seed = request.seed if request.seed is not None else 7
        texts = engine.cut(request)
        self.stats = StreamStats(request.mode, seed, SamplingParams(), sentences=len(texts), sample_rate=RATE)
        if engine.splits:
            self.stats.spoken = [SpokenSentence(text, engine.expects, RATE, text) for text in texts]

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> "FakeStream":
        return self

    def __next__(self) -> AudioChunk:
        engine, stats = self._engine, self.stats
        total, size = int(engine.seconds * RATE), int(engine.chunk_seconds * RATE)
        done = stats.samples >= total
        delay = engine.rtf * engine.chunk_seconds + (engine.first_chunk_delay if stats.chunks == 0 else 0.0)
        if done or self._closed.wait(delay) or stats.ended:
            self._end(EndReason.STOP if done else EndReason.CANCELLED)
            raise StopIteration
        if stats.chunks == engine.fails_after:
            self._end(EndReason.ERROR)
            raise engine.failure
        samples = tone(stats.samples, min(size, total - stats.samples))
        if stats.first_audio_seconds is None:
            stats.first_audio_seconds = time.monotonic() - self._started_at
            self.first_at = time.time()
        sentence = stats.samples * stats.sentences // total
        if engine.splits:
            border = -(-(sentence + 1) * total // stats.sentences)  # chunks end where sentences do
            samples = samples[: border - stats.samples]
            spoken = stats.spoken[sentence]
            spoken.start = spoken.start if spoken.samples else stats.samples
            spoken.samples += len(samples)
            spoken.complete = stats.samples + len(samples) == border
        chunk = AudioChunk(samples, RATE, stats.chunks, sentence, stats.samples + len(samples) == total)
        stats.chunks += 1
        stats.samples += len(samples)
        stats.tokens += len(samples) // 960
        return chunk

    def close(self) -> None:
        self._closed.set()
        self._end(EndReason.CANCELLED)

    def _end(self, reason: EndReason) -> None:
        if self.stats.ended is None:
            self.closed_at = time.time()
            self.stats.ended = reason
            self.stats.total_seconds = time.monotonic() - self._started_at


def tone(start: int, length: int) -> np.ndarray:
    """440 Hz at half of full scale, its phase continuous over `start`."""
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(start, start + length) / RATE)).astype(np.float32)
