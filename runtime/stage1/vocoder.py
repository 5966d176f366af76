"""Mel to sound, chunk by chunk, for many streams at once (spec 5.4, 5.5).

Shapes: mel [80, n] of new frames (50 Hz) -> samples [S] float32 (24 kHz). The network is run over windows: the new
frames of a stream and as many old ones as they depend on. What a stream carries besides are the phase sums of its
source and a count of frames, which is also the place in the noise. On a CPU f0 is float64 and the rest float32, a
window at a time; on a GPU all windows are one run (`hift_packed.py`). Phase sums are float64 everywhere.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from runtime.errors import GenerationError
from runtime.stage1.causal import fold_weight_norm
from runtime.stage1.f0 import F0Predictor
from runtime.stage1.hift import HiFT, left_context_frames
from runtime.stage1.hift_packed import PackedHiFT, Window
from runtime.stage1.host import on_host

ModuleT = TypeVar("ModuleT", bound=nn.Module)

READY_SECONDS = 30  # of noise, drawn at load on a GPU: 10 s of it take the CPU longer than a hop


class SourceNoise(Protocol):
    """Uniform noise in [0, 1), the same for every stream, with a value for each sample index."""

    def source_noise(self, start_sample: int, samples: int) -> Tensor:
        """[samples, harmonics + 1] from `start_sample` on."""
        ...


class HiFTRunner(Protocol):
    """The network over windows of several streams, none of which depends on its neighbours."""

    def pitch(self, mels: Sequence[Tensor], ends: Sequence[bool]) -> list[Tensor]:
        """f0 [n] in Hz of mel [80, n] each; [n - 3] unless the stream ends there."""
        ...

    def samples(self, windows: Sequence[Window]) -> list[Tensor]:
        """At least the samples before the clamp that are certain, from the first of each window on."""
        ...

    def describe(self) -> str: ...


@dataclass(slots=True, eq=False)
class VocoderState:
    """What one stream carries between chunks. `mel` and `source` begin at the same frame."""

    mel: Tensor  # [80, n]: frames that samples to come depend on
    source: Tensor  # [480 m], m <= n: the source as far as f0 is known
    phase_sums: Tensor  # [harmonics + 1] float64, after the last frame of `source`
    frames: int = 0  # seen so far
    emitted: int = 0  # frames that sounded
    clipped: int = 0  # samples that were cut to the limit
    is_finished: bool = False

    @property
    def start(self) -> int:
        """The frame that the window begins with."""
        return self.frames - self.mel.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class MelChunk:
    """New frames [80, n], n >= 0, of a stream; with `is_last` nothing follows."""

    state: VocoderState
    mel: Tensor
    is_last: bool


class Vocoder:
    """The network made ready for speaking, where the loaded module lies and without a change to it.

    Holds weights alone: any number of streams may take turns.
    """

    def __init__(self, hift: HiFT, noise: SourceNoise, runner: HiFTRunner | None = None) -> None:
        """`runner` is another way to run the same network than the plain one."""
        config = hift.config
        self.device = hift.conv_pre.weight.device
        self._mel_bins = config.mel_bins
        self._runner = runner or PlainHiFT(hift)
        # Built anew, as a deep copy shares the classes that folding takes apart.
        self._source = _folded_copy(HiFT(config), hift, self.device, torch.float32).m_source
        self._noise = noise
        self.samples_per_frame = config.samples_per_frame
        self.audio_limit = config.audio_limit
        # f0, conv_pre and the overlap-add each wait for the future (spec 9.34).
        self.delay_frames = F0Predictor.lookahead_frames + config.lookahead_frames + 1
        self.context_frames = left_context_frames(config)

    def open(self) -> VocoderState:
        return VocoderState(
            mel=torch.empty(self._mel_bins, 0, device=self.device),
            source=torch.empty(0, device=self.device),
            phase_sums=self._source.open(self.device),
        )

    def describe(self) -> str:
        return self._runner.describe()

    @property
    def parts(self) -> list[nn.Module]:
        """Modules that run one after the other; none where all is one run."""
        return self._runner.parts if isinstance(self._runner, PlainHiFT) else []

    def decode(self, state: VocoderState, mel: Tensor, *, is_last: bool) -> Tensor:
        """Samples [S] on the CPU that became certain with the frames `mel`; with `is_last` all that were missing.

        Raises GenerationError when the network gives no numbers.
        """
        (samples,) = self.decode_together([MelChunk(state, mel, is_last)])
        if isinstance(samples, GenerationError):
            raise samples
        return samples

    @torch.inference_mode()
    def decode_together(self, chunks: Sequence[MelChunk]) -> list[Tensor | GenerationError]:
        """Chunks of different streams: samples of each, or the error that ends its stream. One wait for the device."""
        sounding: list[tuple[VocoderState, int]] = []  # and the frame up to which it sounds
        for chunk in chunks:
            state = chunk.state
            assert not state.is_finished, "this stream has had its last chunk"
            state.mel = torch.cat([state.mel, chunk.mel.to(self.device, torch.float32)], dim=-1)
            state.frames += chunk.mel.shape[-1]
            state.is_finished = chunk.is_last
            end = state.frames if chunk.is_last else max(0, state.frames - self.delay_frames)
            if end > state.emitted:
                sounding.append((state, end))
        made = self._sound(sounding) if sounding else {}
        return [made.get(id(chunk.state), torch.empty(0)) for chunk in chunks]

    def _sound(self, sounding: Sequence[tuple[VocoderState, int]]) -> dict[int, Tensor | GenerationError]:
        self._extend_sources([state for state, _ in sounding])
        windows = [
            Window(state.mel[:, : len(state.source) // self.samples_per_frame], state.source, state.is_finished)
            for state, _ in sounding
        ]
        rows = [
            samples.view(-1, self.samples_per_frame)[state.emitted - state.start : end - state.start]
            for samples, (state, end) in zip(self._runner.samples(windows), sounding, strict=True)
        ]
        made: dict[int, Tensor | GenerationError] = {}
        for (state, end), checked in zip(sounding, self._checked(rows), strict=True):
            samples, clipped, broken = checked
            state.clipped += clipped
            state.emitted = end
            stale = max(0, end - self.context_frames - state.start)
            state.mel = state.mel[:, stale:]
            state.source = state.source[stale * self.samples_per_frame :]
            made[id(state)] = (
                samples
                if not broken
                else GenerationError(
                    f"the vocoder gave {broken} samples that are not numbers, so the mel it was given is broken; "
                    "try another seed or another reference"
                )
            )
        return made

    def _extend_sources(self, states: Sequence[VocoderState]) -> None:
        """Appends the source of those frames whose f0 became known."""
        hop = self.samples_per_frame
        firsts = [state.start + len(state.source) // hop for state in states]
        begins = [
            max(state.start, first - F0Predictor.context_frames) for state, first in zip(states, firsts, strict=True)
        ]
        mels = [state.mel[:, begin - state.start :] for state, begin in zip(states, begins, strict=True)]
        pitches = [
            pitch[first - begin :]
            for pitch, first, begin in zip(
                self._runner.pitch(mels, [state.is_finished for state in states]), firsts, begins, strict=True
            )
        ]
        breaths = [
            self._source.breath(self._noise.source_noise(first * hop, len(pitch) * hop).to(self.device, torch.float32))
            for first, pitch in zip(firsts, pitches, strict=True)
        ]
        # A silent frame behind the end of a row adds nothing to its sums.
        f0, breath = (pad_sequence(parts, batch_first=True) for parts in (pitches, breaths))
        sources, sums = self._source.mix(f0, breath, torch.stack([state.phase_sums for state in states]))
        for state, pitch, source, row_sums in zip(states, pitches, sources, sums, strict=True):
            state.source = torch.cat([state.source, source[: len(pitch) * hop]])
            state.phase_sums = row_sums

    def _checked(self, rows: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
        """Clamped samples on the CPU of [frames, 480] each, how many were clamped, and how many are no numbers."""
        samples = torch.cat(list(rows))
        counts = torch.stack([(samples.abs() > self.audio_limit).sum(1), samples.isnan().sum(1)], 1)
        limited = samples.clamp(-self.audio_limit, self.audio_limit)
        # The one copy, and with it the one wait. Then numpy: torch would start threads for so much memory.
        host = on_host(torch.cat([limited.flatten(), counts.flatten().to(samples)]))
        waves = host[: samples.numel()].reshape(samples.shape)
        frame_counts = host[samples.numel() :].reshape(-1, 2)
        ends = np.cumsum([len(row) for row in rows])[:-1]
        return [
            (torch.from_numpy(wave.reshape(-1)), int(count[:, 0].sum()), int(count[:, 1].sum()))
            for wave, count in zip(np.split(waves, ends), np.split(frame_counts, ends), strict=True)
        ]


class PlainHiFT:
    """The modules as they are loaded, a window at a time, f0 in float64 (spec 5.1): the truth, and the way of a CPU."""

    def __init__(self, hift: HiFT) -> None:
        device = hift.conv_pre.weight.device
        self._f0_net = _folded_copy(F0Predictor(hift.config.f0), hift.f0_predictor, device, torch.float64)
        self._hift = _folded_copy(HiFT(hift.config), hift, device, torch.float32)

    @property
    def parts(self) -> list[nn.Module]:
        return [*self._hift.source_resblocks, *self._hift.resblocks]

    def pitch(self, mels: Sequence[Tensor], ends: Sequence[bool]) -> list[Tensor]:
        return [self._f0_net(mel[None], is_last=is_last)[0] for mel, is_last in zip(mels, ends, strict=True)]

    def samples(self, windows: Sequence[Window]) -> list[Tensor]:
        return [
            self._hift.decode(window.mel[None], window.source[None], is_last=window.is_last)[0] for window in windows
        ]

    def describe(self) -> str:
        return "torch"


def build_vocoder(hift: HiFT, noise: SourceNoise, graph_bytes: int) -> Vocoder:
    """The packed form on a GPU that Triton knows, its graphs within so many bytes; elsewhere the plain modules."""
    device = hift.conv_pre.weight.device
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return Vocoder(hift, noise)
    noise.source_noise(0, READY_SECONDS * hift.config.sample_rate)
    return Vocoder(hift, noise, packed_runner(hift, device, graph_bytes))


def packed_runner(hift: HiFT, device: torch.device, graph_bytes: int = 0) -> PackedHiFT:
    """Weight norm is folded in float64 on the CPU, so that each device gets the same weights."""
    folded = _folded_copy(HiFT(hift.config), hift, torch.device("cpu"), torch.float64)
    return PackedHiFT(folded, device, graph_bytes=graph_bytes)


def _folded_copy(empty: ModuleT, loaded: nn.Module, device: torch.device, dtype: torch.dtype) -> ModuleT:
    """Fills `empty` with the weights of `loaded` and folds them in the given precision."""
    empty.load_state_dict(loaded.state_dict())
    return fold_weight_norm(empty.to(device, dtype)).requires_grad_(False)
