"""Weights of HiFT in another order, for windows laid end to end (hift_packed.py).

An up-sampling and the convolution behind it become one convolution whose output has a channel for each of the repeats.
The transforms, and what looks to the right or reads their columns, become products. All is computed in the precision of
the weights that come in, float64, and cast once.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from runtime.stage1.causal import CausalUpsample1d
from runtime.stage1.hift import POST_SLOPE, HiFT, ResBlock, columns_per_element, columns_per_frame
from runtime.stage1.row_convolution import Kernel, Precision, convolve, snake


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A ResBlock: Snake slopes and convolutions in the order of use."""

    alphas: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]

    def __call__(self, x: Tensor, begin: Tensor, rate: int) -> Tensor:
        activated = snake(x, self.alphas[0])
        for index in range(0, len(self.kernels), 2):
            _, activated = convolve(
                activated, self.kernels[index], begin, rate, activation="snake", alpha=self.alphas[index + 1]
            )
            further = index + 2 < len(self.kernels)
            x, activated = convolve(
                activated,
                self.kernels[index + 1],
                begin,
                rate,
                residual=x,
                activation="snake" if further else "",
                alpha=self.alphas[index + 2] if further else None,
            )
        return x


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    up: Kernel
    rate: int  # positions per frame of its output
    from_source: Kernel
    source_block: Block
    blocks: tuple[Block, ...]
    slope: float  # of the LeakyReLU behind it


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All of the network, in the order of use."""

    pitch: tuple[Kernel, ...]
    pitch_head: Kernel
    transform: Kernel
    pre: Kernel
    stages: tuple[Stage, ...]
    post: Kernel
    inverse: Kernel
    envelope: Tensor  # [n_fft / hop, hop]: the squared window


def lay_out(hift: HiFT, device: torch.device, precision: Precision) -> Weights:
    """`precision` is that of the ResBlocks, nine tenths of the arithmetic.

    What lies between them is a narrower place for errors, so that tf32 is made finer there; pitch and transforms are
    float32 for real.
    """
    make = _Maker(device, precision)
    condnet = [layer for layer in hift.f0_predictor.condnet if isinstance(layer, nn.Conv1d)]
    classifier, window = hift.f0_predictor.classifier, hift.stft.window.double().cpu()
    return Weights(
        pitch=(
            make.product(condnet[0].weight.flatten(1), condnet[0].bias),
            *(make.convolution(layer, "ieee") for layer in condnet[1:]),
        ),
        pitch_head=make.product(classifier.weight, classifier.bias),
        transform=make.product(_transform(window)),
        pre=make.product(hift.conv_pre.weight.flatten(1), hift.conv_pre.bias),
        stages=tuple(_stage(hift, index, make) for index in range(len(hift.config.upsample_rates))),
        post=make.convolution(hift.conv_post, make.finer),
        inverse=make.product(_inverse(window)),
        envelope=make.tensor((window**2).view(-1, hift.config.istft_hop)),
    )


class _Maker:
    """Brings weights into the layout of the kernels."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self._device = device
        self._precision = precision
        self.finer: Precision = "tf32x3" if precision == "tf32" else precision

    def kernel(self, weight: Tensor, bias: Tensor | None, dilation: int, precision: Precision) -> Kernel:
        bias = weight.new_zeros(weight.shape[1]) if bias is None else bias
        weight, bias = (part.to(self._device, torch.float32).contiguous() for part in (weight, bias))
        return Kernel(weight, bias, dilation, precision)

    def tensor(self, value: Tensor) -> Tensor:
        return value.to(self._device, torch.float32).contiguous()

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Kernel:
        """[C_out, C_in], without a look to the left."""
        return self.kernel(weight[None], bias, 1, "ieee")

    def convolution(self, conv: nn.Conv1d, precision: Precision | None = None) -> Kernel:
        return self.kernel(conv.weight.permute(2, 0, 1), conv.bias, conv.dilation[0], precision or self._precision)

    def upsampling(self, conv: CausalUpsample1d) -> Kernel:
        """Output phase f of an input sees the input that lies ceil((back - f) / rate) before it through tap `back`."""
        out_channels, in_channels, taps = conv.weight.shape
        reach = -(-(taps - 1) // conv.rate)
        weight = conv.weight.new_zeros(reach + 1, conv.rate, out_channels, in_channels)
        for phase in range(conv.rate):
            for back in range(taps):
                weight[reach + (phase - back) // conv.rate, phase] += conv.weight[..., taps - 1 - back]
        assert conv.bias is not None
        return self.kernel(weight.flatten(1, 2), conv.bias.repeat(conv.rate), 1, self.finer)

    def block(self, block: ResBlock) -> Block:
        pairs = zip(block.activations1, block.convs1, block.activations2, block.convs2, strict=True)
        layers: list[tuple[Any, Any]] = []
        for snake1, conv1, snake2, conv2 in pairs:
            layers += [(snake1, conv1), (snake2, conv2)]
        return Block(
            tuple(self.tensor(activation.alpha) for activation, _ in layers),
            tuple(self.convolution(conv) for _, conv in layers),
        )


def _stage(hift: HiFT, index: int, make: _Maker) -> Stage:
    config, blocks = hift.config, len(hift.config.resblock_kernels)
    up, down, source_block = (cast(Any, part[index]) for part in (hift.ups, hift.source_downs, hift.source_resblocks))
    return Stage(
        make.upsampling(up),
        columns_per_frame(config) // columns_per_element(config, index),
        make.product(down.weight.transpose(1, 2).flatten(1), down.bias),
        make.block(source_block),
        tuple(make.block(cast(ResBlock, block)) for block in hift.resblocks[index * blocks : (index + 1) * blocks]),
        POST_SLOPE if index == len(config.upsample_rates) - 1 else config.leaky_slope,
    )


def _angles(window: Tensor) -> Tensor:
    n_fft = len(window)
    return torch.outer(torch.arange(n_fft // 2 + 1), torch.arange(n_fft)).double() * (2 * math.pi / n_fft)


def _transform(window: Tensor) -> Tensor:
    """[2 K, n_fft]: real parts over imaginary parts of a windowed frame."""
    angles = _angles(window)
    return torch.cat([angles.cos(), -angles.sin()]) * window


def _inverse(window: Tensor) -> Tensor:
    """[n_fft, 2 K]: a windowed frame out of real and imaginary parts; the outer bins count once."""
    angles = _angles(window)
    weight = torch.full((len(angles), 1), 2.0, dtype=torch.float64)
    weight[0] = weight[-1] = 1.0
    return (torch.cat([angles.cos() * weight, -angles.sin() * weight]) * window / len(window)).T
