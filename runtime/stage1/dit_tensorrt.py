"""The flow through TensorRT: which solves fit its plan, what is bound for them, and torch for the rest (spec 7).

Shapes: B streams, R = 2B rows, N mel frames (50 Hz), M mel bins. Shapes and addresses are told once for all Euler
steps of a solve: only x and t change, in buffers that stay where they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.stage1.dit import DiT
from runtime.stage1.dit_onnx import Lengths
from runtime.stage1.solver import Piece, Solved, guide, pair, schedule
from runtime.stage1.tensorrt_plan import Graph
from runtime.stage1.tensorrt_pool import ContextPool, Run, Streams

Velocity = Callable[[Tensor, Tensor], Tensor]  # x [R, M, N], t [R] -> [R, M, N]

_WASTE = 0.25  # of a row's frames may be padding, so that a long sentence does not set the pace of short ones


class TensorRTEstimator:
    """A plan and its contexts, with the torch estimator for sizes that the plan was not built for."""

    def __init__(self, dit: DiT, graph: Graph, engine: Any, streams: Streams, version: str) -> None:
        self.name = f"tensorrt {version}, {graph.name} graph"
        self.dtype = dit.dtype
        self.graph = graph
        self.pool = ContextPool(engine, streams)
        self.solves = 0  # through the plan
        self.torch_solves = 0  # out of its profiles
        self._dit = dit
        self._streams = streams

    def profile(self, rows: int, frames: int) -> int | None:
        """Which profile of the plan such a solve fits; None when torch is to do it."""
        fits = (index for index, profile in enumerate(self.graph.profiles) if profile.holds(rows, frames))
        return next(fits, None)

    @contextmanager
    def bound(
        self, mu: Tensor, speaker: Tensor, cond: Tensor, lengths: Lengths, *, chunked: bool
    ) -> Iterator[Velocity]:
        """Binds what stays the same over a solve: mu, cond [R, M, N], speaker [R, M] and the rows' real lengths.

        What it gives writes into one buffer: its result is to be used, or copied, before the next step.
        """
        rows, _, frames = mu.shape
        profile = self.profile(rows, frames)
        if profile is None:
            self.torch_solves += 1
            yield partial(self._in_torch, mu, speaker, cond, lengths, chunked)
            return
        self.solves += 1
        x, output = (torch.empty(cond.shape, dtype=torch.float32, device=cond.device) for _ in range(2))
        t = x.new_empty(rows)
        mu, speaker, cond = (part.float() for part in (mu, speaker, cond))
        chunk = self._dit.chunk_frames if chunked else None
        inputs = self.graph.tensors(x, mu, t, speaker, cond, lengths, chunk=chunk)

        def velocity(now: Tensor, times: Tensor) -> Tensor:
            x.copy_(now)
            t.copy_(times)
            run()
            return output

        with self.pool.pair() as taken:
            run = Run(taken, self._streams, profile, inputs, {self.graph.output: output})
            yield velocity

    def __call__(
        self, x: Tensor, mask: Tensor | None, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor, *, chunked: bool
    ) -> Tensor:
        """One velocity by itself, as FlowEstimator has it. A solve is better bound once."""
        rows, _, frames = x.shape
        lengths: Lengths = [frames] * rows if mask is None else mask.sum(dim=(1, 2)).unbind()  # stays on the device
        with self.bound(mu, speaker, cond, lengths, chunked=chunked) as velocity:
            return velocity(x, t)

    def _in_torch(
        self, mu: Tensor, speaker: Tensor, cond: Tensor, lengths: Lengths, chunked: bool, x: Tensor, t: Tensor
    ) -> Tensor:
        frame = torch.arange(x.shape[-1], device=x.device)
        mask = torch.stack([frame < length for length in lengths])[:, None]
        return self._dit(x, mask, mu, t, speaker, cond, chunked=chunked)


class TensorRTSolver:
    """Euler steps over pieces of several streams, those of like length together, each group bound once."""

    keeps_past = False

    def __init__(self, estimator: TensorRTEstimator, steps: int, rate: float, device: torch.device) -> None:
        self._estimator = estimator
        self._rate = rate
        self.dtype = estimator.dtype
        plan = schedule(steps)
        self._widths = [width for _, width in plan]
        self._times = torch.tensor([t for t, _ in plan], dtype=torch.float32, device=device)[:, None]

    @property
    def name(self) -> str:
        estimator = self._estimator
        return f"{estimator.name}; solves: {estimator.solves}, and out of its sizes in torch: {estimator.torch_solves}"

    def past_bytes(self, frames: int) -> int:
        return 0

    def solve(self, pieces: Sequence[Piece]) -> list[Solved]:
        """In the order of the pieces; what their neighbours hold does not reach them."""
        mels: dict[int, Tensor] = {}
        for group in groups(pieces, lambda rows, frames: self._estimator.profile(rows, frames) is not None):
            together = self._solve([pieces[index] for index in group])
            mels |= dict(zip(group, together, strict=True))
        return [Solved(mels[index]) for index in range(len(pieces))]

    def _solve(self, group: Sequence[Piece]) -> list[Tensor]:
        longest = max(piece.frames for piece in group)

        def padded(parts: Sequence[Tensor]) -> Tensor:
            return torch.stack([F.pad(part, (0, longest - part.shape[-1])) for part in parts]).float()

        x, mu, cond = (padded([getattr(piece, name) for piece in group]) for name in ("noise", "mu", "cond"))
        speaker = torch.stack([piece.speaker for piece in group])
        mu, speaker, cond = (pair(part, torch.zeros_like(part)) for part in (mu, speaker, cond))
        lengths = [piece.frames for piece in group for _ in range(2)]
        with self._estimator.bound(mu, speaker, cond, lengths, chunked=group[0].chunked) as velocity:
            for time, width in zip(self._times, self._widths, strict=True):
                v = velocity(pair(x, x), time.expand(len(mu)))
                x = x + width * guide(v[0::2], v[1::2], self._rate).float()
        return [mel[:, : piece.frames] for mel, piece in zip(x, group, strict=True)]


def groups(pieces: Sequence[Piece], fits: Callable[[int, int], bool]) -> list[list[int]]:
    """Indices of pieces to be solved together: of one kind of attention and like length, as many as fit.

    `fits` is asked for rows and frames; a piece that fits nowhere stands alone.
    """
    found: list[list[int]] = []
    for index in sorted(range(len(pieces)), key=lambda index: (pieces[index].chunked, -pieces[index].frames)):
        piece = pieces[index]
        assert piece.past is None and not piece.keep, "TensorRT has no past"
        if found:
            first, rows = pieces[found[-1][0]], 2 * len(found[-1]) + 2
            alike = piece.chunked == first.chunked and piece.frames >= (1 - _WASTE) * first.frames
            if alike and fits(rows, first.frames):
                found[-1].append(index)
                continue
        found.append([index])
    return found
