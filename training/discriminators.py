"""Losses of the vocoder: mel distance at many resolutions, and discriminators over periods and spectra.

Shapes: B crops, N samples at 24 kHz. Used only in training.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from runtime.frontend.mel import slaney_filters

SAMPLE_RATE = 24_000
RESOLUTIONS = (
    (32, 8, 5), (64, 16, 10), (128, 32, 20), (256, 64, 40),
    (512, 128, 80), (1024, 256, 160), (2048, 512, 320), (1920, 480, 80),
)  # fmt: skip


class Magnitude(nn.Module):
    """[B, N] -> spectrum magnitudes and their mel, framed like the prompt mel at any resolution."""

    window: Tensor
    filters: Tensor

    def __init__(self, n_fft: int, hop: int, bins: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        filters = slaney_filters(SAMPLE_RATE, n_fft, bins, 0.0, SAMPLE_RATE / 2)
        self.register_buffer("filters", filters, persistent=False)
        # white noise of -80 dBFS as the bank sees it: pauses are nearly digital silence and would rule a plain log
        self.floor = 1e-4 * 0.886 * math.sqrt(0.375 * n_fft) * n_fft / SAMPLE_RATE

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        edge = (self.n_fft - self.hop) // 2
        x = F.pad(x[:, None], (edge, edge), mode="reflect")[:, 0]
        spectrum = torch.stft(x, self.n_fft, self.hop, window=self.window, center=False, return_complex=True)
        magnitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + 1e-9)
        return magnitude, torch.log10(self.filters @ magnitude + self.floor)


class MelDistance(nn.Module):
    """Mean difference of log10 mels, summed over resolutions.

    `linear` adds that share of the relative error of plain magnitudes, the only part that sees bin 0: without it the
    output drifts to a constant far beyond full scale within fifty steps from scratch.
    """

    def __init__(self, linear: float = 0.25) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Magnitude(*scale) for scale in RESOLUTIONS)
        self.linear = linear

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        total = made.new_zeros(())
        for scale in self.scales:
            (a, log_a), (b, log_b) = scale(made), scale(real)
            total = total + (log_a - log_b).abs().mean() + self.linear * (a - b).abs().mean() / b.mean()
        return total


class PeriodDiscriminator(nn.Module):
    """Sees the samples as rows of one period. https://arxiv.org/abs/2010.05646"""

    def __init__(self, period: int, width: int) -> None:
        super().__init__()
        self.p = period
        widths = [1, width, width * 4, width * 16, width * 32, width * 32]
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(widths[i], widths[i + 1], (5, 1), (3 if i < 4 else 1, 1), (2, 0))) for i in range(5)
        )
        self.post = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), 1, (1, 0)))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = F.pad(x[:, None], (0, -x.shape[1] % self.p), mode="reflect").unflatten(-1, (-1, self.p))
        return _convolve(x, self.convs, self.post)


class SpectrumDiscriminator(nn.Module):
    """Sees the complex spectrum with its magnitudes compressed."""

    win: Tensor

    def __init__(self, n_fft: int, hop: int, width: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("win", torch.hann_window(n_fft), persistent=False)
        plan = [((3, 9), 2, 1), ((3, 9), 2, 1), ((3, 9), 2, 2), ((3, 5), 2, 4), ((3, 3), 1, 1)]  # time x frequency
        self.convs = nn.ModuleList(
            weight_norm(
                nn.Conv2d(
                    width if i else 2,
                    width,
                    kernel,
                    (1, stride),
                    (spread * (kernel[0] - 1) // 2, kernel[1] // 2),
                    (spread, 1),
                )
            )
            for i, (kernel, stride, spread) in enumerate(plan)
        )
        self.post = weight_norm(nn.Conv2d(width, 1, 3, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast(x.device.type, enabled=False):
            spectrum = torch.stft(
                x.float(), self.n_fft, self.hop, window=self.win, normalized=True, return_complex=True
            )
            z = torch.view_as_real(spectrum)
            z = z * (z.square().sum(-1, keepdim=True) + 1e-7).pow(-0.35)  # |X| to the power of .3
        return _convolve(z.permute(0, 3, 2, 1), self.convs, self.post)


def _convolve(x: Tensor, convs: nn.ModuleList, post: nn.Module) -> tuple[Tensor, list[Tensor]]:
    features = []
    x = x.contiguous(memory_format=torch.channels_last)
    for conv in convs:
        x = F.leaky_relu(conv(x), 0.1)
        features.append(x)
    return post(x), features


class Discriminators(nn.Module):
    def __init__(self, period_width: int = 8, spectrum_width: int = 16) -> None:
        super().__init__()
        parts: list[nn.Module] = [PeriodDiscriminator(period, period_width) for period in (2, 3, 5, 7, 11)]
        parts += [SpectrumDiscriminator(*scale, spectrum_width) for scale in ((2048, 512), (1024, 256), (512, 128))]
        self.ds = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """[B, N] -> a verdict map per discriminator, and all features inside."""
        verdicts, features = zip(*(part(x) for part in self.ds), strict=True)
        return list(verdicts), [feature for group in features for feature in group]


def discriminator_loss(real: Sequence[Tensor], made: Sequence[Tensor]) -> Tensor:
    """Least squares: real is one, made is zero."""
    losses = [(1 - r.float()).square().mean() + m.float().square().mean() for r, m in zip(real, made, strict=True)]
    return torch.stack(losses).sum()


def adversarial_loss(made: Sequence[Tensor]) -> Tensor:
    return torch.stack([(1 - m.float()).square().mean() for m in made]).sum()


def feature_loss(real: Sequence[Tensor], made: Sequence[Tensor]) -> Tensor:
    losses = [(r.detach() - m).abs().mean(dtype=torch.float32) for r, m in zip(real, made, strict=True)]
    return torch.stack(losses).sum()
