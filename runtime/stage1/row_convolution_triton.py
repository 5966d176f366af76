"""row_convolution.py as Triton kernels.

The tile of a convolution hangs on its weights alone, never on how many positions there are, and so a row's numbers are
the same to the bit, alone or in company. Activations are stored beside the sum that they are taken of: Snake costs no
pass of its own but before the first convolution of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.stage1.row_convolution import Activation, Kernel


@triton.jit
def _snake(x, alpha):
    wave = tl.sin(alpha * x)
    return x + wave * wave / (alpha + 1e-9)


@triton.jit(do_not_specialize=["elements"])
def _snake_kernel(x, alpha, out, elements, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    value = tl.load(x + at, mask=inside)
    tl.store(out + at, _snake(value, tl.load(alpha + at % CHANNELS)), mask=inside)


# Lengths, taps and rates are ordinary numbers to the compiler, so that a request never waits for a new variant.
@triton.jit(do_not_specialize=["positions", "taps", "dilation", "rate"])
def _convolve_kernel(
    x,
    weight,
    bias,
    begin,
    residual,
    alpha,
    out,
    activated,
    positions,
    taps,
    dilation,
    rate,
    C_IN: tl.constexpr,
    C_OUT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
):
    channel_tiles: tl.constexpr = (C_OUT + BLOCK_OUT - 1) // BLOCK_OUT
    chunks: tl.constexpr = (C_IN + BLOCK_IN - 1) // BLOCK_IN
    tile = tl.program_id(0)  # channel tiles of the same positions are neighbours: they read the same x
    p = tile // channel_tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    co = tile % channel_tiles * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ci = tl.arange(0, BLOCK_IN)
    inside = p < positions
    start = tl.load(begin + p // rate, mask=inside, other=0) * rate
    total = tl.zeros((BLOCK_P, BLOCK_OUT), dtype=tl.float32)
    for step in range(0, taps * chunks):
        tap = step // chunks
        c = step % chunks * BLOCK_IN + ci
        seen = p - (taps - 1 - tap) * dilation
        x_mask = (inside & (seen >= start))[:, None] & (c < C_IN)[None, :]
        w_mask = (co < C_OUT)[None, :] & (c < C_IN)[:, None]
        part = tl.load(x + seen[:, None] * C_IN + c[None, :], mask=x_mask, other=0.0)
        taps_weight = tl.load(weight + (tap * C_OUT + co)[None, :] * C_IN + c[:, None], mask=w_mask, other=0.0)
        total = tl.dot(part, taps_weight, total, input_precision=PRECISION)
    total += tl.load(bias + co, mask=co < C_OUT, other=0.0)[None, :]
    at = p[:, None] * C_OUT + co[None, :]
    out_mask = inside[:, None] & (co < C_OUT)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=out_mask, other=0.0)
    tl.store(out + at, total, mask=out_mask)
    if ACTIVATION == "snake":
        slope = tl.load(alpha + co, mask=co < C_OUT, other=1.0)[None, :]
        tl.store(activated + at, _snake(total, slope), mask=out_mask)
    if ACTIVATION == "elu":
        tl.store(activated + at, tl.where(total > 0, total, tl.exp(tl.minimum(total, 0.0)) - 1), mask=out_mask)


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    out, block = torch.empty_like(x), 1024
    _snake_kernel[(triton.cdiv(x.numel(), block),)](x, alpha, out, x.numel(), x.shape[1], block)
    return out


def convolve(
    x: Tensor,
    kernel: Kernel,
    begin: Tensor,
    rate: int,
    residual: Tensor | None,
    activation: Activation,
    alpha: Tensor | None,
) -> tuple[Tensor, Tensor]:
    taps, channels_out, channels_in = kernel.weight.shape
    out = x.new_empty(len(x), channels_out)
    activated = torch.empty_like(out) if activation else out
    block_p, block_out, block_in, warps, stages = _tile(kernel)
    grid = (triton.cdiv(len(x), block_p) * triton.cdiv(channels_out, block_out),)
    _convolve_kernel[grid](
        x,
        kernel.weight,
        kernel.bias,
        begin,
        out if residual is None else residual,
        kernel.bias if alpha is None else alpha,
        out,
        activated,
        len(x),
        taps,
        kernel.dilation,
        rate,
        C_IN=channels_in,
        C_OUT=channels_out,
        BLOCK_P=block_p,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        PRECISION=kernel.precision,
        num_warps=warps,
        num_stages=stages,
    )
    return out, activated


def _tile(kernel: Kernel) -> tuple[int, int, int, int, int]:
    """Positions, output and input channels of a tile, warps, and loads in flight. Depends on the weights alone."""
    _, channels_out, channels_in = kernel.weight.shape
    block_in = 32 if channels_in > 16 else 16
    block_out = max(16, min(64, triton.next_power_of_2(channels_out)))
    if kernel.precision == "ieee":  # on the plain cores: small tiles fill the card with a short hop
        return 32, min(32, block_out), block_in, 4, 3
    return 64, block_out, block_in, 4, 4
