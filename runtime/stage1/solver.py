"""Euler solver of the flow: noise and conditioning in, mel out (spec 4.3).

Shapes: B streams, N mel frames (50 Hz), M mel bins. Knows nothing of tokens or audio, only of an estimator, which it
gives 2B rows in one layout: row 2i is stream i with its conditioning, row 2i + 1 its unconditional twin. The state
stays in float32 whatever the estimator's precision.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # base.py builds what stands on this file
    from runtime.stage1.base import FlowEstimator


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
) -> Tensor:
    """Walks from noise [B, M, N] to mel [B, M, N] float32.

    mu, cond [B, M, N] and speaker [B, M] are the conditioning. `mask` [B, 1, N] is true on real frames when the streams
    differ in length, and None when all frames are real. `chunked` chooses the chunk-causal attention mask.
    """
    x = noise.float()
    mu, speaker, cond = (pair(part, torch.zeros_like(part)) for part in (mu, speaker, cond))
    rows_mask = None if mask is None else pair(mask, mask)
    for t, width in schedule(steps):
        times = torch.full((len(mu),), t, device=x.device)
        velocity = estimator(pair(x, x), rows_mask, mu, times, speaker, cond, chunked=chunked).float()
        x = x + width * guide(velocity[0::2], velocity[1::2], rate)
    return x
