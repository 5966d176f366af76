"""The packed DiT on a GPU: matrix products of the library, all between them in our kernels, a solve as one graph.

Shapes as in dit_packed.py, whose results this equals up to rounding: pieces with T frames in sum, D width, M mel bins;
packed tensors are [2, T, ...], the conditional rows of all pieces, then their unconditional twins. What differs from
solve to solve is what lies in the inputs, never a shape or an address, so that a solve can be captured for a number of
frames and replayed for all that fit (graphs.py).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.stage1.attention import attend
from runtime.stage1.dit import Block, DiT, Modulation
from runtime.stage1.dit_packed import StepVectors, block_shape, new_blocks, stacked
from runtime.stage1.fused import add_and_norm, causal_conv, conv_weight, euler_step, norm, turn_and_keep
from runtime.stage1.graphs import GraphTable
from runtime.stage1.noise import FLOW_FRAMES
from runtime.stage1.packing import Capacity, Tables, ladder, lay_out, needed, room, rounded
from runtime.stage1.past import Past, PastBlock
from runtime.stage1.solver import Piece, Solved, schedule

STEPS_AHEAD = 2  # Euler steps of 180 kernels; the driver takes about 1,000 launches before it lets its callers wait


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """All that a solve reads and the state it moves."""

    capacity: Capacity
    x: Tensor  # [T, M] float32: noise, in the end mel
    told: Tensor  # [2, T, inputs of the DiT]; the twin's are zeros but for x
    numbers: Tensor  # of the tables


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one block. Those of q, k and v are one projection."""

    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    widen: tuple[Tensor, Tensor]
    narrow: tuple[Tensor, Tensor]


class FusedSolver:
    """Solves pieces together. Shares the weights of the DiT it is made from, which stays usable by itself."""

    keeps_past = True

    @torch.inference_mode()
    def __init__(self, dit: DiT, steps: int, rate: float) -> None:
        self.dtype, self._rate = dit.dtype, rate
        self._device = dit.proj_out.weight.device
        self._plan = schedule(steps)
        self._shape = block_shape(dit, steps)
        self._anchor = torch.zeros(8, dtype=self.dtype, device=self._device)  # never a part of a past
        blocks: list[Block] = list(dit.transformer_blocks)  # type: ignore[arg-type]
        self._heads = blocks[0].attn.heads
        embed = dit.input_embed
        self._project_in = weights(embed.proj)
        self._project_out = weights(dit.proj_out)
        self._convs = [grouped(embed.conv_pos_embed.conv1[0]), grouped(embed.conv_pos_embed.conv2[0])]
        self._layers = [
            Layer(
                stacked(block.attn),
                weights(block.attn.to_out[0]),
                weights(block.ff.ff[0][0]),  # type: ignore[index]
                weights(block.ff.ff[2]),
            )
            for block in blocks
        ]
        cos, sin = dit.rotary_embed(FLOW_FRAMES)
        self._angles = cos[:, ::2].contiguous(), sin[:, ::2].contiguous()
        self._vectors = step_vectors(dit, self._plan)
        self._captured: dict[int, Inputs] = {}
        self.graphs: GraphTable[int] | None = None
        self.eager_runs = 0

    @property
    def name(self) -> str:
        if self.graphs is None:
            return "fused, no graphs"
        megabytes = self.graphs.num_bytes / 2**20
        return f"fused, {len(self._captured)} graphs in {megabytes:.0f} MiB, {self.eager_runs} solves without one"

    def past_bytes(self, frames: int) -> int:
        """What a past of so many frames weighs."""
        return self._shape.num_bytes(frames)

    @torch.inference_mode()
    def capture(self, largest_frames: int, graphs: GraphTable[int]) -> None:
        """Records solves of so many frames and fewer, the largest first; `graphs` replaces an earlier table."""
        self.graphs = graphs
        for frames in reversed(ladder(largest_frames)):
            inputs = self.inputs(room(frames))
            if graphs.capture(frames, partial(self.run, inputs)):
                self._captured[frames] = inputs

    @torch.inference_mode()
    def solve(self, pieces: Sequence[Piece]) -> list[Solved]:
        """The pieces' mels, in their order; none depends on its neighbours. The results are the caller's."""
        kept = [new_blocks(piece, self._shape) for piece in pieces]
        inputs, graphs = self._captured_for(pieces), self.graphs
        if inputs is None or graphs is None:
            inputs = self.inputs(rounded(needed(pieces)))
            self.load(inputs, pieces, kept)
            self.eager_runs += 1
            return split(self.run(inputs, paced=self._device.type == "cuda"), pieces, kept)
        self.load(inputs, pieces, kept)
        x = graphs.run(inputs.capacity.frames, partial(self.run, inputs))
        return split(x.clone(), pieces, kept)

    def _captured_for(self, pieces: Sequence[Piece]) -> Inputs | None:
        """The least inputs of a graph that have room for these pieces."""
        least = needed(pieces)
        return next((self._captured[size] for size in sorted(self._captured) if room(size).holds(least)), None)

    def inputs(self, capacity: Capacity) -> Inputs:
        bins, told = len(self._project_out[0]), self._project_in[0].shape[1]
        x = torch.zeros(capacity.frames, bins, device=self._device)
        numbers = torch.zeros(capacity.numbers, dtype=torch.long, device=self._device)
        return Inputs(capacity, x, x.new_zeros(2, capacity.frames, told, dtype=self.dtype), numbers)

    def load(self, inputs: Inputs, pieces: Sequence[Piece], kept: Sequence[Sequence[PastBlock]]) -> None:
        """Brings pieces into the inputs, in one upload and a few copies on the device."""
        capacity = inputs.capacity
        numbers = lay_out(pieces, kept, self._shape, capacity, self._anchor.data_ptr())
        if self._device.type == "cuda":
            numbers = numbers.pin_memory()
        inputs.numbers.copy_(numbers, non_blocking=True)
        told = torch.cat(
            [
                torch.cat((piece.noise, piece.cond, piece.mu, piece.speaker[:, None].expand(-1, piece.frames)))
                for piece in pieces
            ],
            dim=-1,
        ).T  # [T, inputs]
        bins = inputs.x.shape[1]
        inputs.x[: len(told)] = told[:, :bins]
        inputs.told[0, : len(told)] = told
        inputs.told[1, : len(told), :bins] = told[:, :bins]

    def run(self, inputs: Inputs, *, paced: bool = False) -> Tensor:
        """Walks `inputs.x` from noise to mel and gives it back. All that changes lies in the inputs.

        `paced` lets the host be two steps ahead of the GPU and no more. Kernels of a large solve would fill the
        driver's queue, and launches of other threads, stage 0's among them, wait there for as long as it lasts.
        """
        tables = Tables.of(inputs.numbers, inputs.capacity)
        under_way: deque[torch.cuda.Event] = deque()
        with torch.cuda.device_of(inputs.x):  # Triton launches on the current device
            for step, (_, width) in enumerate(self._plan):
                velocity = self._velocity(inputs, tables, step)
                euler_step(inputs.x, velocity, inputs.told, width, self._rate)
                if paced:
                    under_way.append(torch.cuda.current_stream().record_event())
                    if len(under_way) > STEPS_AHEAD:
                        under_way.popleft().synchronize()
        return inputs.x

    def _velocity(self, inputs: Inputs, tables: Tables, step: int) -> Tensor:
        """Velocities [2, T, M]."""
        vectors = self._vectors[step]
        h = self._positions(F.linear(inputs.told, *self._project_in), tables, step)
        u = norm(h, vectors[0].scale, vectors[0].shift)
        for number, layer in enumerate(self._layers):
            v = vectors[number]
            attended = F.linear(self._attention(layer, u, tables, step, number), *layer.out)
            u = add_and_norm(h, attended, v.gate, v.ff_scale, v.ff_shift)
            widened = widen(u, *layer.widen)
            following = vectors[number + 1]
            u = add_and_norm(h, F.linear(widened, *layer.narrow), v.ff_gate, following.scale, following.shift)
        return F.linear(u, *self._project_out)

    def _positions(self, h: Tensor, tables: Tables, step: int) -> Tensor:
        """Both causal convolutions, and h added."""
        (first, first_bias), (second, second_bias) = self._convs
        places = (tables.begins, tables.tails, tables.tail_keeps, self._anchor)
        taps = 2 * self._shape.left * self._shape.dim
        inner = causal_conv(h, first, first_bias, None, *places, offset=2 * step * taps)
        return causal_conv(inner, second, second_bias, h, *places, offset=(2 * step + 1) * taps)

    def _attention(self, layer: Layer, u: Tensor, tables: Tables, step: int, number: int) -> Tensor:
        """Heads side by side, [2, T, W]."""
        shape = self._shape
        twin_stride = shape.frames * 2 * shape.width
        offset = (step * shape.layers + number) * 2 * twin_stride
        qkv = F.linear(u, *layer.qkv)
        turn_and_keep(qkv, *self._angles, tables.positions, tables.kv_keeps, self._anchor, offset, twin_stride)
        return attend(
            qkv,
            tables.tiles,
            tables.seen,
            tables.past,
            self._anchor,
            heads=self._heads,
            block_frames=shape.frames,
            past_offset=offset,
        )


def weights(linear: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(linear, nn.Linear)
    return linear.weight, linear.bias


def grouped(conv: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(conv, nn.Conv1d) and conv.bias is not None
    return conv_weight(conv.weight, conv.groups), conv.bias


def split(x: Tensor, pieces: Sequence[Piece], kept: Sequence[Sequence[PastBlock]]) -> list[Solved]:
    """The mel [T, M] of all pieces as those of each."""
    solved, begin = [], 0
    for piece, blocks in zip(pieces, kept, strict=True):
        before = piece.past.blocks if piece.past else ()
        past = Past((*before, *blocks)) if blocks else None
        solved.append(Solved(x[begin : begin + piece.frames].T, past))
        begin += piece.frames
    return solved


def widen(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[2, T, D] times weight [inner, D], plus bias, through GELU in its tanh form: one kernel of cuBLASLt."""
    return torch._addmm_activation(bias, u.flatten(0, 1), weight.T, use_gelu=True).unflatten(0, u.shape[:2])


def step_vectors(dit: DiT, plan: list[tuple[float, float]]) -> list[list[StepVectors]]:
    """By step and block, in float32. One more stands at the end of each step: the scale and shift of the last norm."""
    times = torch.tensor([t for t, _ in plan], dtype=torch.float32, device=dit.proj_out.weight.device)
    c = F.silu(dit.time_embed(times, dit.dtype)).float()  # [steps, D]

    def parts(modulation: Modulation) -> tuple[Tensor, ...]:
        linear = modulation.linear
        return F.linear(c, linear.weight.float(), linear.bias.float()).chunk(modulation.parts, dim=-1)

    blocks: list[Block] = list(dit.transformer_blocks)  # type: ignore[arg-type]
    columns = []
    for block in blocks:
        shift, scale, gate, ff_shift, ff_scale, ff_gate = parts(block.attn_norm)
        columns.append(
            [StepVectors(*step) for step in zip(1 + scale, shift, gate, 1 + ff_scale, ff_shift, ff_gate, strict=True)]
        )
    scale, shift = parts(dit.norm_out)  # the other way round than in the blocks (spec 9.2)
    columns.append([StepVectors(*step, *step, *step) for step in zip(1 + scale, shift, strict=True)])
    return [list(row) for row in zip(*columns, strict=True)]
