"""HiFT, the vocoder's network: mel and harmonic source in, samples out (spec 5.3).

Shapes: mel [B, 80, F] at 50 Hz, source and samples [B, S] with S = 480 F at 24 kHz, spectrum columns at 120 per frame.
Attributes carry the names of the released weights. Everything can be differentiated; streaming lives in vocoder.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.config import HiFTConfig
from runtime.stage1.causal import CausalConv1d, CausalUpsample1d, normed
from runtime.stage1.f0 import F0Predictor
from runtime.stage1.istft import STFT
from runtime.stage1.source import HarmonicSource

_POST_KERNEL = 7
POST_SLOPE = 0.01  # of the head's LeakyReLU, which lets less through than the stages' (spec 9.5)
MAGNITUDE_LIMIT = 100.0


class Snake(nn.Module):
    """x + sin^2(alpha x) / alpha per channel, alpha not exponentiated. https://arxiv.org/abs/2006.08195"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.alpha[:, None]
        wave = torch.sin(alpha * x)
        return torch.addcmul(x, wave / (alpha + 1e-9), wave)


class ResBlock(nn.Module):
    """Per dilation: snake, dilated convolution, snake, plain convolution, added to the input."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(normed(CausalConv1d(channels, channels, kernel, d)) for d in dilations)
        self.convs2 = nn.ModuleList(normed(CausalConv1d(channels, channels, kernel)) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            x = x + conv2(snake2(conv1(snake1(x))))
        return x


class SourceDown(nn.Conv1d):
    """Spectrum columns -> elements of a stage. Element n sees columns up to n * stride + stride, so a little ahead."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(in_channels, out_channels, 2 * stride if stride > 1 else 1, stride=stride)
        self.left = stride - 1

    def forward(self, spectrum: Tensor) -> Tensor:
        return super().forward(F.pad(spectrum, (self.left, 0)))


class HiFT(nn.Module):
    """f0 predictor, harmonic source and generator: three steps that training calls one by one."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.f0_predictor = F0Predictor(config.f0)
        self.m_source = HarmonicSource(config)
        self.stft = STFT(config.istft_n_fft, config.istft_hop)
        widths = [config.base_channels >> stage for stage in range(len(config.upsample_rates) + 1)]
        spectrum = config.istft_n_fft + 2  # real and imaginary parts
        self.conv_pre = normed(nn.Conv1d(config.mel_bins, widths[0], config.lookahead_frames + 1))
        self.ups = nn.ModuleList()
        self.source_downs = nn.ModuleList()
        self.source_resblocks = nn.ModuleList()
        self.resblocks = nn.ModuleList()  # one per stage and kernel, stage by stage
        for stage, rate in enumerate(config.upsample_rates):
            width = widths[stage + 1]
            self.ups.append(normed(CausalUpsample1d(widths[stage], width, config.upsample_kernels[stage], rate)))
            self.source_downs.append(SourceDown(spectrum, width, columns_per_element(config, stage)))
            self.source_resblocks.append(
                ResBlock(width, config.source_resblock_kernels[stage], config.source_resblock_dilations[stage])
            )
            for kernel, dilations in zip(config.resblock_kernels, config.resblock_dilations, strict=True):
                self.resblocks.append(ResBlock(width, kernel, dilations))
        self.conv_post = normed(CausalConv1d(widths[-1], spectrum, _POST_KERNEL))

    def forward(self, mel: Tensor, noise: Tensor) -> Tensor:
        """A whole utterance [B, S], clamped, f0 in the precision of the weights."""
        samples = self.decode(mel, self.source(self.f0_predictor(mel), noise))
        return samples.clamp(-self.config.audio_limit, self.config.audio_limit)

    def source(self, f0: Tensor, noise: Tensor) -> Tensor:
        """Source [B, S] of a whole utterance: f0 [B, F] in Hz, noise [B, S, harmonics + 1] uniform in [0, 1)."""
        source, _ = self.m_source(f0, noise, self.m_source.open(f0.device))
        return source

    def decode(self, mel: Tensor, source: Tensor, *, is_last: bool = True) -> Tensor:
        """Samples before the clamp: [B, 480 F], or [B, 480 (F - 5)] when more mel follows (spec 5.4).

        Then the last 4 frames serve as look-ahead of conv_pre, and one more frame's overlap-add is incomplete.
        """
        lookahead = self.config.lookahead_frames
        x = self.conv_pre(F.pad(mel, (0, lookahead)) if is_last else mel)
        spectrum = self.stft(source)  # [B, 18, 120 F + 1]
        if not is_last:
            spectrum = spectrum[..., : spectrum.shape[-1] - lookahead * columns_per_frame(self.config)]
        samples = self.stft.inverse(*self._head(self._upsample(x, spectrum)))
        return samples if is_last else samples[..., : samples.shape[-1] - self.config.samples_per_frame]

    def _upsample(self, x: Tensor, spectrum: Tensor) -> Tensor:
        blocks = len(self.config.resblock_kernels)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, self.config.leaky_slope))
            if stage == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")  # as many elements as spectrum columns; not zero (spec 9.27)
            x = x + self.source_resblocks[stage](self.source_downs[stage](spectrum))
            x = sum(block(x) for block in self.resblocks[stage * blocks : (stage + 1) * blocks]) / blocks
        return x

    def _head(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitude and phase [B, 9, columns]."""
        magnitude, phase = self.conv_post(F.leaky_relu(x, POST_SLOPE)).chunk(2, dim=1)
        # Limited before the exponential: the same values, and a gradient that stays finite.
        return magnitude.clamp(max=math.log(MAGNITUDE_LIMIT)).exp(), torch.sin(phase)


def columns_per_frame(config: HiFTConfig) -> int:
    return config.samples_per_frame // config.istft_hop


def columns_per_element(config: HiFTConfig, stage: int) -> int:
    """Spectrum columns to one element of a stage's output."""
    return math.prod(config.upsample_rates[stage + 1 :])


def left_context_frames(config: HiFTConfig) -> int:
    """Frames after the start of a window from which on the samples are those of the whole utterance.

    A window that starts inside an utterance is stale at its head, where layers meet padding instead of the past. This
    follows the number of stale elements through the layers: a convolution adds its reach to the left, an up-sampling
    multiplies, and where two branches meet the larger number counts.
    """
    edge = -(-(config.istft_n_fft // 2) // config.istft_hop)  # columns that the STFT reflects into
    blocks = list(zip(config.resblock_kernels, config.resblock_dilations, strict=True))
    source_blocks = zip(config.source_resblock_kernels, config.source_resblock_dilations, strict=True)
    stale = 0  # conv_pre looks only to the right
    last = len(config.upsample_rates) - 1
    for stage, source_block in enumerate(source_blocks):
        stride = columns_per_element(config, stage)
        from_source = -(-(edge + stride - 1) // stride) + _reach(*source_block)
        stale = stale * config.upsample_rates[stage] + config.upsample_kernels[stage] - 1
        stale += stage == last  # the reflected element shifts the rest
        stale = max(stale, from_source) + max(_reach(*block) for block in blocks)
    stale += _POST_KERNEL - 1
    samples = stale * config.istft_hop + config.istft_n_fft // 2 - config.istft_hop
    return -(-samples // config.samples_per_frame)


def _reach(kernel: int, dilations: tuple[int, ...]) -> int:
    """Elements to the left that a ResBlock sees: per dilation a dilated and a plain convolution."""
    return sum((kernel - 1) * (dilation + 1) for dilation in dilations)
