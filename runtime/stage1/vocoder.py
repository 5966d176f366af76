"""Mel to sound, chunk by chunk, as one stream (spec 5.4, 5.5).

Shapes: mel [80, n] of new frames (50 Hz) -> samples [S] float32 (24 kHz). The network is run over a window: the new
frames and as many old ones as they depend on. What a stream carries besides are the phase sums of its source and a
count of frames, which is also the place in the noise. All in float32, but for f0 and the phase sums (float64).
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from runtime.errors import GenerationError
from runtime.stage1.causal import fold_weight_norm
from runtime.stage1.f0 import F0Predictor
from runtime.stage1.hift import HiFT, left_context_frames

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class SourceNoise(Protocol):
    """Uniform noise in [0, 1), the same for every stream, with a value for each sample index."""

    def source_noise(self, start_sample: int, samples: int) -> Tensor:
        """[samples, harmonics + 1] from `start_sample` on."""
        ...


@dataclass(slots=True, eq=False)
class VocoderState:
    """What one stream carries between chunks. `mel` and `source` begin at the same frame."""

    mel: Tensor  # [80, n]: frames that samples to come depend on
    source: Tensor  # [480 m], m <= n: the source as far as f0 is known
    phase_sums: Tensor  # [harmonics + 1] float64, after the last frame of `source`
    frames: int = 0  # seen so far
    emitted: int = 0  # samples
    clipped: int = 0  # samples that were cut to the limit
    is_finished: bool = False


class Vocoder:
    """The network made ready for speaking, where the loaded module lies and without a change to it.

    Holds weights alone: any number of streams may take turns.
    """

    def __init__(self, hift: HiFT, noise: SourceNoise) -> None:
        config = hift.config
        self.device = hift.conv_pre.weight.device
        # MPS has no float64; f0 and phase are a few numbers per frame and come from the CPU there.
        self._f0_device = torch.device("cpu") if self.device.type == "mps" else self.device
        # Built anew, as a deep copy shares the classes that folding takes apart. f0 is folded in float64 (spec 5.1).
        self._f0_net = _folded_copy(F0Predictor(config.f0), hift.f0_predictor, self._f0_device, torch.float64)
        self._hift = _folded_copy(HiFT(config), hift, self.device, torch.float32)
        self._noise = noise
        self.samples_per_frame = config.samples_per_frame
        self.audio_limit = config.audio_limit
        # f0, conv_pre and the overlap-add each wait for the future (spec 9.34).
        self.delay_frames = F0Predictor.lookahead_frames + config.lookahead_frames + 1
        self.context_frames = left_context_frames(config)

    def open(self) -> VocoderState:
        return VocoderState(
            mel=torch.empty(self._hift.config.mel_bins, 0, device=self.device),
            source=torch.empty(0, device=self.device),
            phase_sums=self._hift.m_source.open(self._f0_device),
        )

    @torch.inference_mode()
    def decode(self, state: VocoderState, mel: Tensor, *, is_last: bool) -> Tensor:
        """Samples that became certain with the frames `mel` [80, n], n >= 0; with `is_last` all that were missing.

        Lies on the vocoder's device. Raises GenerationError when the network gives no numbers.
        """
        assert not state.is_finished, "this stream has had its last chunk"
        state.mel = torch.cat([state.mel, mel.to(self.device, torch.float32)], dim=-1)
        state.frames += mel.shape[-1]
        state.is_finished = is_last
        end = state.frames if is_last else max(0, state.frames - self.delay_frames)
        if end * self.samples_per_frame == state.emitted:
            return state.source.new_empty(0)
        self._extend_source(state, is_last)
        start = state.frames - state.mel.shape[-1]
        known = state.source.shape[0] // self.samples_per_frame
        samples = self._hift.decode(state.mel[None, :, :known], state.source[None], is_last=is_last)[0]
        samples = self._checked(state, samples[state.emitted - start * self.samples_per_frame :])
        state.emitted = end * self.samples_per_frame
        stale = max(0, end - self.context_frames - start)
        state.mel = state.mel[:, stale:]
        state.source = state.source[stale * self.samples_per_frame :]
        return samples

    def _extend_source(self, state: VocoderState, is_last: bool) -> None:
        """Appends the source of those frames whose f0 became known."""
        start = state.frames - state.mel.shape[-1]
        first = start + state.source.shape[0] // self.samples_per_frame
        known = state.frames if is_last else state.frames - F0Predictor.lookahead_frames
        window = max(start, first - F0Predictor.context_frames)
        mel = state.mel[None, :, window - start :].to(self._f0_device)
        pitch = self._f0_net(mel, is_last=is_last)[:, first - window :]
        noise = self._noise.source_noise(first * self.samples_per_frame, (known - first) * self.samples_per_frame)
        noise = noise.to(self.device, torch.float32)
        source, sums = self._hift.m_source(pitch, noise[None], state.phase_sums)
        state.source = torch.cat([state.source, source[0]])
        state.phase_sums = sums[0]

    def _checked(self, state: VocoderState, samples: Tensor) -> Tensor:
        """Clamps, counts what was clamped, and lets nothing pass that is not a number."""
        beyond = (samples.abs() > self.audio_limit).sum()
        clipped, broken = torch.stack([beyond, samples.isnan().sum()]).tolist()
        if broken:
            raise GenerationError(
                f"the vocoder gave {broken} samples that are not numbers, so the mel it was given is broken; "
                "try another seed or another reference"
            )
        state.clipped += clipped
        return samples.clamp(-self.audio_limit, self.audio_limit)


def _folded_copy(empty: ModuleT, loaded: nn.Module, device: torch.device, dtype: torch.dtype) -> ModuleT:
    """Fills `empty` with the weights of `loaded` and folds them in the given precision."""
    empty.load_state_dict(loaded.state_dict())
    return fold_weight_norm(empty.to(device, dtype)).requires_grad_(False)
