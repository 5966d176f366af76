"""What stands between the matrix products of the packed DiT, in few Triton kernels.

Shapes: T frames of all pieces, D width, H heads of K channels, W = H K, M mel bins, two twins. Arithmetic is float32
inside a kernel; what it stores has the precision of the weights. Frame tables [T] int64 (packing.py) tell where a piece
begins and where in memory its past lies, as a place: multiples of 16 bytes from an anchor, 0 for nothing. What is
remembered of finished frames has a leading dimension for each step (and layer or convolution), so that one place per
frame and one offset per launch find it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CONV_FRAMES = 64
_TURN_FRAMES = 8
_EULER_ELEMENTS = 1024


def conv_weight(weight: Tensor, groups: int) -> Tensor:
    """Of a grouped Conv1d: [D, C, taps] -> [groups, taps, C in, C out], C padded to what a tensor core takes."""
    channels = weight.shape[1]
    padded = max(16, triton.next_power_of_2(channels))
    out = weight.new_zeros(groups, weight.shape[2], padded, padded)
    out[:, :, :channels, :channels] = weight.unflatten(0, (groups, -1)).permute(0, 3, 2, 1)
    return out


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    begins: Tensor,
    tails: Tensor,
    keeps: Tensor,
    anchor: Tensor,
    offset: int,
) -> Tensor:
    """Grouped causal convolution and Mish of [2, T, D], and the residual added.

    begins: first frame of the piece. tails: place of the inputs before that frame, [.., 2, taps - 1, D] with the twins
    at element `offset`. keeps: place to which a frame's own input is written, at the same offset.
    """
    twins, frames, width = x.shape
    groups, taps, padded, _ = weight.shape
    out = torch.empty_like(x)
    unit = 16 // x.element_size()  # elements of 16 bytes: what a kernel multiplies by it, it knows to be aligned
    _causal_conv[(triton.cdiv(frames, _CONV_FRAMES), groups, twins)](
        x,
        weight,
        bias,
        x if residual is None else residual,
        out,
        begins,
        tails,
        keeps,
        anchor,
        frames,
        offset // unit,
        WIDTH=width,
        UNIT=unit,
        CHANNELS=width // groups,
        PADDED=padded,
        TAPS=taps,
        FRAMES=_CONV_FRAMES,
        RESIDUAL=residual is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
    )
    return out


def norm(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Layer norm of [2, T, D] with weight and bias [D] float32."""
    return _norm(h, None, None, scale, shift)


def add_and_norm(h: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Adds gate * y to h in place, then as `norm`."""
    return _norm(h, y, gate, scale, shift)


def _norm(h: Tensor, y: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor) -> Tensor:
    width = h.shape[-1]
    out = torch.empty_like(h) if y is None else torch.empty_like(y)
    _add_and_norm[(h.numel() // width,)](
        h,
        h if y is None else y,
        scale if gate is None else gate,
        scale,
        shift,
        out,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ADDS=y is not None,
        num_warps=4,
    )
    return out


def turn_and_keep(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keeps: Tensor,
    anchor: Tensor,
    offset: int,
    twin_stride: int,
) -> None:
    """Turns channel pairs of head 0 of queries and keys [2, T, 3 W] in place (spec 9.1), and copies what is kept.

    cos, sin [frames, K / 2] by absolute frame, which `positions` holds. keeps: place of a frame's keys and values
    [2 W], the first twin's at element `offset`, the other's `twin_stride` further.
    """
    twins, frames, width = qkv.shape
    unit = 16 // qkv.element_size()
    width //= 3
    columns = min(1024, triton.next_power_of_2(2 * width))
    parts = 1 + triton.cdiv(2 * width - 2 * cos.shape[-1], columns)
    _turn_and_keep[(triton.cdiv(frames, _TURN_FRAMES), twins, parts)](
        qkv,
        cos,
        sin,
        positions,
        keeps,
        anchor,
        frames,
        offset // unit,
        twin_stride,
        WIDTH=width,
        UNIT=unit,
        PAIRS=cos.shape[-1],
        FRAMES=_TURN_FRAMES,
        COLUMNS=columns,
        num_warps=4,
    )


def euler_step(x: Tensor, velocity: Tensor, told: Tensor, width: float, rate: float) -> None:
    """Moves the state [T, M] float32 by the guided velocity [2, T, M], and tells it both twins' inputs [2, T, ..]."""
    frames, bins = x.shape
    _euler_step[(triton.cdiv(frames * bins, _EULER_ELEMENTS),)](
        x,
        velocity,
        told,
        frames * bins,
        width,
        rate,
        BINS=bins,
        INPUTS=told.shape[-1],
        ELEMENTS=_EULER_ELEMENTS,
    )


@triton.jit(do_not_specialize=["frames", "offset"])
def _causal_conv(
    x,
    weight,
    bias,
    residual,
    out,
    begins,
    tails,
    keeps,
    anchor,
    frames,
    offset,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    TAPS: tl.constexpr,
    FRAMES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    LEFT: tl.constexpr = TAPS - 1
    group, twin = tl.program_id(1), tl.program_id(2)
    t = tl.program_id(0) * FRAMES + tl.arange(0, FRAMES)
    real = t < frames
    own_first = tl.load(begins + t, mask=real, other=0).to(tl.int32)
    tail = tl.load(tails + t, mask=real, other=0)
    channel = tl.arange(0, PADDED)
    known = channel < CHANNELS
    column = group * CHANNELS + channel
    rows = x + twin.to(tl.int64) * frames * WIDTH + column[None, :]
    before = anchor + (tail * UNIT)[:, None] + column[None, :]
    before += offset * UNIT + twin * (LEFT * WIDTH)
    taps = weight + (group * TAPS * PADDED + channel)[:, None] * PADDED + channel[None, :]
    total = tl.zeros([FRAMES, PADDED], tl.float32)
    for tap in range(TAPS):
        source = t - LEFT + tap
        own = real & (source >= own_first)
        told = (source < own_first) & (tail != 0)
        value = tl.load(rows + source[:, None] * WIDTH, mask=own[:, None] & known[None, :], other=0.0)
        value += tl.load(
            before + (source - own_first + LEFT)[:, None] * WIDTH, mask=told[:, None] & known[None, :], other=0.0
        )
        total += tl.dot(value, tl.load(taps + tap * (PADDED * PADDED)), input_precision=PRECISION)
    total += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :]
    e = tl.exp(tl.minimum(total, 20.0))  # beyond, Mish is the identity in float32
    total = total * (e * (e + 2)) / (e * (e + 2) + 2)
    mine = real[:, None] & known[None, :]
    place = twin.to(tl.int64) * frames * WIDTH + t[:, None] * WIDTH + column[None, :]
    if RESIDUAL:
        total += tl.load(residual + place, mask=mine, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mine)
    keep = tl.load(keeps + t, mask=real, other=0)
    if tl.max((keep != 0).to(tl.int32), axis=0) != 0:  # a place may lie before the anchor
        kept = anchor + (keep * UNIT)[:, None] + column[None, :]
        value = tl.load(x + place, mask=mine, other=0.0)
        tl.store(kept + offset * UNIT + twin * (LEFT * WIDTH), value, mask=mine & (keep != 0)[:, None])


@triton.jit
def _add_and_norm(h, y, gate, scale, shift, out, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr):
    channel = tl.arange(0, PADDED)
    known = channel < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + channel
    weight, bias = tl.load(scale + channel, mask=known, other=0.0), tl.load(shift + channel, mask=known, other=0.0)
    if ADDS:
        share = tl.load(gate + channel, mask=known, other=0.0)
    value = tl.load(h + place, mask=known, other=0.0).to(tl.float32)
    if ADDS:
        value += share * tl.load(y + place, mask=known, other=0.0).to(tl.float32)
        tl.store(h + place, value.to(h.dtype.element_ty), mask=known)
    centred = tl.where(known, value - tl.sum(value, axis=0) / WIDTH, 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + 1e-6)
    tl.store(out + place, (centred * spread * weight + bias).to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["frames", "offset"])
def _turn_and_keep(
    qkv,
    cos,
    sin,
    positions,
    keeps,
    anchor,
    frames,
    offset,
    twin_stride,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
    FRAMES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    twin, part = tl.program_id(1), tl.program_id(2)
    t = tl.program_id(0) * FRAMES + tl.arange(0, FRAMES)
    real = t < frames
    keep = tl.load(keeps + t, mask=real, other=0)
    kept_here = keep != 0  # a place may lie before the anchor
    kept = anchor + (keep * UNIT)[:, None] + offset * UNIT + twin * twin_stride
    row = qkv + (twin.to(tl.int64) * frames + t)[:, None] * (3 * WIDTH)
    if part == 0:  # what turns, and of the keys is kept as it was turned
        pair = tl.arange(0, PAIRS)
        position = tl.load(positions + t, mask=real, other=0)
        angle = position[:, None] * PAIRS + pair[None, :]
        c, s = tl.load(cos + angle), tl.load(sin + angle)
        for side in tl.static_range(2):
            place = row + side * WIDTH + 2 * pair[None, :]
            even = tl.load(place, mask=real[:, None], other=0.0).to(tl.float32)
            odd = tl.load(place + 1, mask=real[:, None], other=0.0).to(tl.float32)
            turned_even = (even * c - odd * s).to(qkv.dtype.element_ty)
            turned_odd = (odd * c + even * s).to(qkv.dtype.element_ty)
            tl.store(place, turned_even, mask=real[:, None])
            tl.store(place + 1, turned_odd, mask=real[:, None])
            if side == 1:
                tl.store(kept + 2 * pair[None, :], turned_even, mask=kept_here[:, None])
                tl.store(kept + 2 * pair[None, :] + 1, turned_odd, mask=kept_here[:, None])
    elif tl.max(kept_here.to(tl.int32), axis=0) != 0:  # the rest of keys and values
        column = 2 * PAIRS + (part - 1) * COLUMNS + tl.arange(0, COLUMNS)
        mine = kept_here[:, None] & (column < 2 * WIDTH)[None, :]
        tl.store(kept + column[None, :], tl.load(row + WIDTH + column[None, :], mask=mine, other=0.0), mask=mine)


@triton.jit(do_not_specialize=["elements"])
def _euler_step(
    x,
    velocity,
    told,
    elements,
    width,
    rate,
    BINS: tl.constexpr,
    INPUTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < elements
    conditional = tl.load(velocity + at, mask=real, other=0.0).to(tl.float32)
    unconditional = tl.load(velocity + elements + at, mask=real, other=0.0).to(tl.float32)
    moved = tl.load(x + at, mask=real, other=0.0) + width * ((1 + rate) * conditional - rate * unconditional)
    tl.store(x + at, moved, mask=real)
    place = told + (at // BINS) * INPUTS + at % BINS
    tl.store(place, moved.to(told.dtype.element_ty), mask=real)
    tl.store(place + (elements // BINS) * INPUTS, moved.to(told.dtype.element_ty), mask=real)
