"""Steps of the language model as CUDA graphs over our own kernels, captured once at load.

A graph exists for every number of row blocks; rows that nobody uses belong to a spare slot and are computed for
nothing. Weights are the module's own. Everything that a stream carries lies in tables on the device with a line per
slot, so that a step needs no word from the host but which slots take part, and the host reads nothing but tokens.
"""

import gc
import math
from collections.abc import Sequence
from typing import Literal

import torch
import triton
from torch import Tensor

from runtime.errors import EngineUnavailable
from runtime.stage0 import draw_kernel as draw
from runtime.stage0.kernel_lm import KernelLM, Rows, Tile, Tiling
from runtime.stage0.lm import SpeechLM
from runtime.stage0.slot_engine import PIECE, early_ids
from runtime.types import SamplingParams

# Measured on an H200. A program of a step has 16 rows whatever their number, one of a prompt 64.
DECODE = Tiling(
    16, Tile(16, 128, 2), Tile(16, 128, 2, splits=4), Tile(32, 128, 2), Tile(16, 128, 2, 6, splits=4), Tile(32, 128)
)
PROMPT = Tiling(64, Tile(32, 64), Tile(32, 64), Tile(64, 64), Tile(32, 64), Tile(32, 64))
PROMPT_ROWS = (64, 128, 192, PIECE)


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
        early: bool = True,
    ) -> None:
        """Takes memory for all slots and captures. Raises EngineUnavailable when the model or the memory do not fit.

        `early` lets kernels start before the last has ended, where the GPU can do that.
        """
        lm = lm.eval().requires_grad_(False)
        self.slots, self.positions = slots, min(positions, lm.config.qwen.max_position_embeddings)
        self._early_ids, self._ids = early_ids(lm.config, fidelity), lm.config.rows
        self._decode, self._prompt = decode, prompt
        self._step_rows = tuple(range(decode.rows, slots + decode.rows, decode.rows))
        self._device = lm.speech_embedding.weight.device
        self._seated: tuple[int, ...] = ()  # the slots that the host last wrote into the table of rows
        self._stream = None
        if self._device.type == "cuda":
            # A step is short and others wait for its tokens: its kernels go before those of stage 1.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the weights are there
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                most = max(PIECE, self._step_rows[-1])
                self._lm = KernelLM(lm, slots + 1, self.positions, most, self._step_rows[-1], early)
                self._allocate()
                self._graphs = self._capture()
        except torch.OutOfMemoryError as full:
            raise EngineUnavailable(
                f"{slots} slots of {self.positions} positions do not fit; lower max_streams or slot_positions ({full})"
            ) from full
        except triton.OutOfResources as small:
            raise EngineUnavailable(f"the kernels do not fit this GPU ({small}); choose the torch engine") from small

    @property
    def logits(self) -> Tensor:
        """Of the last step [R, V], float32, until the next one."""
        return self._lm.logits

    def describe(self) -> dict[str, str]:
        cache = self._lm.cache
        rows, prompts = (", ".join(map(str, counts)) for counts in (self._step_rows, PROMPT_ROWS))
        return {
            "engine": "captured",
            "device": self._device.type,
            "precision": str(cache.dtype).removeprefix("torch."),
            "sampling": "ras by two draws or standard, by seed and position",
            "slots": f"{self.slots} of {self.positions} positions, {cache.nbytes / 2**30:.1f} GB",
            "graphs": f"steps of {rows} rows, prompts of {prompts}",
        }

    def open(self, slot: int, token: int, position: int, sampling: SamplingParams, seed: int, min_tokens: int) -> None:
        is_standard = sampling.method == "standard"
        line = [0] * draw.NUMBERS
        line[draw.TOKEN], line[draw.POSITION], line[draw.MIN_TOKENS] = token, position, min_tokens
        line[draw.TOP_K], line[draw.WINDOW] = sampling.top_k or self._ids, sampling.window
        line[draw.REPEATS] = max(1, math.ceil(sampling.window * sampling.repeat_threshold))
        line[draw.STANDARD], line[draw.SEED] = is_standard, seed
        knobs = [0.0] * draw.KNOBS
        knobs[draw.TEMPERATURE], knobs[draw.TOP_P] = sampling.temperature, sampling.top_p
        knobs[draw.PENALTY] = sampling.repetition_penalty if is_standard else 1.0
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
            self._send([*ids, *positions, *slots], self._prompt_table[: 3 * rows])
            self._run("prompt", rows)

    def launch(self, slots: Sequence[int]) -> Launched:
        rows = next(rows for rows in self._step_rows if rows >= len(slots))
        wanted = (*slots, *[self.slots] * (rows - len(slots)))
        with torch.cuda.stream(self._stream):
            if wanted != self._seated[:rows]:
                self._send(wanted, self._slot_table[:rows])
                self._seated = wanted
            self._run("step", rows)
            return Launched(self._drawn, len(slots))

    def close(self) -> None:
        """Gives the device's memory back: graphs, slots and the model go with the last that refers to them."""
        if self._stream is not None:
            self._stream.synchronize()
        vars(self).clear()

    def _allocate(self) -> None:
        """The tables: a line per slot, one of them spare, and the rows of the next step and of the next prompt."""

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, device=self._device, dtype=dtype)

        lines, most = self.slots + 1, self._step_rows[-1]
        self._numbers = new(lines, draw.NUMBERS, dtype=torch.int64)
        self._knobs = new(lines, draw.KNOBS, dtype=torch.float32)
        self._history = new(lines, self.positions, dtype=torch.int32)
        self._seen = new(lines, self._ids, dtype=torch.uint8)
        self._slot_table = torch.full((most,), self.slots, device=self._device)
        self._prompt_table = new(3 * PIECE, dtype=torch.int64)  # ids, positions, slots
        self._count = torch.arange(PIECE, device=self._device)
        self._drawn: Tensor = new(most, dtype=torch.int64)

    def _send(self, values: Sequence[float], target: Tensor) -> None:
        """Copies from pinned memory, which torch keeps until the copy is over; nobody waits."""
        pinned = torch.tensor(values, dtype=target.dtype, pin_memory=self._device.type == "cuda")
        target.copy_(pinned, non_blocking=True)

    def _capture(self) -> dict[tuple[str, int], torch.cuda.CUDAGraph]:
        """Compiles by running each kind of step once, then captures all, the largest first."""
        graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        if self._device.type != "cuda":  # in Triton's interpreter
            return graphs
        kinds = [("step", rows) for rows in reversed(self._step_rows)]
        kinds += [("prompt", rows) for rows in reversed(PROMPT_ROWS)]
        for kind, rows in kinds:
            self._eager(kind, rows)
        torch.cuda.synchronize(self._device)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # what a collection frees within a capture would break it
        try:
            for kind, rows in kinds:
                graphs[kind, rows] = graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                    self._eager(kind, rows)
        finally:
            if collecting:
                gc.enable()
        return graphs

    def _run(self, kind: str, rows: int) -> None:
        graph = self._graphs.get((kind, rows))
        if graph is None:
            self._eager(kind, rows)
        else:
            graph.replay()

    def _eager(self, kind: str, rows: int) -> None:
        if kind == "prompt":
            ids, positions, slots = self._prompt_table[: 3 * rows].view(3, rows)
            self._lm.forward(Rows(ids, positions, self._count, 1, slots), rows, self._prompt)
            return
        slots, numbers = self._slot_table, self._numbers
        here = Rows(numbers[0, draw.TOKEN :], numbers[0, draw.POSITION :], slots, draw.NUMBERS, slots)
        self._lm.forward(here, rows, self._decode)
        self._lm.score(slots, rows, self._decode)
        draw.draw_kernel[(rows,)](
            self._lm.logits, slots, numbers, self._knobs, self._history, self._seen, self._drawn,
            self.slots, *self._early_ids, self._ids, self.positions, triton.next_power_of_2(self._ids),
            draw.NUMBERS, draw.KNOBS, num_warps=8, **self._lm.begin,
        )  # fmt: skip
