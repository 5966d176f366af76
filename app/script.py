"""A script for several voices, one line after the other, heard as one stream.

# blank lines and comments are left out
Ada: Where have you been?
Bob: [pause 0.5s] At the sea.
"""

import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np

from app.voices import Voice, VoiceLibrary
from runtime import (
    AudioChunk,
    AudioClip,
    EndReason,
    Engine,
    RequestError,
    SpeechError,
    SpeechRequest,
    SpeechStream,
    StreamStats,
    loudness,
)

MOST_LINES = 1000
LINE_PAUSE_SECONDS = 0.4  # between lines; people take turns at about that distance

_LINE = re.compile(r"([^:：]+)[:：]\s*(.*\S)")


@dataclass(frozen=True, slots=True)
class Line:
    """Who says what. Numbers count from 1, as editors do."""

    number: int
    voice: str
    text: str


def parse_script(text: str) -> list[Line]:
    """The lines of a script. Raises RequestError with the number of the line that is none."""
    lines = []
    for number, written in enumerate(text.splitlines(), 1):
        if not written.strip() or written.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(written.strip())
        if found is None:
            raise RequestError(f"line {number} of the script is {written.strip()[:40]!r}; write NAME: text")
        lines.append(Line(number, found[1].strip(), found[2]))
    if not lines:
        raise RequestError("the script is empty; write lines such as NAME: text")
    if len(lines) > MOST_LINES:
        raise RequestError(f"the script has {len(lines)} lines; cut it at {MOST_LINES}")
    return lines


def script_requests(
    lines: Sequence[Line], library: VoiceLibrary, make: Callable[[AudioClip, Voice, str], SpeechRequest]
) -> list[SpeechRequest]:
    """A request for each line; `make` builds it from the voice's recording, what is known of it, and the text."""
    voices: dict[str, tuple[AudioClip, Voice]] = {}
    requests = []
    for line in lines:
        try:
            if line.voice not in voices:
                voices[line.voice] = library.clip(line.voice), library.find(line.voice)
        except RequestError as unknown:
            raise RequestError(f"line {line.number} of the script: {unknown}") from unknown
        requests.append(make(*voices[line.voice], line.text))
    return requests


def locate(engine: Engine, requests: Sequence[SpeechRequest], sentence: int) -> tuple[int, int]:
    """Which request a sentence of the whole belongs to, and which of its sentences it is; both count from 0."""
    before = sentence
    for number, request in enumerate(requests):
        count = len(engine.plan(request).sentences)
        if before < count:
            return number, before
        before -= count
    raise RequestError(f"the script has no sentence {sentence + 1}; was it changed?")


def remaining(engine: Engine, requests: Sequence[SpeechRequest], done: int) -> tuple[list[SpeechRequest], bool]:
    """What is left of a script after so many sentences, and whether it begins with the pause between lines."""
    number, first = locate(engine, requests, done)
    rest = [replace(requests[number], first_sentence=first), *requests[number + 1 :]]
    return rest, number > 0 and first == 0


class VoiceLeveller:
    """Brings voices to one loudness: recordings differ by 8 LU and more, and what is cloned from them likewise.

    Each voice keeps the gain that it gets with its first chunk, so that its own lines stay as they are to each other.
    `target` is the loudness of the first voice, unless it was given.
    """

    MOST_DB = 9.0
    HIGHEST_PEAK = 0.7  # of a first chunk; what comes after it may be louder

    def __init__(self, sample_rate: int, target_lufs: float | None) -> None:
        self._sample_rate = sample_rate
        self.target_lufs = target_lufs
        self._gains: dict[AudioClip, float] = {}

    def apply(self, samples: np.ndarray, voice: AudioClip) -> np.ndarray:
        if voice not in self._gains and samples.any():
            heard = loudness(samples, self._sample_rate)
            self.target_lufs = heard if self.target_lufs is None else self.target_lufs
            change = min(self.MOST_DB, max(-self.MOST_DB, self.target_lufs - heard))
            loudest = max(1.0, self.HIGHEST_PEAK / float(np.abs(samples).max()))
            self._gains[voice] = min(loudest, 10 ** (change / 20))
        gain = self._gains.get(voice, 1.0)
        return samples if gain == 1.0 else samples * np.float32(gain)


class ScriptStream:
    """Requests that are spoken one after the other, with the surface of a `SpeechStream`.

    All are prepared at once, so that a line that cannot be spoken is told before the first is heard. The figures are
    those of the whole, `stats.seed` that of the first line.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[SpeechRequest],
        pause_seconds: float = LINE_PAUSE_SECONDS,
        opens_with_pause: bool = False,
        level_lufs: float | None = None,
    ) -> None:
        self._streams: list[SpeechStream] = []
        for number, request in enumerate(requests, 1):
            try:
                self._streams.append(engine.stream(request))
            except RequestError as wrong:
                raise RequestError(f"spoken line {number}: {wrong}") from wrong
        parts = [stream.stats for stream in self._streams]
        self.stats: StreamStats = replace(
            parts[0],
            sentences=sum(part.sentences for part in parts),
            spoken=[replace(sentence) for part in parts for sentence in part.spoken],
            warnings=[f"line {n}: {told}" for n, part in enumerate(parts, 1) for told in part.warnings],
            length_capped=[],
        )
        self._pause = np.zeros(round(pause_seconds * self.stats.sample_rate), np.float32)
        self._opens_with_pause = opens_with_pause
        self._voices = [request.reference for request in requests]
        self._leveller = VoiceLeveller(self.stats.sample_rate, level_lufs)
        self._lock = threading.Lock()
        self._current: SpeechStream | None = None
        self._chunks = self._speak()

    def __enter__(self) -> "ScriptStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._chunks.close()

    def __iter__(self) -> Iterator[AudioChunk]:
        return self._chunks

    def close(self) -> None:
        """Ends the line being spoken and all that follow. Any thread may call it."""
        self._end(EndReason.CANCELLED)
        if self._current is not None:
            self._current.close()

    def _speak(self) -> Generator[AudioChunk, None, None]:
        first_sentence = 0
        for number, stream in enumerate(self._streams):
            with self._lock:
                if self.stats.ended is not None:
                    return
                self._current = stream
            pauses = number > 0 or self._opens_with_pause
            began = self.stats.samples + (len(self._pause) if pauses else 0)
            try:
                with stream:
                    for chunk in stream:
                        opens = pauses and chunk.index == 0
                        ends = chunk.is_last and number + 1 == len(self._streams)
                        chunk = replace(chunk, samples=self._leveller.apply(chunk.samples, self._voices[number]))
                        self.stats.level_lufs = self._leveller.target_lufs
                        yield self._take(chunk, stream.stats, began, first_sentence, opens, ends)
            except SpeechError:
                self._end(EndReason.ERROR)
                raise
            self._add(stream.stats, first_sentence)
            first_sentence += stream.stats.sentences
        self._end(EndReason.LENGTH if self.stats.length_capped else EndReason.STOP)

    def _take(
        self, chunk: AudioChunk, part: StreamStats, began: int, first_sentence: int, opens: bool, ends: bool
    ) -> AudioChunk:
        """A chunk of a line as one of the whole."""
        stats = self.stats
        if stats.first_audio_seconds is None:
            stats.first_audio_seconds = part.first_audio_seconds
        samples = np.concatenate([self._pause, chunk.samples]) if opens else chunk.samples
        sentence = first_sentence + chunk.sentence
        if chunk.sentence < len(part.spoken):
            spoken = part.spoken[chunk.sentence]
            stats.spoken[sentence] = replace(spoken, start=began + spoken.start)
        whole = AudioChunk(samples, chunk.sample_rate, stats.chunks, sentence, ends)
        stats.chunks += 1
        stats.samples += len(samples)
        return whole

    def _add(self, part: StreamStats, first_sentence: int) -> None:
        """Adds the figures of a line that has ended."""
        stats = self.stats
        stats.total_seconds = part.total_seconds  # all were asked for together
        stats.stage0_seconds += part.stage0_seconds
        stats.stage1_seconds += part.stage1_seconds
        stats.tokens += part.tokens
        stats.dropped_tokens += part.dropped_tokens
        stats.clipped_samples += part.clipped_samples
        stats.length_capped += [first_sentence + sentence for sentence in part.length_capped]

    def _end(self, reason: EndReason) -> None:
        with self._lock:
            if self.stats.ended is None:
                self.stats.ended = reason
