"""What page and command say about a stream: how long it may get, its figures, and what its checkpoint can do."""

import time
import unicodedata
from collections.abc import Sequence
from typing import TypedDict

from runtime import OFFICIAL, AudioChunk, Checkpoint, EndReason, SpeechRequest, StreamStats

NOISE_NOTICE = (
    f"These weights are untrained: what you hear is noise, not speech. For a voice, start with --model {OFFICIAL}"
)
DEMO_NOTICE = (
    "This is the small demo voice: English only, and rougher than the full model. "
    f"For that, start with --model {OFFICIAL}"
)

_LETTERS_PER_SECOND = 14.0
_IDEOGRAPHS_PER_SECOND = 4.5


class Figures(TypedDict):
    """Figures of one stream, so far or at its end. Times in seconds from the moment the engine got the request."""

    mode: str
    seed: int
    first_audio: float | None
    rtf: float | None
    seconds: float
    tokens: int
    ended: str | None


def notice(checkpoint: Checkpoint) -> str | None:
    """What to know of a checkpoint that is not the full model."""
    if not checkpoint.makes_speech:
        return NOISE_NOTICE
    return DEMO_NOTICE if checkpoint.is_demo else None


def figures(stats: StreamStats) -> Figures:
    return Figures(
        mode=stats.mode.value,
        seed=stats.seed,
        first_audio=stats.first_audio_seconds,
        rtf=stats.real_time_factor if stats.ended else None,
        seconds=stats.audio_seconds,
        tokens=stats.tokens,
        ended=stats.ended.value if stats.ended else None,
    )


def expected_seconds(request: SpeechRequest) -> float:
    """Rough length of the sound to come, for progress bars and buffers: nobody knows it before the model has ended."""
    seconds = _spoken_seconds(request.text) if request.source is None else request.source.seconds
    return seconds / request.speed


def _spoken_seconds(text: str) -> float:
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return wide / _IDEOGRAPHS_PER_SECOND + (len(text) - wide) / _LETTERS_PER_SECOND


class Pace:
    """Seconds of work per second of sound, measured from the first chunk on: what comes before it is paid once.

    At the first chunk nothing is measured yet. The pace of an earlier job is told then, and None without one: loading
    a voice and warming up belong to the first chunk, and would be taken for a slow engine.
    """

    def __init__(self, usual: float | None = None) -> None:
        self._usual = usual
        self._first_at: float | None = None
        self._seconds = 0.0  # of sound after the first chunk
        self.measured: float | None = None

    def after(self, chunk: AudioChunk) -> float | None:
        now, seconds = time.monotonic(), len(chunk.samples) / chunk.sample_rate
        if self._first_at is None:
            self._first_at = now if seconds else None
            return self._usual
        self._seconds += seconds
        if self._seconds:
            self.measured = (now - self._first_at) / self._seconds
        return self.measured or self._usual


class Made(TypedDict):
    """How far a request has come."""

    sentence: int  # that is being spoken, from 1
    sentences: int
    fraction: float
    left: float | None  # seconds of work; None while nobody can tell


class Progress:
    """Weighs the sentences of a request by their length, and the work to come by the work so far."""

    def __init__(self, sentences: Sequence[str], expected: float) -> None:
        """`expected` seconds of sound, shared out over the sentences; a converted recording is one without text."""
        weights = [max(0.3, _spoken_seconds(text)) for text in sentences]
        self._expected = [weight * max(0.3, expected) / sum(weights) for weight in weights]
        self._spoken = [0.0] * len(sentences)
        self._began = time.monotonic()

    def after(self, chunk: AudioChunk) -> Made:
        self._spoken[chunk.sentence] += len(chunk.samples) / chunk.sample_rate
        before, expected = sum(self._expected[: chunk.sentence]), self._expected[chunk.sentence]
        # The length of a sentence is a guess: it counts as done when the next one begins.
        fraction = (before + min(self._spoken[chunk.sentence], 0.95 * expected)) / sum(self._expected)
        worked = time.monotonic() - self._began
        return Made(
            sentence=chunk.sentence + 1,
            sentences=len(self._expected),
            fraction=1.0 if chunk.is_last else fraction,
            left=worked * (1 - fraction) / fraction if fraction > 0.05 else None,
        )


def remarks(stats: StreamStats) -> list[str]:
    """What the listener should know about a stream that has ended."""
    said = list(stats.warnings)
    if stats.ended is EndReason.LENGTH:
        said.append("the length limit cut the speech; try another seed or shorter sentences")
    if stats.clipped_samples:
        said.append(f"{stats.clipped_samples} samples passed full scale and were clipped")
    return said
