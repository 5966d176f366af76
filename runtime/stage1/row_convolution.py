"""The two operations that the packed vocoder is made of: a causal convolution over rows laid end to end, and Snake.

Shapes: x [P, C], channels last; P positions at `rate` to the mel frame; T frames in all, each of which names the frame
where its row begins. What lies before that counts as zero, so rows never meet. This is the definition, in plain torch,
and what runs on a CPU; tensors on a GPU go to the Triton kernels of row_convolution_triton.py.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Precision = Literal["ieee", "tf32x3", "tf32"]  # of products on a GPU: float32; nearly so, of three; 10 bits
Activation = Literal["", "snake", "elu"]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Weights of a convolution as the kernel reads them."""

    weight: Tensor  # [taps, C_out, C_in], the last tap sees the position itself
    bias: Tensor  # [C_out]
    dilation: int = 1
    precision: Precision = "ieee"


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin^2(alpha x) / alpha for [P, C] and alpha [C]."""
    if x.is_cuda:
        from runtime.stage1 import row_convolution_triton  # torch for CPUs comes without Triton

        return row_convolution_triton.snake(x, alpha)
    wave = torch.sin(alpha * x)
    return torch.addcmul(x, wave / (alpha + 1e-9), wave)


def convolve(
    x: Tensor,
    kernel: Kernel,
    begin: Tensor,
    rate: int,
    *,
    residual: Tensor | None = None,
    activation: Activation = "",
    alpha: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolution plus bias plus `residual`: the sum [P, C_out], and the sum activated (the same without one).

    `begin` is [T] int32, `x` [rate * T, C_in]; both contiguous.
    """
    if x.is_cuda:
        from runtime.stage1 import row_convolution_triton  # as above

        return row_convolution_triton.convolve(x, kernel, begin, rate, residual, activation, alpha)
    # In float64, so that a row's numbers do not hang on how a library splits its sums.
    weight, bias = kernel.weight.permute(1, 2, 0).double(), kernel.bias.double()
    left = (len(kernel.weight) - 1) * kernel.dilation
    sizes = torch.unique_consecutive(begin, return_counts=True)[1] * rate
    rows = [F.pad(row.T[None].double(), (left, 0)) for row in x.split(sizes.tolist())]
    out = torch.cat([F.conv1d(row, weight, bias, dilation=kernel.dilation)[0].T for row in rows]).to(x.dtype)
    if residual is not None:
        out = out + residual
    if activation == "snake":
        assert alpha is not None
        return out, snake(out, alpha)
    return out, F.elu(out) if activation == "elu" else out
