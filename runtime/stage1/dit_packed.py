"""The DiT for serving: pieces of many streams laid end to end, each layer once over all of them (spec 4.2).

Shapes: pieces of N frames with T in sum, D width, H heads of K channels, W = H K, M mel bins. Packed tensors are
[2, T, ...]: the conditional rows of all pieces, then their unconditional twins. Layers that work frame by frame know no
borders; attention and the causal convolutions work piece by piece, each on its own frames and its own past. What a step
needs of the time alone (embedding, shift, scale, gate) is a table made at load, so there is one time for all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.stage1.dit import Attention, Block, DiT, Rotary
from runtime.stage1.past import BlockShape, Past, PastBlock
from runtime.stage1.solver import Piece, Solved, guide, schedule

EPS = 1e-6  # of the layer norms


@dataclass(frozen=True, slots=True, eq=False)
class StepVectors:
    """What one block takes from the time, [D] each: weight and bias of a layer norm, then the gate, twice."""

    scale: Tensor
    shift: Tensor
    gate: Tensor
    ff_scale: Tensor
    ff_shift: Tensor
    ff_gate: Tensor


class Recorder:
    """Fills the blocks that one piece is to leave behind."""

    def __init__(self, piece: Piece, blocks: Sequence[PastBlock]) -> None:
        self._before = piece.past.blocks if piece.past else ()
        self._blocks = blocks

    def see_conv(self, step: int, index: int, padded: Tensor, left: int) -> None:
        """Input of a convolution [2, D, left + N]."""
        for number, block in enumerate(self._blocks):
            end = (number + 1) * block.frames
            block.tails[step, index] = padded[:, :, end : end + left].transpose(1, 2)

    def see_kv(self, step: int, layer: int, kv: Tensor) -> None:
        """Keys and values of the piece's own frames [2, N, 2 W]."""
        for number, block in enumerate(self._blocks):
            block.kv[step, layer] = kv[:, number * block.frames : (number + 1) * block.frames]

    @property
    def past(self) -> Past | None:
        return Past((*self._before, *self._blocks)) if self._blocks else None


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Where one piece lies in the packed tensors."""

    first: int
    end: int
    piece: Piece
    recorder: Recorder

    @property
    def past(self) -> Past | None:
        return self.piece.past

    def segments(self, block: int) -> list[tuple[int, int, int]]:
        """Queries [from, to) of the piece and how many keys they see, those of the past included."""
        frames = self.piece.frames
        if not self.piece.chunked:
            return [(0, frames, frames)]
        cuts = [(first, min(first + block, frames)) for first in range(0, frames, block)]
        return [(first, end, self.piece.start + end) for first, end in cuts]


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """What stays the same over the steps of one solve."""

    spans: list[Span]
    base: Tensor  # [2, T, D]: what the input projection adds to that of x
    rotary: Rotary  # cos and sin [T, 1, K] of the absolute frames


class PackedSolver:
    """Solves pieces together. Shares the weights of the DiT it is made from, which stays usable by itself."""

    name = "packed"
    keeps_past = True

    @torch.inference_mode()
    def __init__(self, dit: DiT, steps: int, rate: float) -> None:
        self.dtype = dit.dtype
        self._dit = dit
        self._blocks: list[Block] = list(dit.transformer_blocks)  # type: ignore[arg-type]
        self._rate = rate
        self._plan = schedule(steps)
        self._qkv = [stacked(block.attn) for block in self._blocks]
        bins, weight = dit.proj_out.out_features, dit.input_embed.proj.weight
        self._from_x, self._from_told = weight[:, :bins].contiguous(), weight[:, bins:].contiguous()
        times = torch.tensor([t for t, _ in self._plan], dtype=torch.float32, device=weight.device)
        c = F.silu(dit.time_embed(times, self.dtype))  # [steps, D]
        scale, shift = (part[:, 0] for part in dit.norm_out(c))
        self._out = list(zip(1 + scale, shift, strict=True))
        self._vectors = [block_vectors(block, c) for block in self._blocks]
        self._shape = block_shape(dit, steps)

    def past_bytes(self, frames: int) -> int:
        """What a past of so many frames weighs."""
        return self._shape.num_bytes(frames)

    @torch.inference_mode()
    def solve(self, pieces: Sequence[Piece]) -> list[Solved]:
        """The pieces' mels, in their order; none depends on its neighbours."""
        pack = self._pack(pieces)
        x = torch.cat([piece.noise for piece in pieces], dim=-1).T  # [T, M]
        x = x.to(torch.promote_types(torch.float32, self.dtype))
        for step, (_, width) in enumerate(self._plan):
            conditional, unconditional = self._velocity(pack, step, x).to(x.dtype)
            x = x + width * guide(conditional, unconditional, self._rate)
        return [Solved(x[span.first : span.end].T, span.recorder.past) for span in pack.spans]

    def _pack(self, pieces: Sequence[Piece]) -> Pack:
        spans, told, frames, end = [], [], [], 0
        for piece in pieces:
            assert piece.past is None or piece.chunked, "frames that see the future have no past"
            spans.append(Span(end, end + piece.frames, piece, Recorder(piece, new_blocks(piece, self._shape))))
            speaker = piece.speaker[:, None].expand(-1, piece.frames)
            told.append(torch.cat((piece.cond, piece.mu, speaker)).T.to(self.dtype))
            frames.append(torch.arange(piece.start, piece.start + piece.frames, device=self._from_x.device))
            end += piece.frames
        bias, index = self._dit.input_embed.proj.bias, torch.cat(frames)
        conditional = F.linear(torch.cat(told), self._from_told, bias)
        cos, sin = self._dit.rotary_embed(max(span.piece.start + span.piece.frames for span in spans))
        base = torch.stack((conditional, bias.expand_as(conditional)))
        return Pack(spans, base, (cos[index, None], sin[index, None]))

    def _velocity(self, pack: Pack, step: int, x: Tensor) -> Tensor:
        """Velocities [2, T, M] of x [T, M]."""
        h = pack.base + F.linear(x.to(self.dtype), self._from_x)
        h = h + self._positions(pack, step, h)
        dim = h.shape[-1:]
        for layer, block in enumerate(self._blocks):
            v = self._vectors[layer][step]
            attended = self._attention(pack, step, layer, F.layer_norm(h, dim, v.scale, v.shift, EPS))
            h = torch.addcmul(h, v.gate, attended)
            h = torch.addcmul(h, v.ff_gate, block.ff(F.layer_norm(h, dim, v.ff_scale, v.ff_shift, EPS)))
        return self._dit.proj_out(F.layer_norm(h, dim, *self._out[step], EPS))

    def _positions(self, pack: Pack, step: int, h: Tensor) -> Tensor:
        """Both causal convolutions, [2, T, D]. Before each piece stand its own frames, or zeros."""
        positions = self._dit.input_embed.conv_pos_embed
        left = positions.left
        h = h.transpose(1, 2)
        for index, layer in enumerate((positions.conv1, positions.conv2)):
            parts = []
            for span in pack.spans:
                before = self._before(span.past, step, index, h)
                parts.append(torch.cat((before, h[:, :, span.first : span.end]), dim=-1))
                span.recorder.see_conv(step, index, parts[-1], left)
            h = layer(torch.cat(parts, dim=-1))
            if len(parts) > 1:  # the first `left` frames between two pieces have seen both
                starts = [span.first + number * left for number, span in enumerate(pack.spans)]
                own = [h[:, :, at : at + span.piece.frames] for at, span in zip(starts, pack.spans, strict=True)]
                h = torch.cat(own, dim=-1)
        return h.transpose(1, 2)

    def _before(self, past: Past | None, step: int, index: int, h: Tensor) -> Tensor:
        """What a convolution has seen before a piece, [2, D, kernel - 1]."""
        if past is None:
            return h.new_zeros(2, h.shape[1], self._dit.input_embed.conv_pos_embed.left)
        return past.blocks[-1].tails[step, index].transpose(1, 2)

    def _attention(self, pack: Pack, step: int, layer: int, u: Tensor) -> Tensor:
        attention = self._blocks[layer].attn
        qkv = F.linear(u, *self._qkv[layer])  # [2, T, 3 W]
        width = qkv.shape[-1] // 3
        turn_first_head(qkv, width, pack.rotary)
        out = []
        for span in pack.spans:
            own = qkv[:, span.first : span.end]
            q, kv = own[..., :width], own[..., width:]
            span.recorder.see_kv(step, layer, kv)
            if span.past:
                kv = torch.cat((*(block.kv[step, layer] for block in span.past.blocks), kv), dim=1)
            q, k, v = (part.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for part in (q, *kv.chunk(2, dim=-1)))
            for first, end, seen in span.segments(self._dit.chunk_frames):
                heads = F.scaled_dot_product_attention(q[:, :, first:end], k[:, :, :seen], v[:, :, :seen])
                out.append(heads.transpose(1, 2).flatten(2))
        return attention.to_out[0](torch.cat(out, dim=1))


def block_shape(dit: DiT, steps: int) -> BlockShape:
    """What a past of this DiT consists of. Raises CheckpointError for a convolution that looks back beyond a block."""
    left, (dim, _) = dit.input_embed.conv_pos_embed.left, dit.input_embed.proj.weight.shape
    if left > dit.chunk_frames:
        raise CheckpointError(f"the flow's convolutions look back {left} frames, beyond a block of {dit.chunk_frames}")
    blocks: list[Block] = list(dit.transformer_blocks)  # type: ignore[arg-type]
    width, device = len(blocks[0].attn.to_k.weight), dit.proj_out.weight.device
    return BlockShape(steps, len(blocks), dit.chunk_frames, width, left, dim, dit.dtype, device)


def new_blocks(piece: Piece, shape: BlockShape) -> list[PastBlock]:
    """As many as the piece's own frames fill of what is to be kept."""
    return [shape.new() for _ in range(max(0, piece.keep - piece.start) // shape.frames)]


def block_vectors(block: Block, c: Tensor) -> list[StepVectors]:
    """One block's vectors for each time embedding of c [steps, D]."""
    shift, scale, gate, ff_shift, ff_scale, ff_gate = (part[:, 0] for part in block.attn_norm(c))
    parts = (1 + scale, shift, gate, 1 + ff_scale, ff_shift, ff_gate)
    return [StepVectors(*step) for step in zip(*parts, strict=True)]


def stacked(attention: Attention) -> tuple[Tensor, Tensor]:
    """Weight [3 W, D] and bias of q, k and v as one projection; the three become views of it, so nothing lies twice."""
    projections = (attention.to_q, attention.to_k, attention.to_v)
    weight, bias = (torch.cat([getattr(one, name) for one in projections]) for name in ("weight", "bias"))
    for one, own_weight, own_bias in zip(projections, weight.chunk(3), bias.chunk(3), strict=True):
        one.weight.data, one.bias.data = own_weight, own_bias
    return weight, bias


def turn_first_head(qkv: Tensor, width: int, rotary: Rotary) -> None:
    """Turns channel pairs (2k, 2k + 1) of head 0 of queries and keys [2, T, 3 W], in place (spec 9.1)."""
    cos, sin = rotary
    first = qkv.unflatten(-1, (3, width))[:, :, :2, : cos.shape[-1]]
    wide = first.to(torch.promote_types(cos.dtype, qkv.dtype))
    crossed = torch.stack((-wide[..., 1::2], wide[..., 0::2]), dim=-1).flatten(-2)
    first.copy_(wide * cos + crossed * sin)
