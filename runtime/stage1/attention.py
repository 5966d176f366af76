"""Attention over packed frames as one Triton kernel (after FlashAttention-2, arXiv 2307.08691).

Shapes: T frames of all pieces, H heads of K channels, W = H K, two twins. Queries, keys and values lie in one tensor
[2, T, 3 W]. A program takes one tile of queries of one piece, one head and one twin. It reads the keys of the piece's
past where they lie, block by block, then those of the piece itself, up to the last one that a query of the tile sees.
Keys of other pieces and padding are never read, so what they hold, NaN included, cannot leak.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.stage1.packing import TILE_FRAMES


def attend(
    qkv: Tensor,
    tiles: Tensor,
    seen: Tensor,
    past: Tensor,
    anchor: Tensor,
    *,
    heads: int,
    block_frames: int,
    past_offset: int,
) -> Tensor:
    """[2, T, 3 W] -> [2, T, W]; frames that no tile covers stay unset.

    tiles [n, 5] and seen [T] as in packing.py; a tile without frames is skipped. past [k]: places, from `anchor`, of
    blocks that hold [.., 2, block_frames, 2 W], of which the two twins begin at element `past_offset`.
    """
    twins, frames, width = qkv.shape
    out = qkv.new_empty(twins, frames, width // 3)
    channels = width // 3 // heads
    unit = 16 // qkv.element_size()  # elements of 16 bytes: what a kernel multiplies by it, it knows to be aligned
    _attend[(len(tiles), heads, twins)](
        qkv,
        out,
        tiles,
        seen,
        past,
        anchor,
        frames,
        past_offset // unit,
        scale=channels**-0.5 * 1.4426950408889634,  # of exp2
        WIDTH=width // 3,
        CHANNELS=channels,
        BLOCK=block_frames,
        UNIT=unit,
        QUERIES=TILE_FRAMES,
        KEYS=32 if frames >= 2048 else 64,  # as was fastest on an H200; 128 queries or keys were not, anywhere
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3 if qkv.element_size() == 2 else 2,
    )
    return out


@triton.jit
def _take(q, k, v, visible, scale, best, weight, total, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the running softmax: what is not visible gets exactly no weight."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1) * scale)
    p = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(best - higher)
    weight = weight * shrink + tl.sum(p, axis=1)
    total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return higher, weight, total


@triton.jit(do_not_specialize=["frames", "past_offset"])
def _attend(
    qkv,
    out,
    tiles,
    seen,
    past,
    anchor,
    frames,
    past_offset,
    scale,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 5
    count = tl.load(tile + 1).to(tl.int32)
    if count == 0:
        return
    head, twin = tl.program_id(1), tl.program_id(2)
    first = tl.load(tile).to(tl.int32)
    own = tl.load(tile + 2).to(tl.int32)
    past_first = tl.load(tile + 3)
    past_frames = tl.load(tile + 4).to(tl.int32)

    query = tl.arange(0, QUERIES)
    channel = tl.arange(0, CHANNELS)
    real = query < count
    limit = tl.load(seen + first + query, mask=real, other=0).to(tl.int32)
    limit = tl.where(real, limit, tl.max(limit, axis=0))  # rows that are not stored do what the others do
    twin_start = twin.to(tl.int64) * frames
    q_row = (twin_start + first + query)[:, None]
    q = tl.load(qkv + q_row * (3 * WIDTH) + head * CHANNELS + channel[None, :], mask=real[:, None], other=0.0)

    best = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, CHANNELS], tl.float32)
    key = tl.arange(0, KEYS)
    in_block = past_offset * UNIT + twin * (BLOCK * 2 * WIDTH) + head * CHANNELS
    for start in range(0, past_frames, KEYS):
        at = start + key
        there = at < past_frames
        place = anchor + tl.load(past + past_first + at // BLOCK, mask=there, other=0) * UNIT
        place += in_block + (at % BLOCK) * (2 * WIDTH)
        k = tl.load(place[None, :] + channel[:, None], mask=there[None, :], other=0.0)
        v = tl.load(place[:, None] + WIDTH + channel[None, :], mask=there[:, None], other=0.0)
        best, weight, total = _take(q, k, v, there[None, :], scale, best, weight, total, True, PRECISION)

    own_frames = tl.max(limit, axis=0) - past_frames
    for_all = tl.min(limit, axis=0) - past_frames  # own frames that every query of the tile sees
    keys = qkv + (twin_start + own) * (3 * WIDTH) + WIDTH + head * CHANNELS
    unmasked = for_all // KEYS * KEYS
    for start in range(0, unmasked, KEYS):
        place = keys + (start + key) * (3 * WIDTH)
        k = tl.load(place[None, :] + channel[:, None])
        v = tl.load(place[:, None] + WIDTH + channel[None, :])
        best, weight, total = _take(q, k, v, real, scale, best, weight, total, False, PRECISION)
    for start in range(unmasked, own_frames, KEYS):
        at = start + key
        there = at < own_frames
        place = keys + at * (3 * WIDTH)
        k = tl.load(place[None, :] + channel[:, None], mask=there[None, :], other=0.0)
        v = tl.load(place[:, None] + WIDTH + channel[None, :], mask=there[:, None], other=0.0)
        visible = (past_frames + at)[None, :] < limit[:, None]
        best, weight, total = _take(q, k, v, visible, scale, best, weight, total, True, PRECISION)

    place = out + q_row * WIDTH + head * CHANNELS + channel[None, :]
    tl.store(place, (total / weight[:, None]).to(out.dtype.element_ty), mask=real[:, None])
