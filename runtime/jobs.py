"""What passes from the stage-0 worker to the stage-1 worker."""

from dataclasses import dataclass, field

from torch import Tensor

from runtime.chunking import ChunkSchedule
from runtime.stage1.state import Stage1State
from runtime.stream import SpeechStream


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens that share one flow and vocoder state: a sentence, or as much of a very long one as the noise covers."""

    schedule: ChunkSchedule
    tokens: list[int] = field(default_factory=list)
    state: Stage1State | None = None  # this and what follows is touched by the stage-1 worker alone
    clipped: int = 0  # samples that were told to the stats


@dataclass(frozen=True, slots=True, eq=False)
class ChunkJob:
    """A piece of a segment that is ready for stage 1."""

    stream: SpeechStream
    sentence: int
    segment: Segment
    tokens: Tensor  # [n] int64, from the start of the segment, look-ahead included
    is_last: bool  # of the segment
    hops_again: bool  # the next piece of the segment is likely to be a hop as well
    opens_sentence: bool
    ends_sentence: bool
    ends_stream: bool
