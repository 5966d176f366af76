"""Convolutions that see only the past, as the vocoder stacks them.

Shapes: [B, C, N] for N elements at any rate. Zeros stand for what lies before the first element. Weight norm is kept
as a parametrisation for training and folded into plain weights for inference.
"""

from typing import TypeVar

import torch
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


class CausalUpsample1d(nn.Conv1d):
    """Repeats each element `rate` times, then convolves causally: [B, C, N] -> [B, D, rate * N].

    The repeated signal is never built: taps that meet the same input element are summed first, so each of the `rate`
    output phases is a short convolution at the low rate. Same numbers, 2 to 5 times less work.
    """

    taps: Tensor

    def __init__(self, in_channels: int, out_channels: int, kernel: int, rate: int) -> None:
        super().__init__(in_channels, out_channels, kernel)
        self.rate = rate
        self.left = -(-(kernel - 1) // rate)  # input elements before the current one
        # Phase p and tap k meet the repeated element p - (kernel - 1) + k, a copy of input element floor(that / rate).
        phase, tap = torch.arange(rate)[:, None], torch.arange(kernel)[None]
        element = torch.div(phase + tap - (kernel - 1), rate, rounding_mode="floor") + self.left
        taps = F.one_hot(element, self.left + 1).transpose(0, 1).reshape(kernel, -1).float()
        self.register_buffer("taps", taps, persistent=False)  # [kernel, rate * (left + 1)], zeros and ones

    def forward(self, x: Tensor) -> Tensor:
        out_channels, in_channels, _ = self.weight.shape
        weight = (self.weight @ self.taps).view(out_channels, in_channels, self.rate, self.left + 1)
        weight = weight.transpose(1, 2).reshape(out_channels * self.rate, in_channels, self.left + 1)
        y = F.conv1d(F.pad(x, (self.left, 0)), weight)
        y = y.view(x.shape[0], out_channels, self.rate, -1).transpose(2, 3).flatten(2)
        return y if self.bias is None else y + self.bias[:, None]


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
