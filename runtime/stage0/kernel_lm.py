"""The language model as our kernels call it: a plain module's weights, a cache by slots, room to work in, one forward.

Shapes as in `kernels.py`; S slots, of which the last is nobody's: rows that are only filler belong to it. Nothing here
takes memory while it runs, so that all of it can be captured.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from runtime.errors import EngineUnavailable
from runtime.stage0 import kernels
from runtime.stage0.early_launch import early_launch
from runtime.stage0.lm import Layer, SpeechLM, rotary

ATTENTION_TILE = 128  # positions
SPLITS = 4  # programs that share a row's positions


@dataclass(frozen=True, slots=True)
class Tile:
    """How one matrix kernel is cut: features and inputs of a tile, and what Triton is told."""

    features: int
    inputs: int  # in half precision; in float32 as many bytes, so that any GPU's shared memory holds them
    warps: int = 4
    stages: int = 4
    splits: int = 1  # programs that share the inputs


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of all kernels for one kind of step. The numbers were measured; results are the same bits only within
    one tiling.
    """

    rows: int  # of a program
    qkv: Tile
    out: Tile
    gate: Tile
    down: Tile
    head: Tile


@dataclass(slots=True, eq=False)
class Rows:
    """Which slots the rows of a graph are, and where those rows' tokens and positions stand."""

    ids: Tensor
    positions: Tensor
    at: Tensor
    stride: int
    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """Of one layer."""

    first_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    second_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class KernelLM:
    """A SpeechLM on a device, advanced by rows of which each is one position of one slot."""

    def __init__(self, lm: SpeechLM, slots: int, positions: int, most_rows: int, scored_rows: int, early: bool) -> None:
        """Room for so many slots (the spare one included) of so many positions, and for so many rows at once."""
        check_widths(lm)
        self.lm, self.positions, self._spare = lm, positions, slots - 1
        weight, qwen = lm.speech_embedding.weight, lm.config.qwen
        device, half_dim = weight.device, qwen.head_dim // 2

        def new(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self._wide = weight.element_size() // 2  # 2 in float32
        self.begin: dict[str, bool] = early_launch(device) if early else {"EARLY": False}
        heads, kv, width = qwen.num_attention_heads, qwen.num_key_value_heads, qwen.hidden_size
        self.cache = new(qwen.num_hidden_layers, 2, slots, kv, positions, qwen.head_dim)
        self.logits = new(scored_rows, lm.config.rows, dtype=torch.float32)
        self._layers = gather(lm)
        self._position = new(most_rows, dtype=torch.int32)
        self._x, self._scaled = new(most_rows, width), new(most_rows, width)
        self._squares = new(width, most_rows, dtype=torch.float32)  # more parts than any tiling makes
        self._q, self._mixed = new(most_rows, heads * qwen.head_dim), new(most_rows, heads * qwen.head_dim)
        self._h = new(most_rows, qwen.intermediate_size)
        self._group = padded(heads // kv)
        parts = (most_rows, kv, SPLITS, self._group)
        self._sums = new(*parts, qwen.head_dim, dtype=torch.float32)
        self._peaks, self._weights = new(*parts, dtype=torch.float32), new(*parts, dtype=torch.float32)
        self._partial = new(8, most_rows, width, dtype=torch.float32)  # of up to 8 splits
        self._arrived = new(most_rows * max(kv, width // 128), dtype=torch.int32)  # zero between kernels
        angles = rotary(torch.arange(positions, device=device)[None], qwen.head_dim, qwen.rope_theta, torch.float32)
        self._cosine, self._sine = (table[0, :, 0, :half_dim].contiguous() for table in angles)  # the rest is the same

    def forward(self, at: Rows, rows: int, tiling: Tiling) -> None:
        """Hidden states of the rows' positions in `_x`, keys and values in their slots."""
        lm, qwen = self.lm, self.lm.config.qwen
        width, inner, dim, limit = qwen.hidden_size, qwen.intermediate_size, qwen.head_dim, self.positions
        heads, kv, eps = qwen.num_attention_heads, qwen.num_key_value_heads, qwen.rms_norm_eps
        x, q, mixed, h, position = self._x, self._q, self._mixed, self._h, self._position
        scaled, squares, lines = self._scaled, self._squares, self._squares.shape[1]
        after_out, after_down = (triton.cdiv(width, tile.features) for tile in (tiling.out, tiling.down))
        norms = [layer.first_norm for layer in self._layers[1:]] + [lm.backbone.norm.weight]
        kernels.embed_kernel[(rows,)](
            at.ids, at.positions, at.at, at.stride, lm.speech_embedding.weight, lm.backbone.embed_tokens.weight,
            self._layers[0].first_norm, x, scaled, squares, position, after_down, lines, width,
            triton.next_power_of_2(width), **self.begin,
        )  # fmt: skip
        blocks = rows // tiling.rows
        for (keys, values), layer, norm in zip(self.cache, self._layers, norms, strict=True):
            tile = tiling.qkv
            grid = (blocks, (heads + 2 * kv) * triton.cdiv(dim // 2, tile.features))
            kernels.qkv_kernel[grid](
                scaled, squares, layer.qkv, layer.qkv_bias, self._cosine, self._sine, at.slots, self._spare, position,
                q, keys, values, eps, after_down, lines, width, heads, kv, dim, limit,
                padded(after_down), **self._cut(tiling, tile, width),
            )  # fmt: skip
            kernels.attention_kernel[(rows, kv, SPLITS)](
                q, keys, values, at.slots, position, self._sums, self._peaks, self._weights, self._arrived,
                mixed, dim**-0.5, heads, kv, dim, limit, self._group, ATTENTION_TILE // self._wide, SPLITS,
                **self.begin,
            )  # fmt: skip
            kernels.add_projection_kernel[(blocks, after_out, tiling.out.splits)](
                mixed, layer.out, layer.second_norm, at.slots, self._spare, x, scaled, squares, self._partial,
                self._arrived, lines, width, heads * dim, tiling.out.splits,
                **self._cut(tiling, tiling.out, heads * dim),
            )  # fmt: skip
            kernels.gate_kernel[(blocks, triton.cdiv(inner, tiling.gate.features))](
                scaled, squares, layer.gate, layer.up, at.slots, self._spare, h, eps, after_out, lines, inner, width,
                padded(after_out), **self._cut(tiling, tiling.gate, width),
            )  # fmt: skip
            kernels.add_projection_kernel[(blocks, after_down, tiling.down.splits)](
                h, layer.down, norm, at.slots, self._spare, x, scaled, squares, self._partial,
                self._arrived, lines, width, inner, tiling.down.splits, **self._cut(tiling, tiling.down, inner),
            )  # fmt: skip

    def score(self, slots: Tensor, rows: int, tiling: Tiling) -> None:
        """`logits` [R, V] of the rows that `forward` has just advanced."""
        lm, width, ids = self.lm, self.lm.config.qwen.hidden_size, self.lm.config.rows
        parts = triton.cdiv(width, tiling.down.features)
        kernels.head_kernel[(rows // tiling.rows, triton.cdiv(ids, tiling.head.features))](
            self._scaled, self._squares, lm.llm_decoder.weight, slots, self._spare, self.logits,
            lm.config.qwen.rms_norm_eps, parts, self._squares.shape[1], ids, width, padded(parts),
            **self._cut(tiling, tiling.head, width),
        )  # fmt: skip

    def _cut(self, tiling: Tiling, tile: Tile, inputs: int) -> dict[str, int]:
        """What a matrix kernel is told. Inputs come in whole tiles: narrow models have smaller ones."""
        width = tile.inputs // self._wide
        while inputs % width:
            width //= 2
        return self.begin | {
            "ROWS": tiling.rows,
            "F": tile.features,
            "BK": width,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def gather(lm: SpeechLM) -> list[_Weights]:
    """Weights by layer, with query, key and value in one matrix; the module's own become views of it."""
    gathered = []
    for layer in lm.backbone.layers:
        assert isinstance(layer, Layer)
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight, bias = (torch.cat([getattr(part, name).data for part in parts]) for name in ("weight", "bias"))
        sizes = [len(part.weight) for part in parts]
        for part, rows, row_bias in zip(parts, weight.split(sizes), bias.split(sizes), strict=True):
            part.weight.data, part.bias.data = rows, row_bias
        gathered.append(
            _Weights(
                layer.input_layernorm.weight,
                weight,
                bias,
                attention.o_proj.weight,
                layer.post_attention_layernorm.weight,
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
                mlp.down_proj.weight,
            )
        )
    return gathered


def padded(count: int) -> int:
    """The size of the tile that holds so many: a power of two, and no less than matrix instructions take."""
    return max(16, triton.next_power_of_2(count))


def check_widths(lm: SpeechLM) -> None:
    """Raises EngineUnavailable for a shape that the kernels' tiles do not divide."""
    qwen = lm.config.qwen
    for name, width in (
        ("hidden_size", qwen.hidden_size),
        ("intermediate_size", qwen.intermediate_size),
        ("head_dim", qwen.head_dim),
    ):
        if width % 16:
            raise EngineUnavailable(f"{name} is {width}, no multiple of 16; choose the torch engine")
