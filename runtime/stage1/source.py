"""Harmonic source of the vocoder: f0 in, an excitation signal with the right pitch out (spec 5.2).

Shapes: f0 [B, N] in Hz per frame -> source [B, S], S = samples_per_frame * N at 24 kHz; H harmonics, the fundamental
included. The phase of each harmonic is a running sum over frames that a stream hands on from chunk to chunk. Noise
comes in from outside, indexed by sample, so that no chunking changes it.
"""

import math

import torch
from torch import Tensor, nn

from runtime.config import HiFTConfig


class HarmonicSource(nn.Module):
    """Sines at multiples of f0, noise where there is no voice, mixed into one signal."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.harmonics = config.harmonics + 1
        self.sample_rate = config.sample_rate
        self.samples_per_frame = config.samples_per_frame
        self.sine_amplitude = config.sine_amplitude
        self.noise_amplitude = config.noise_amplitude
        self.voiced_threshold_hz = config.voiced_threshold_hz
        self.l_linear = nn.Linear(self.harmonics, 1)

    def open(self, device: torch.device) -> Tensor:
        """Phase sums [H] at the start of an utterance."""
        return torch.zeros(self.harmonics, dtype=torch.float64, device=device)

    def forward(self, f0: Tensor, noise: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """One piece of the source [B, S], and the phase sums [B, H] after it.

        `noise` is [B, S, H], uniform in [0, 1). `sums` is [H] or [B, H] float64.
        """
        return self.mix(f0, self.breath(noise), sums)

    def breath(self, noise: Tensor) -> Tensor:
        """What the mixing layer makes of the noise at full loudness: [.., S, H] -> [.., S]."""
        # Not as a product of matrices: a library may sum a row in another order when there are more rows.
        return (noise * self.l_linear.weight[0]).sum(-1)

    def mix(self, f0: Tensor, breath: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """As the call, with `breath` [B, S] in place of noise: a harmonic's wave and noise are mixed alike."""
        with torch.no_grad():  # a gradient through the phase, an ever growing sum, would say nothing about f0
            phase, sums = self._phase(f0, sums)
            voiced = (f0 > self.voiced_threshold_hz).to(f0.dtype)
            sines = self.sine_amplitude * torch.sin(phase) * voiced[..., None]
            loudness = voiced * self.noise_amplitude + (1 - voiced) * self.sine_amplitude / 3
        tone = (sines * self.l_linear.weight[0]).sum(-1) + self.l_linear.bias  # [B, N]
        return torch.tanh(self._hold(tone) + self._hold(loudness) * breath), sums

    def _phase(self, f0: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Phase [B, N, H] of each harmonic per frame, and the sums after the last frame.

        The order of operations and the one rounding per frame are the reference's: float32 sums that are accumulated
        in double. The phase grows to millions of radians, so that any other order gives another sound.
        """
        multiples = torch.arange(1, self.harmonics + 1, dtype=f0.dtype, device=f0.device)
        cycles = (f0[..., None] * multiples / self.sample_rate) % 1  # per sample
        running = sums.unsqueeze(-2) + cycles.double().cumsum(dim=1)
        phase = running.to(f0.dtype) * 2 * math.pi * self.samples_per_frame
        return phase, running[:, -1]

    def _hold(self, frames: Tensor) -> Tensor:
        """Keeps each frame's value for all its samples, as the reference does: no smooth sine (spec 9.29)."""
        return frames.repeat_interleave(self.samples_per_frame, dim=1)
