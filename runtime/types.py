"""Values that cross rooms. Each is handed over as it is: no serializer, no copy, no cast.

Shapes: P reference speech tokens (25 Hz), F mel frames (50 Hz), M mel bins, E speaker dimensions, S samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from runtime.errors import GenerationError
from runtime.pace import fits


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
    language: str = "auto"  # that they are written out in; the model itself takes no language (spec 2.7)
    trim: bool = False  # use the first 30 s of a longer reference
    words: Mapping[str, str] = field(default_factory=dict)  # readings, put in place of words before anything else
    first_sentence: int = 0  # begins there; with the whole's seed and level it sounds as in the whole
    level_lufs: float | None = None  # loudness that sentences are brought towards; None is that of the first (stats)

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

    text: str  # as it is spoken
    written: str = ""  # the part of the request's text that it came from
    prompt: Stage0Prompt | None = None
    tokens: Tensor | None = None  # [n] int64
    expected_seconds: float = 0.0  # of its sound, estimated from the text
    pause_before_seconds: float = 0.0  # of silence; 0 leaves it to the settings
    pause_after_seconds: float = 0.0  # the last sentence only


@dataclass(frozen=True, slots=True)
class PlannedSentence:
    """A sentence before it is spoken."""

    text: str  # as it is spoken: figures, units and words of the list written out
    written: str  # the part of the request's text that it came from
    expected_seconds: float  # of its speech, estimated
    pause_before_seconds: float
    pause_after_seconds: float


@dataclass(frozen=True, slots=True)
class SpeechPlan:
    """What a request will say, told without running a model."""

    mode: Mode
    sentences: tuple[PlannedSentence, ...]
    warnings: tuple[str, ...]

    @property
    def expected_seconds(self) -> float:
        """Of the whole, its pauses included."""
        return sum(
            each.pause_before_seconds + each.expected_seconds + each.pause_after_seconds for each in self.sentences
        )


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
    first_sentence: int = 0  # the index that sentences[0] has in the whole text
    level_lufs: float | None = None
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
class SpokenSentence:
    """What became of a sentence. Positions in samples from the start of the stream; pauses belong to no sentence."""

    text: str  # as it was spoken
    expected_seconds: float
    sample_rate: int
    written: str = ""  # the part of the request's text that it came from
    start: int = 0
    samples: int = 0  # that were delivered
    tokens: int = 0  # speech tokens that were made
    complete: bool = False

    @property
    def start_seconds(self) -> float:
        return self.start / self.sample_rate

    @property
    def seconds(self) -> float:
        return self.samples / self.sample_rate

    @property
    def odd_length(self) -> bool:
        """True when the sound does not fit the text: words were probably lost or repeated."""
        return self.complete and not fits(self.seconds, self.expected_seconds)


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
    extra_hops: int = 0  # cuts taken because the listener would have run dry: the sound is not that of an idle engine
    samples: int = 0
    clipped_samples: int = 0
    level_lufs: float | None = None  # that several sentences were brought towards
    length_capped: list[int] = field(default_factory=list)  # sentences that the length limit cut
    spoken: list[SpokenSentence] = field(default_factory=list)  # one per sentence, from the start
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
