"""HiFT for a GPU: windows of several streams laid end to end, few kernels, captured as CUDA graphs.

Shapes: R rows of W frames (50 Hz) each with its own end, T slots of a frame in all; P positions at some rate to the
frame, channels last. A row takes W + 1 slots: the spectrum of W frames has 120 W + 1 columns. Nothing of a row depends
on its neighbours: convolutions stop at its begin, columns behind its end are taken out whatever they hold. Each
convolution names its precision, so that no switch of the process has a say in it.

The network is that of hift.py, its weights are laid out by hift_weights.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.stage1.f0 import F0Predictor
from runtime.stage1.graphs import CudaCapture, GraphTable
from runtime.stage1.hift import MAGNITUDE_LIMIT, HiFT, columns_per_frame
from runtime.stage1.hift_weights import Stage, lay_out
from runtime.stage1.row_convolution import Precision, convolve

# Slots of the captured runs, four to the octave so that at most a fifth is idle. What has more is run in parts.
GRAPH_SLOTS = (*(2**octave * quarter // 4 for octave in range(6, 11) for quarter in range(4, 8)), 2048)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Mel [80, n] of one stream and its source [480 n]; unless it ends there, the last 4 frames are look-ahead."""

    mel: Tensor
    source: Tensor
    is_last: bool


class PackedHiFT:
    """Pitch and samples of many windows at once. Made from folded weights in float64, which are cast once."""

    def __init__(self, hift: HiFT, device: torch.device, precision: Precision = "tf32", graph_bytes: int = 0) -> None:
        """`precision` as in `lay_out`; 0 bytes of graphs are none."""
        self.config = hift.config
        self.device = device
        self._lookahead = self.config.lookahead_frames
        self._columns = columns_per_frame(self.config)
        self._weights = lay_out(hift, device, precision)
        self._graphs: GraphTable[int] | None = None
        self._inputs = self._new_inputs(GRAPH_SLOTS[-1] if graph_bytes else 0)
        if device.type == "cuda":
            self._warm_up()
        if graph_bytes:
            self._capture(graph_bytes)

    def pitch(self, mels: Sequence[Tensor], ends: Sequence[bool]) -> list[Tensor]:
        """f0 [n] in Hz of mel [80, n] each; [n - 3] unless the stream ends there."""
        ahead = F0Predictor.lookahead_frames
        rows = [
            _with_future(F.pad(mel, (0, ahead)) if is_last else mel, ahead)
            for mel, is_last in zip(mels, ends, strict=True)
        ]
        lengths = [len(row) for row in rows]
        begin = np.repeat(np.cumsum([0, *lengths[:-1]], dtype=np.int32), lengths)
        starts = torch.from_numpy(begin).to(self.device, non_blocking=True)
        x = torch.cat(rows)
        for kernel in self._weights.pitch:
            _, x = convolve(x, kernel, starts, 1, activation="elu")
        f0, _ = convolve(x, self._weights.pitch_head, starts, 1)
        return list(f0[:, 0].abs().split(lengths))

    def samples(self, windows: Sequence[Window]) -> list[Tensor]:
        """Samples [480 W] before the clamp: W is n, or n - 4 when more mel follows; then the last frame waits."""
        lengths = [window.mel.shape[1] - (0 if window.is_last else self._lookahead) for window in windows]
        out: list[Tensor] = []
        for first, last in _groups(lengths, GRAPH_SLOTS[-1]):
            out += self._run(windows[first:last], lengths[first:last])
        return out

    def describe(self) -> str:
        """How it runs, for people."""
        graphs = self._graphs
        if graphs is None:
            return "packed, no graphs"
        runs = f"{graphs.replays} runs replayed, {graphs.eager_runs} not"
        return f"packed, {len(graphs)} graphs in {graphs.num_bytes / 2**20:.0f} MiB, {runs}"

    def _run(self, windows: Sequence[Window], lengths: Sequence[int]) -> list[Tensor]:
        hop = self.config.samples_per_frame
        starts = [0, *np.cumsum([length + 1 for length in lengths]).tolist()]
        slots = next((size for size in GRAPH_SLOTS if size >= starts[-1]), starts[-1])
        inputs = self._inputs if slots <= len(self._inputs.mel) else self._new_inputs(slots)
        for window, length, start in zip(windows, lengths, starts, strict=False):
            mel = F.pad(window.mel, (0, self._lookahead)) if window.is_last else window.mel
            inputs.mel[start : start + length].unflatten(1, (len(mel), -1)).copy_(_taps(mel, self._lookahead))
            source = inputs.source[start * hop : (start + length) * hop + self.config.istft_n_fft]
            source.copy_(_edged(window.source, length * hop, self.config.istft_n_fft // 2))
        inputs.borders[:, :slots].copy_(_borders(lengths, slots), non_blocking=True)
        if self._graphs is None:
            samples = self._generate(inputs, slots)
        else:
            samples = self._graphs.run(slots, lambda: self._generate(inputs, slots))
        # Copies: the next replay writes into the same memory.
        return [
            samples[start * hop : (start + length) * hop].clone()
            for start, length in zip(starts, lengths, strict=False)
        ]

    def _generate(self, inputs: "_Inputs", slots: int) -> Tensor:
        """Samples [480 T] of the inputs' first T slots."""
        begin, end = inputs.borders[0, :slots], inputs.borders[1, :slots]
        column = torch.arange(slots * self._columns, device=self.device)
        row_begin = begin.repeat_interleave(self._columns, output_size=len(column)) * self._columns
        valid = (column <= end.repeat_interleave(self._columns, output_size=len(column)) * self._columns)[:, None]
        frames = inputs.source.unfold(0, self.config.istft_n_fft, self.config.istft_hop)[: len(column)].contiguous()
        spectrum, _ = convolve(frames, self._weights.transform, begin, self._columns)
        edge = max(self._columns // stage.rate for stage in self._weights.stages)
        spectrum = F.pad(torch.where(valid, spectrum, 0.0), (0, 0, edge - 1, edge + 1))
        x, _ = convolve(inputs.mel[:slots], self._weights.pre, begin, 1)
        x = F.leaky_relu(x, self.config.leaky_slope)
        rate = 1
        for stage in self._weights.stages:
            x = convolve(x, stage.up, begin, rate)[0].view(stage.rate * slots, -1)
            rate = stage.rate
            if rate == self._columns:  # one element more in front, a reflection, to make as many as columns (spec 9.27)
                x = x[torch.where(column == row_begin, column + 1, column - 1)]
            x = x + self._from_source(stage, spectrum, begin, edge)
            blocks = [block(x, begin, rate) for block in stage.blocks]
            x = F.leaky_relu(reduce(torch.add, blocks) / len(blocks), stage.slope)
        return self._synthesize(convolve(x, self._weights.post, begin, rate)[0], valid, begin)

    def _from_source(self, stage: Stage, spectrum: Tensor, begin: Tensor, edge: int) -> Tensor:
        """What a stage hears of the source. Element n sees columns n * stride - (stride - 1) to (n + 1) * stride."""
        stride, positions = self._columns // stage.rate, stage.rate * len(begin)
        seen = stage.from_source.weight.shape[2] // spectrum.shape[1]
        first = spectrum[edge - stride if seen > 1 else edge - 1 :]
        windows = first.as_strided((positions, seen * first.shape[1]), (stride * first.shape[1], 1)).contiguous()
        x, _ = convolve(windows, stage.from_source, begin, stage.rate)
        return stage.source_block(x, begin, stage.rate)

    def _synthesize(self, head: Tensor, valid: Tensor, begin: Tensor) -> Tensor:
        """Inverse transform and overlap-add: column n sounds in the 16 samples from 4 n - 8 on."""
        bins = head.shape[1] // 2
        magnitude = head[:, :bins].clamp(max=math.log(MAGNITUDE_LIMIT)).exp()
        phase = torch.sin(head[:, bins:])
        spectrum = torch.where(valid, torch.cat([magnitude * torch.cos(phase), magnitude * torch.sin(phase)], 1), 0.0)
        frames, _ = convolve(spectrum, self._weights.inverse, begin, self._columns)
        envelope = valid * self._weights.envelope.flatten()
        return (self._overlap_add(frames) / self._overlap_add(envelope)).flatten()

    def _overlap_add(self, frames: Tensor) -> Tensor:
        """[N, n_fft] -> [N, hop]; where no column is valid the result means nothing."""
        parts = len(self._weights.envelope)
        before = parts // 2 - 1
        blocks = F.pad(frames, (0, 0, before, parts - 1 - before)).unflatten(1, (parts, -1))
        return reduce(torch.add, (blocks[parts - 1 - part :][: len(frames), part] for part in range(parts)))

    def _new_inputs(self, slots: int) -> "_Inputs":
        config = self.config
        return _Inputs(
            torch.zeros(slots, config.mel_bins * (self._lookahead + 1), device=self.device),
            torch.zeros(slots * config.samples_per_frame + config.istft_n_fft, device=self.device),
            torch.zeros(2, slots, dtype=torch.int32, device=self.device),
        )

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compiles every kernel: a request is not to wait for that."""
        mel = torch.zeros(self.config.mel_bins, 1, device=self.device)
        self.pitch([mel], [True])
        self.samples([Window(mel, torch.zeros(self.config.samples_per_frame, device=self.device), is_last=True)])

    @torch.inference_mode()
    def _capture(self, limit_bytes: int) -> None:
        self._graphs = GraphTable(CudaCapture(self.device), limit_bytes=limit_bytes)
        for slots in reversed(GRAPH_SLOTS):
            self._graphs.capture(slots, lambda slots=slots: self._generate(self._inputs, slots))  # type: ignore[misc]


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """Fixed memory that graphs read. Slots that no row takes hold what an earlier call left there."""

    mel: Tensor  # [T, 80 * 5]: a frame and the four behind it
    source: Tensor  # [480 T + 16]: sample s of a slot lies at 480 slot + 8 + s, 8 more at both ends of a row
    borders: Tensor  # [2, T] int32: where the row of a slot begins, and the slot behind its last frame


def _taps(mel: Tensor, ahead: int) -> Tensor:
    """[80, n] -> [n - ahead, 80, ahead + 1]: each frame with those behind it."""
    return mel.unfold(1, ahead + 1, 1).transpose(0, 1)


def _with_future(mel: Tensor, ahead: int) -> Tensor:
    return _taps(mel, ahead).flatten(1)


def _edged(source: Tensor, samples: int, edge: int) -> Tensor:
    """So many samples with `edge` more at either end: what follows, or the reflection where nothing does."""
    right = max(0, samples + edge - len(source))
    return F.pad(source[None], (edge, right), mode="reflect")[0, : samples + 2 * edge]


def _borders(lengths: Sequence[int], slots: int) -> Tensor:
    """For each slot the begin and end of its row; idle slots are a row of their own, of which nothing is valid."""
    sizes = np.array(lengths) + 1
    first = np.cumsum(sizes) - sizes
    idle = slots - int(sizes.sum())
    begin = np.append(np.repeat(first, sizes), np.full(idle, slots - idle))
    end = np.append(np.repeat(first + sizes - 1, sizes), np.full(idle, -1))
    return torch.from_numpy(np.stack([begin, end]).astype(np.int32))


def _groups(lengths: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Neighbours that are run together: (first, behind last). A row above the limit runs alone."""
    groups, first, slots = [], 0, 0
    for index, length in enumerate(lengths):
        if index > first and slots + length + 1 > limit:
            groups.append((first, index))
            first, slots = index, 0
        slots += length + 1
    return [*groups, (first, len(lengths))]
