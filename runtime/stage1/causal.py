"""Convolutions that see only the past, as the vocoder stacks them.

Shapes: [B, C, N] for N elements at any rate. Zeros stand for what lies before the first element. Weight norm is kept
as a parametrisation for training and folded into plain weights for inference.
"""

from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class CausalConv1d(nn.Conv1d):
    """Convolution padded on the left so that element n of the output has seen elements 0..n of the input."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, dilation=dilation)
        self.left = (kernel - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.left, 0)))


class CausalUpsample1d(CausalConv1d):
    """Repeats each element `rate` times, then convolves causally: [B, C, N] -> [B, D, rate * N]."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, rate: int) -> None:
        super().__init__(in_channels, out_channels, kernel)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.repeat_interleave(self.rate, dim=-1))


def normed(conv: ModuleT) -> ModuleT:
    """The same convolution under weight norm; names become `parametrizations.weight.original0` and `original1`."""
    weight_norm(conv)
    return conv


def fold_weight_norm(module: ModuleT) -> ModuleT:
    """Replaces weight norm by the weights it gives, once and for good.

    Call it where the module will run: the norm rounds differently on another device or in another precision.
    """
    for layer in module.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return module
