"""Euler solver of the flow: noise and conditioning in, mel out (spec 4.3).

Shapes: B streams, N mel frames (50 Hz), M mel bins, C token channels. Knows nothing of tokens or audio, only of an
estimator, which it gives 2B rows in one layout: row 2i is stream i with its conditioning, row 2i + 1 its unconditional
twin. The state stays in float32 though the estimator be in half precision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.stage1.past import Past

if TYPE_CHECKING:  # base.py builds what stands on this file
    from runtime.stage1.base import FlowEstimator


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one stream wants solved: its frames behind `past`, all of them when there is none."""

    noise: Tensor  # [M, N]
    mu: Tensor  # [C, N]
    cond: Tensor  # [M, N]
    speaker: Tensor  # [M]
    chunked: bool  # the chunk-causal attention of streaming; a past needs it
    past: Past | None = None
    keep: int = 0  # how many frames from the start of the prompt are to be remembered: whole blocks

    @property
    def start(self) -> int:
        return self.past.frames if self.past else 0

    @property
    def frames(self) -> int:
        return self.noise.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    mel: Tensor  # [M, N]
    past: Past | None = None  # of the frames that were to be kept


def schedule(steps: int) -> list[tuple[float, float]]:
    """Time and step width of each Euler step: dense where the mel takes shape, wide at the end.

    Times are summed up in float32 and each width is taken from the sum, as the reference does it.
    """
    knots = 1 - torch.cos(torch.linspace(0, 1, steps + 1, dtype=torch.float32) * 0.5 * math.pi)
    t, plan = knots[0], []
    for knot in knots[1:]:
        width = knot - t
        plan.append((float(t), float(width)))
        t = t + width
    return plan


def guide(conditional: Tensor, unconditional: Tensor, rate: float) -> Tensor:
    """Classifier-free guidance on velocities [B, M, N]; rate 0 is no guidance."""
    return (1 + rate) * conditional - rate * unconditional


def pair(conditional: Tensor, unconditional: Tensor) -> Tensor:
    """Two tensors [B, ...] -> rows [2B, ...], each stream's two rows side by side."""
    return torch.stack((conditional, unconditional), dim=1).flatten(0, 1)


def solve(
    estimator: "FlowEstimator",
    noise: Tensor,
    mu: Tensor,
    speaker: Tensor,
    cond: Tensor,
    *,
    steps: int,
    rate: float,
    chunked: bool,
    mask: Tensor | None = None,
    start: float = 0.0,
) -> Tensor:
    """Walks from noise [B, M, N] to mel [B, M, N], or from what lies between them at the time `start`.

    mu, cond [B, M, N] and speaker [B, M] are the conditioning. `mask` [B, 1, N] is true on real frames when the streams
    differ in length, and None when all frames are real. `chunked` chooses the chunk-causal attention mask.
    """
    x = noise.to(torch.promote_types(torch.float32, estimator.dtype))
    mu, speaker, cond = (pair(part, torch.zeros_like(part)) for part in (mu, speaker, cond))
    rows_mask = None if mask is None else pair(mask, mask)
    for t, width in schedule(steps):
        if t < start:
            continue
        times = torch.full((len(mu),), t, device=x.device)
        velocity = estimator(pair(x, x), rows_mask, mu, times, speaker, cond, chunked=chunked).to(x.dtype)
        x = x + width * guide(velocity[0::2], velocity[1::2], rate)
    return x


class PlainSolver:
    """One piece after the other through a plain estimator, which remembers nothing."""

    keeps_past = False

    def __init__(self, estimator: "FlowEstimator", steps: int, rate: float) -> None:
        self._estimator = estimator
        self._steps = steps
        self._rate = rate
        self.name = estimator.name
        self.dtype = estimator.dtype

    def past_bytes(self, frames: int) -> int:
        return 0

    def solve(self, pieces: Sequence[Piece]) -> list[Solved]:
        return [self._solve(piece) for piece in pieces]

    def _solve(self, piece: Piece) -> Solved:
        assert piece.past is None and not piece.keep, "the plain estimator has no past"
        noise, mu, speaker, cond = (part[None] for part in (piece.noise, piece.mu, piece.speaker, piece.cond))
        steps, rate = self._steps, self._rate
        mel = solve(self._estimator, noise, mu, speaker, cond, steps=steps, rate=rate, chunked=piece.chunked)
        return Solved(mel[0])
