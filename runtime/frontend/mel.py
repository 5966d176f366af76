"""Samples -> log-mel, in each flavour the model needs.

Shapes: samples [n] or [B, n]; every result keeps the leading dimension it was given. T whisper frames (100 Hz),
K Kaldi frames (100 Hz, without edge padding), F prompt frames (50 Hz). Windows and filter banks are computed here and
live as buffers, so that they follow their module to its device; none is part of a checkpoint.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.config import MelConfig


class WhisperLogMel(nn.Module):
    """Input of the speech tokenizer: 16 kHz samples -> [.., bins, n // 160] (spec 2.2).

    The floor hangs on the loudest frame of the clip, so features of a part are not a part of the features.
    """

    window: Tensor
    filters: Tensor

    def __init__(self, bins: int = 128) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(400), persistent=False)
        self.register_buffer("filters", slaney_filters(16_000, 400, bins, 0.0, 8_000.0), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        spectrum = torch.stft(samples, 400, 160, window=self.window, pad_mode="reflect", return_complex=True)
        power = spectrum[..., :-1].abs().square()
        log_mel = (self.filters @ power).clamp(min=1e-10).log10()
        floor = log_mel.amax((-2, -1), keepdim=True) - 8.0
        return (torch.maximum(log_mel, floor) + 4.0) / 4.0


class KaldiFbank(nn.Module):
    """Input of the speaker encoder: 16 kHz samples -> [.., K, bins], K = 1 + (n - 400) // 160 (spec 2.4).

    Samples stay in [-1, 1]; `remove_mean` takes the mean over time out of each bin.
    """

    window: Tensor
    filters: Tensor

    def __init__(self, bins: int = 80, remove_mean: bool = True) -> None:
        super().__init__()
        self.remove_mean = remove_mean
        povey = torch.hann_window(400, periodic=False, dtype=torch.float64).pow(0.85).float()
        self.register_buffer("window", povey, persistent=False)
        self.register_buffer("filters", kaldi_filters(16_000, 512, bins, 20.0, 8_000.0), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        frames = samples.unfold(-1, 400, 160)
        frames = frames - frames.mean(-1, keepdim=True)
        previous = torch.cat([frames[..., :1], frames[..., :-1]], -1)
        windowed = (frames - 0.97 * previous) * self.window
        power = torch.fft.rfft(windowed, 512).abs().square()
        fbank = (power[..., :-1] @ self.filters.T).clamp(min=torch.finfo(torch.float32).eps).log()
        return fbank - fbank.mean(-2, keepdim=True) if self.remove_mean else fbank


class PromptMel(nn.Module):
    """What stage 1 continues: 24 kHz samples -> [.., F, M], F = n // hop (spec 2.5)."""

    window: Tensor
    filters: Tensor

    def __init__(self, config: MelConfig) -> None:
        super().__init__()
        self.config = config
        f_max = config.sample_rate / 2 if config.f_max is None else config.f_max
        filters = slaney_filters(config.sample_rate, config.n_fft, config.bins, config.f_min, f_max)
        self.register_buffer("window", torch.hann_window(config.window), persistent=False)
        self.register_buffer("filters", filters, persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        config = self.config
        edge = (config.n_fft - config.hop) // 2
        padded = F.pad(samples.reshape(-1, 1, samples.shape[-1]), (edge, edge), mode="reflect")
        spectrum = torch.stft(
            padded.reshape(*samples.shape[:-1], -1),
            config.n_fft,
            config.hop,
            config.window,
            window=self.window,
            center=False,
            return_complex=True,
        )
        magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
        return (self.filters @ magnitude).clamp(min=1e-5).log().transpose(-1, -2)


def slaney_filters(sample_rate: int, n_fft: int, bins: int, f_min: float, f_max: float) -> Tensor:
    """Triangles of equal area on Slaney's mel scale: [bins, n_fft // 2 + 1]."""
    edges_mel = torch.linspace(_slaney_mel(f_min), _slaney_mel(f_max), bins + 2, dtype=torch.float64)
    linear = edges_mel * (200.0 / 3.0)
    logarithmic = 1000.0 * torch.exp((edges_mel - 15.0) * (math.log(6.4) / 27.0))
    edges = torch.where(edges_mel < 15.0, linear, logarithmic)  # Hz
    frequencies = torch.linspace(0.0, sample_rate / 2, n_fft // 2 + 1, dtype=torch.float64)
    area = 2.0 / (edges[2:] - edges[:-2])
    return (area[:, None] * _triangles(edges, frequencies)).float()


def _slaney_mel(hz: float) -> float:
    """Linear below 1 kHz (15 mel), logarithmic above."""
    return hz * 3.0 / 200.0 if hz < 1000.0 else 15.0 + math.log(hz / 1000.0) * 27.0 / math.log(6.4)


def kaldi_filters(sample_rate: int, n_fft: int, bins: int, f_min: float, f_max: float) -> Tensor:
    """Triangles of equal height, straight on the mel axis: [bins, n_fft // 2]; Kaldi leaves the Nyquist bin out."""
    frequencies = torch.arange(n_fft // 2, dtype=torch.float64) * (sample_rate / n_fft)
    low, high = (1127.0 * math.log1p(hz / 700.0) for hz in (f_min, f_max))
    edges = torch.linspace(low, high, bins + 2, dtype=torch.float64)
    return _triangles(edges, 1127.0 * torch.log1p(frequencies / 700.0)).float()


def _triangles(edges: Tensor, at: Tensor) -> Tensor:
    """Height at the points `at` of triangles over [edge i, edge i + 2], with their tip on edge i + 1."""
    width = edges.diff()[:, None]
    rising = (at - edges[:-2, None]) / width[:-1]
    falling = (edges[2:, None] - at) / width[1:]
    return torch.minimum(rising, falling).clamp(min=0.0)
