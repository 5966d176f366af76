"""What page and command say about a stream: how long it may get, its figures, and that untrained weights make noise."""

import unicodedata
from typing import TypedDict

from runtime import OFFICIAL, EndReason, SpeechRequest, StreamStats

NOISE_NOTICE = (
    f"These weights are untrained: what you hear is noise, not speech. For a voice, start with --model {OFFICIAL}"
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
    if request.source is not None:
        return request.source.seconds / request.speed
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in request.text)
    return (wide / _IDEOGRAPHS_PER_SECOND + (len(request.text) - wide) / _LETTERS_PER_SECOND) / request.speed


def remarks(stats: StreamStats) -> list[str]:
    """What the listener should know about a stream that has ended."""
    said = list(stats.warnings)
    if stats.ended is EndReason.LENGTH:
        said.append("the length limit cut the speech; try another seed or shorter sentences")
    if stats.clipped_samples:
        said.append(f"{stats.clipped_samples} samples passed full scale and were clipped")
    return said
