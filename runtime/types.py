"""Values that cross rooms. Each is handed over as it is: no serializer, no copy, no cast.

Shapes: P reference speech tokens (25 Hz), F mel frames (50 Hz), M mel bins, E speaker dimensions, S samples.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from runtime.errors import GenerationError


class Mode(StrEnum):
    """What the request asks for; it follows from the fields that are given (spec 2.7)."""

    ZERO_SHOT = "zero-shot"
    CROSS_LINGUAL = "cross-lingual"
    INSTRUCT = "instruct"
    CONVERSION = "voice conversion"


class EndReason(StrEnum):
    """Why a token sequence or a stream ended."""

    STOP = "stop"  # the model said so
    LENGTH = "length"  # the length limit cut it
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """Decoded mono sound: samples [S] float32 in [-1, 1] at its own rate."""

    samples: np.ndarray
    sample_rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How stage 0 draws a token. `ras` is the model's own law (spec 3.4); `standard` is the usual one."""

    method: Literal["ras", "standard"] = "ras"
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 0.8
    top_k: int = 25  # 0 is no limit
    repetition_penalty: float = 1.0  # standard only; over generated tokens
    window: int = 10  # ras only: generated tokens looked back upon
    repeat_threshold: float = 0.1  # ras only: share of the window from which a token counts as repeated


@dataclass(frozen=True, slots=True, eq=False)
class SpeechRequest:
    """One wish to hear something.

    With a transcript of the reference the mode is zero-shot, with an instruction instruct, with neither cross-lingual.
    `source` instead of text is voice conversion: its words in the reference's voice.
    """

    reference: AudioClip
    text: str = ""
    transcript: str | None = None
    instruction: str | None = None
    source: AudioClip | None = None
    sampling: SamplingParams | None = None  # None is the checkpoint's own
    seed: int | None = None  # None draws one, told in the stats
    speed: float = 1.0
    streaming: bool = True  # False computes each sentence as one piece
    normalize: bool = True  # write numbers, units and symbols out as words
    trim: bool = False  # use the first 30 s of a longer reference

    @property
    def mode(self) -> Mode:
        if self.source is not None:
            return Mode.CONVERSION
        if (self.instruction or "").strip():
            return Mode.INSTRUCT
        return Mode.ZERO_SHOT if (self.transcript or "").strip() else Mode.CROSS_LINGUAL


@dataclass(frozen=True, slots=True, eq=False)
class PreparedReference:
    """A voice as both stages need it. Shared between requests, so nobody writes into it."""

    speech_tokens: Tensor  # [P] int64
    mel: Tensor  # [F, M] log-mel of the 24 kHz audio
    speaker: Tensor  # [E], raw; the flow normalises it
    key: str  # content key: equal keys are equal voices

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.speech_tokens, self.mel, self.speaker))


@dataclass(frozen=True, slots=True, eq=False)
class Stage0Prompt:
    """What the language model reads before it speaks (spec 3.2), and its length limits (spec 3.3)."""

    text_tokens: Tensor  # [n] int64: prompt text and text, control tokens included
    speech_tokens: Tensor  # [P] int64, empty unless zero-shot
    min_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokenStep:
    """What one decoding step gave one stream. `token` is None when a stop id or an error ended the sequence."""

    key: int
    token: int | None
    is_last: bool = False
    end: EndReason | None = None  # set when is_last
    error: GenerationError | None = None  # set when end is ERROR


@dataclass(frozen=True, slots=True, eq=False)
class Sentence:
    """One piece of a request, spoken by itself: a prompt for stage 0, or tokens that need no stage 0 (conversion)."""

    text: str
    prompt: Stage0Prompt | None = None
    tokens: Tensor | None = None  # [n] int64


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSpeech:
    """A request after the front end: everything the stages need, nothing they have to look up."""

    mode: Mode
    reference: PreparedReference
    sentences: tuple[Sentence, ...]
    sampling: SamplingParams
    seed: int
    speed: float
    streaming: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AudioChunk:
    """Sound that is ready to play: samples [S] float32 in [-1, 1]."""

    samples: np.ndarray
    sample_rate: int
    index: int  # counts from 0 over the whole request
    sentence: int  # index of the sentence it belongs to
    is_last: bool


@dataclass(slots=True)
class StreamStats:
    """Figures of one stream, filled while it runs. Times in seconds from the moment the request was made."""

    mode: Mode
    seed: int
    sampling: SamplingParams
    sentences: int
    sample_rate: int
    prepare_seconds: float = 0.0
    first_audio_seconds: float | None = None
    total_seconds: float = 0.0
    stage0_seconds: float = 0.0  # steps this stream took part in; a batched step counts for each of its streams
    stage1_seconds: float = 0.0  # likewise
    tokens: int = 0  # speech tokens that reached stage 1
    dropped_tokens: int = 0  # silent or illegal ones that did not
    chunks: int = 0
    samples: int = 0
    clipped_samples: int = 0
    length_capped: list[int] = field(default_factory=list)  # sentences that the length limit cut
    ended: EndReason | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def audio_seconds(self) -> float:
        return self.samples / self.sample_rate

    @property
    def real_time_factor(self) -> float | None:
        """Seconds of work per second of sound; under 1 the sound is made faster than it is heard."""
        return self.total_seconds / self.audio_seconds if self.samples else None


def empty_tokens() -> Tensor:
    return torch.empty(0, dtype=torch.long)
