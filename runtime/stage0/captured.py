"""Steps of the language model as CUDA graphs over our own kernels, captured once at load.

A graph exists for every number of row blocks; rows that nobody uses belong to a spare slot and are computed for
nothing. Weights are the module's own. Everything that a stream carries lies in tables on the device with a line per
slot, so that a step needs no word from the host but which slots take part, and the host reads nothing but tokens.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from runtime.errors import EngineUnavailable
from runtime.stage0 import draw_kernel as draw
from runtime.stage0 import kernels
from runtime.stage0.lm import Layer, SpeechLM, rotary
from runtime.stage0.slot_engine import PIECE, early_ids
from runtime.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Tile:
    """How one matrix kernel is cut: features and inputs of a tile, and what Triton is told."""

    features: int
    inputs: int
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


DECODE = Tiling(16, Tile(16, 128, 2), Tile(16, 128, 2), Tile(32, 128), Tile(16, 128, 2, 6, 4), Tile(32, 128))
PROMPT = Tiling(64, Tile(32, 64), Tile(32, 64), Tile(64, 64), Tile(32, 64), Tile(32, 64))
PROMPT_ROWS = (64, 128, 192, PIECE)
ATTENTION_TILE = 128  # positions
SPLITS = 4  # of a row's positions, by tiles in turn


class Launched:
    """A step under way, and the page of host memory that its tokens come to."""

    def __init__(self, drawn: Tensor, rows: int) -> None:
        self._host = torch.empty(rows, dtype=torch.int64, pin_memory=drawn.is_cuda)
        self._host.copy_(drawn[:rows], non_blocking=True)
        self._event = torch.cuda.Event() if drawn.is_cuda else None
        if self._event is not None:
            self._event.record()

    def tokens(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


@dataclass(slots=True, eq=False)
class _Rows:
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


class CapturedSteps:
    """Slots on one GPU."""

    def __init__(
        self,
        lm: SpeechLM,
        slots: int,
        positions: int,
        fidelity: Literal["intended", "official"] = "intended",
        decode: Tiling = DECODE,
        prompt: Tiling = PROMPT,
        early: int = 0,
        fetch: bool = True,
    ) -> None:
        """Takes memory for all slots and captures. Raises EngineUnavailable when the model or the memory do not fit."""
        self._lm, qwen = lm.eval().requires_grad_(False), lm.config.qwen
        check_widths(lm)
        self.slots, self.positions = slots, min(positions, qwen.max_position_embeddings)
        self._early, self._ids = early_ids(lm.config, fidelity), lm.config.rows
        weight = lm.speech_embedding.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._decode, self._prompt = decode, prompt
        self._seated: tuple[int, ...] = ()  # slots that the table of rows holds, filler included
        self._block_rows = tuple(range(decode.rows, slots + decode.rows, decode.rows))
        self._stream = None
        if self._device.type == "cuda":
            # A step is short and others wait for its tokens: its kernels go before those of stage 1.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        # Whether a kernel may start while the one before it runs; of prefetching there is nothing to gain in float32.
        fetch = fetch and self._dtype.itemsize == 2
        self._side = torch.cuda.Stream(self._device) if self._stream is not None and fetch else None
        self._begin = {"EARLY": early, "launch_pdl": True} if early else {"EARLY": 0}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the weights are there
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                self._allocate()
                self._layers = self._gather()
                self._capture()
        except torch.OutOfMemoryError as full:
            raise EngineUnavailable(
                f"{slots} slots of {self.positions} positions do not fit; lower max_streams or slot_positions ({full})"
            ) from full

    @property
    def logits(self) -> Tensor:
        """Of the last step [R, V], float32, until the next one."""
        return self._logits

    def describe(self) -> dict[str, str]:
        rows = ", ".join(map(str, self._block_rows))
        return {
            "engine": "captured",
            "device": self._device.type,
            "precision": str(self._dtype).removeprefix("torch."),
            "sampling": "ras by two draws or standard, by seed and position",
            "slots": f"{self.slots} of {self.positions} positions, {self._cache.nbytes / 2**30:.1f} GB",
            "graphs": f"steps of {rows} rows, prompts of {', '.join(map(str, PROMPT_ROWS))}",
        }

    def open(self, slot: int, token: int, position: int, sampling: SamplingParams, seed: int, min_tokens: int) -> None:
        line = [0] * draw.NUMBERS
        line[draw.TOKEN], line[draw.POSITION], line[draw.MIN_TOKENS] = token, position, min_tokens
        line[draw.TOP_K], line[draw.WINDOW] = sampling.top_k or self._ids, sampling.window
        line[draw.REPEATS] = max(1, -int(-sampling.window * sampling.repeat_threshold // 1))
        line[draw.STANDARD], line[draw.SEED] = sampling.method == "standard", seed
        knobs = [0.0] * draw.KNOBS
        knobs[draw.TEMPERATURE], knobs[draw.TOP_P] = sampling.temperature, sampling.top_p
        knobs[draw.PENALTY] = sampling.repetition_penalty if sampling.method == "standard" else 1.0
        with torch.cuda.stream(self._stream):
            self._send(line, self._numbers[slot])
            self._send(knobs, self._knobs[slot])
            if knobs[draw.PENALTY] != 1:
                self._seen[slot].zero_()

    def read(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        lines = [(slot, start + index, token) for slot, start, ids in pieces for index, token in enumerate(ids)]
        rows = next(rows for rows in PROMPT_ROWS if rows >= len(lines))
        lines += [(self.slots, 0, 0)] * (rows - len(lines))
        slots, positions, ids = zip(*lines, strict=True)
        with torch.cuda.stream(self._stream):
            self._send([*ids, *positions, *slots], self._prompt_rows[: 3 * rows])
            self._run("prompt", rows)

    def launch(self, slots: Sequence[int]) -> Launched:
        rows = next(rows for rows in self._block_rows if rows >= len(slots))
        wanted = (*slots, *[self.slots] * (rows - len(slots)))
        with torch.cuda.stream(self._stream):
            if wanted != self._seated[: len(wanted)]:
                self._send(wanted, self._slot_rows[:rows])
                self._seated = wanted
            self._run("decode", rows)
            return Launched(self._drawn, len(slots))

    def close(self) -> None:
        """Gives the device's memory back: graphs, slots and the model go with the last that refers to them."""
        if self._stream is not None:
            self._stream.synchronize()
        vars(self).clear()

    # Memory

    def _allocate(self) -> None:
        config, qwen = self._lm.config, self._lm.config.qwen
        rows, lines = max(PIECE, self._block_rows[-1]), self.slots + 1  # the last line is spare

        def new(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return torch.zeros(shape, device=self._device, dtype=dtype)

        heads, head_dim, kv = qwen.num_attention_heads, qwen.head_dim, qwen.num_key_value_heads
        self._cache = new(qwen.num_hidden_layers, 2, lines, kv, self.positions, head_dim)
        self._numbers = new(lines, draw.NUMBERS, dtype=torch.int64)
        self._knobs = new(lines, draw.KNOBS, dtype=torch.float32)
        self._history = new(lines, self.positions, dtype=torch.int32)
        self._seen = new(lines, config.rows, dtype=torch.uint8)
        self._slot_rows = torch.full((self._block_rows[-1],), self.slots, device=self._device)
        self._prompt_rows = new(3 * PIECE, dtype=torch.int64)
        self._count = torch.arange(PIECE, device=self._device)
        self._position = new(rows, dtype=torch.int32)
        width = qwen.hidden_size
        self._x, self._scaled, self._q = new(rows, width), new(rows, width), new(rows, heads * head_dim)
        self._squares = new(width, rows, dtype=torch.float32)  # more parts than any tiling makes
        self._mixed, self._h = new(rows, heads * head_dim), new(rows, qwen.intermediate_size)
        self._logits = new(self._block_rows[-1], config.rows, dtype=torch.float32)
        self._drawn: Tensor = new(self._block_rows[-1], dtype=torch.int64)
        self._group = max(16, triton.next_power_of_2(heads // kv))
        parts = (rows, kv, SPLITS, self._group)
        self._sums = new(*parts, head_dim, dtype=torch.float32)
        self._peaks, self._weights = new(*parts, dtype=torch.float32), new(*parts, dtype=torch.float32)
        self._partial = new(8, rows, width, dtype=torch.float32)  # of up to 8 splits
        self._arrived = new(max(rows * kv, rows * width // 128), dtype=torch.int32)  # zero between kernels
        every = torch.arange(self.positions, device=self._device)[None]
        half = slice(0, head_dim // 2)  # the other half is the same
        self._cosine, self._sine = (
            table[0, :, 0, half].contiguous() for table in rotary(every, head_dim, qwen.rope_theta, torch.float32)
        )

    def _gather(self) -> list["_Weights"]:
        """Weights by layer, with query, key and value in one matrix; the module's own become views of it."""
        gathered = []
        for layer in self._lm.backbone.layers:
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

    def _send(self, values: Sequence[float], target: Tensor) -> None:
        """Copies from pinned memory, which torch keeps until the copy is over; nobody waits."""
        pinned = torch.tensor(values, dtype=target.dtype, pin_memory=self._device.type == "cuda")
        target.copy_(pinned, non_blocking=True)

    # Steps

    def _capture(self) -> None:
        """Compiles by running each kind of step once, then captures all, the largest first."""
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        if self._device.type != "cuda":
            return
        wanted = [("decode", rows) for rows in reversed(self._block_rows)]
        wanted += [("prompt", rows) for rows in reversed(PROMPT_ROWS)]
        self._prompt_rows[2 * PIECE :] = self.slots
        for kind, rows in wanted:
            self._eager(kind, rows)
        torch.cuda.synchronize(self._device)
        gc.collect()
        gc.freeze()  # a collection during capture may free device memory, which ends the capture
        try:
            for kind, rows in wanted:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                    self._eager(kind, rows)
                self._graphs[kind, rows] = graph
        finally:
            gc.unfreeze()

    def _run(self, kind: str, rows: int) -> None:
        graph = self._graphs.get((kind, rows))
        if graph is None:
            self._eager(kind, rows)
        else:
            graph.replay()

    def _eager(self, kind: str, rows: int) -> None:
        if kind == "prompt":
            ids, positions, slots = self._prompt_rows[: 3 * rows].view(3, rows)
            self._forward(_Rows(ids, positions, self._count, 1, slots), rows, self._prompt)
            return
        slots, numbers = self._slot_rows, self._numbers
        here = _Rows(numbers[0, draw.TOKEN :], numbers[0, draw.POSITION :], slots, draw.NUMBERS, slots)
        self._forward(here, rows, self._decode)
        self._draw(rows)

    def _forward(self, at: _Rows, rows: int, tiling: Tiling) -> None:
        """Hidden states of the rows' positions in `_x`, keys and values in their slots."""
        lm, qwen = self._lm, self._lm.config.qwen
        width, inner, dim, limit = qwen.hidden_size, qwen.intermediate_size, qwen.head_dim, self.positions
        heads, kv, eps = qwen.num_attention_heads, qwen.num_key_value_heads, qwen.rms_norm_eps
        x, q, mixed, h, position = self._x, self._q, self._mixed, self._h, self._position
        scaled, squares, lines = self._scaled, self._squares, self._squares.shape[1]
        after_out, after_down = (triton.cdiv(width, tile.features) for tile in (tiling.out, tiling.down))
        norms = [layer.first_norm for layer in self._layers[1:]] + [lm.backbone.norm.weight]
        kernels.embed_kernel[(rows,)](
            at.ids, at.positions, at.at, at.stride, lm.speech_embedding.weight, lm.backbone.embed_tokens.weight,
            self._layers[0].first_norm, x, scaled, squares, position, after_down, lines, width,
            triton.next_power_of_2(width), **self._begin,
        )  # fmt: skip
        blocks = rows // tiling.rows
        following = [*self._layers[1:], None]
        for (keys, values), layer, norm, after in zip(self._cache, self._layers, norms, following, strict=True):
            self._fetch(layer.gate, layer.up)
            tile = tiling.qkv
            grid = (blocks, (heads + 2 * kv) * triton.cdiv(dim // 2, tile.features))
            kernels.qkv_kernel[grid](
                scaled, squares, layer.qkv, layer.qkv_bias, self._cosine, self._sine, at.slots, position,
                q, keys, values, eps, after_down, lines, width, heads, kv, dim, limit,
                triton.next_power_of_2(after_down), **cut(tiling, tile, width, self._begin),
            )  # fmt: skip
            kernels.attention_kernel[(rows, kv, SPLITS)](
                q, keys, values, at.slots, position, self._sums, self._peaks, self._weights, self._arrived,
                mixed, dim**-0.5, heads, kv, dim, limit, self._group, ATTENTION_TILE, SPLITS, **self._begin,
            )  # fmt: skip
            kernels.add_projection_kernel[(blocks, after_out, tiling.out.splits)](
                mixed, layer.out, layer.second_norm, x, scaled, squares, self._partial, self._arrived, lines, width,
                heads * dim, tiling.out.splits, **cut(tiling, tiling.out, heads * dim, self._begin),
            )  # fmt: skip
            self._fetch(layer.down, *([after.qkv, after.out] if after else []))
            kernels.gate_kernel[(blocks, triton.cdiv(inner, tiling.gate.features))](
                scaled, squares, layer.gate, layer.up, h, eps, after_out, lines, inner, width,
                triton.next_power_of_2(after_out), **cut(tiling, tiling.gate, width, self._begin),
            )  # fmt: skip
            kernels.add_projection_kernel[(blocks, after_down, tiling.down.splits)](
                h, layer.down, norm, x, scaled, squares, self._partial, self._arrived, lines, width,
                inner, tiling.down.splits, **cut(tiling, tiling.down, inner, self._begin),
            )  # fmt: skip

        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _fetch(self, *weights: Tensor) -> None:
        """Asks for weights that come next, on a branch beside the kernels that run now.

        Small kernels wait for each other more than for memory, which has time to bring those into the L2 cache.
        """
        if self._side is None:
            return
        self._side.wait_stream(torch.cuda.current_stream())
        lines = [weight.numel() // 64 for weight in weights] + [0, 0]
        first, second, third = (*weights, weights[0], weights[0])[:3]
        with torch.cuda.stream(self._side):
            kernels.fetch_kernel[(triton.cdiv(max(lines), 1024),)](
                first, second, third, lines[0], lines[1], lines[2], 1024, num_warps=4
            )

    def _draw(self, rows: int) -> None:
        lm, width, tiling = self._lm, self._lm.config.qwen.hidden_size, self._decode
        parts = triton.cdiv(width, tiling.down.features)
        kernels.head_kernel[(rows // tiling.rows, triton.cdiv(self._ids, tiling.head.features))](
            self._scaled, self._squares, lm.llm_decoder.weight, self._logits, lm.config.qwen.rms_norm_eps, parts,
            self._squares.shape[1], self._ids, width, triton.next_power_of_2(parts),
            **cut(tiling, tiling.head, width, self._begin),
        )  # fmt: skip
        draw.draw_kernel[(rows,)](
            self._logits, self._slot_rows, self._numbers, self._knobs, self._history, self._seen, self._drawn,
            self.slots, *self._early, self._ids, self.positions, triton.next_power_of_2(self._ids),
            draw.NUMBERS, draw.KNOBS, num_warps=8, **self._begin,
        )  # fmt: skip


def cut(tiling: Tiling, tile: Tile, inputs: int, early: dict[str, int]) -> dict[str, int]:
    """What a matrix kernel is told. Inputs come in whole tiles: narrow models have smaller ones."""
    width = tile.inputs
    while inputs % width:
        width //= 2
    return early | {
        "ROWS": tiling.rows,
        "F": tile.features,
        "BK": width,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def capable(device: torch.device) -> bool:
    """Of programmatic dependent launch, from Hopper on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


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
