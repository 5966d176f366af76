"""What one segment of speech carries through stage 1, and what stage 1 is asked for.

Shapes: n generated tokens (25 Hz) after P prompt tokens, F prompt mel frames (50 Hz), M mel bins.
"""

from dataclasses import dataclass

from torch import Tensor

from runtime.stage1.conditioning import prompt_condition
from runtime.stage1.noise import NoiseBank
from runtime.stage1.past import Past
from runtime.stage1.solver import Piece
from runtime.stage1.speed import Stretch
from runtime.stage1.vocoder import VocoderState


@dataclass(slots=True, eq=False, weakref_slot=True)
class Stage1State:
    """One segment of speech on its way through stage 1."""

    voice: str  # content key of the reference
    prompt_tokens: Tensor  # [P] int64
    prompt_mel: Tensor  # [1, M, F] float32
    speaker: Tensor  # [1, M], normalised and projected
    stretch: Stretch
    vocoder: VocoderState
    mel_frames: int = 0  # generated frames handed on so far, counted before the stretch
    past: Past | None = None  # of the latest hop, when it was to be kept

    @property
    def clipped(self) -> int:
        return self.vocoder.clipped


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """All tokens [n] of a segment up to the end of a chunk; unless it is the last, the final three are look-ahead."""

    state: Stage1State
    tokens: Tensor
    is_last: bool
    keep: bool = False  # remember what is solved, as a further hop is expected


def piece_of(
    state: Stage1State,
    noise: NoiseBank,
    mu: Tensor,
    frames: int,
    *,
    chunked: bool,
    past: Past | None = None,
    keep: int = 0,
) -> Piece:
    """The frames of a segment up to a count, from the start of the prompt, that are not in the past."""
    start = past.frames if past else 0
    cond = prompt_condition(state.prompt_mel, frames)[0]
    return Piece(
        noise.flow_noise(frames)[:, start:],
        mu[0, :, start:frames],
        cond[:, start:],
        state.speaker[0],
        chunked,
        past=past,
        keep=keep,
    )
