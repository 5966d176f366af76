"""The language model's arithmetic on a GPU, five kernels a layer: Triton, tensors in, tensors out.

Shapes: R rows, each one position of one stream; D hidden width, H query heads, K key/value heads, C head_dim, G = H / K
query heads of a key head, V ids, P positions of a slot. Matrices are [features, inputs] as in the module.

A row's numbers do not depend on the rows beside it: each program takes the same number of rows, of which each is a
column of the same matrix instructions, and sums over inputs and positions are cut in fixed places. So nothing changes
with the size of a batch but the number of programs. Products are summed in float32, activations lie in the model's
precision between kernels, as in the module.
"""

import triton
import triton.language as tl


@triton.jit
def embed_kernel(ids, positions, at, stride, speech, text, x, position, D: tl.constexpr, BLOCK: tl.constexpr):
    """x[row] of the id at `at[row]`, and its position; an id below 0 is -1 - id of the text table."""
    row = tl.program_id(0)
    where = tl.load(at + row) * stride
    token = tl.load(ids + where)
    column = tl.arange(0, BLOCK)
    inside = column < D
    if token >= 0:
        value = tl.load(speech + token * D + column, mask=inside)
    else:
        value = tl.load(text + (-1 - token) * D + column, mask=inside)
    tl.store(x + row * D + column, value, mask=inside)
    tl.store(position + row, tl.load(positions + where).to(tl.int32))


@triton.jit
def _normed_pair(
    x, norm, first, second, rows, a, b, in_a, in_b, eps, D: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Features a of `first` and b of `second`, [F, ROWS] each, of the rows after RMSNorm.

    The norm's factor is one number per row, so it is applied to the sums; they and the squares take the same pass.
    """
    sums_a = tl.zeros([F, ROWS], tl.float32)
    sums_b = tl.zeros([F, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)
        tile = tl.load(x + rows[None, :] * D + k[:, None])
        wide = tile.to(tl.float32)
        squares += tl.sum(wide * wide, 0)
        tile = (wide * tl.load(norm + k).to(tl.float32)[:, None]).to(tile.dtype)
        weight = tl.load(first + a[:, None] * D + k[None, :], mask=in_a[:, None], other=0)
        sums_a = tl.dot(weight, tile, sums_a, input_precision="ieee")
        weight = tl.load(second + b[:, None] * D + k[None, :], mask=in_b[:, None], other=0)
        sums_b = tl.dot(weight, tile, sums_b, input_precision="ieee")
    factor = 1 / tl.sqrt(squares / D + eps)
    return sums_a * factor[None, :], sums_b * factor[None, :]


@triton.jit
def qkv_kernel(
    x, norm, weight, bias, cosine, sine, slots, position, q, keys, values, eps,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Norm, projections and rotary embedding: queries to q [R, H, C], keys and values into their slots [S, K, P, C].

    A program makes F dimensions of a head's first half and their partners in the second.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half: tl.constexpr = C // 2
    blocks: tl.constexpr = (half + F - 1) // F
    head = tl.program_id(1) // blocks
    low = tl.program_id(1) % blocks * F + tl.arange(0, F)
    inside = low < half
    a = head * C + low
    b = a + half
    first, second = _normed_pair(x, norm, weight, weight, rows, a, b, inside, inside, eps, D, ROWS, F, BK)
    first += tl.load(bias + a, mask=inside, other=0).to(tl.float32)[:, None]
    second += tl.load(bias + b, mask=inside, other=0).to(tl.float32)[:, None]
    at = tl.load(position + rows)
    angle = at[None, :] * half + low[:, None]
    turn = inside[:, None] & (head < H + K)
    cos = tl.load(cosine + angle, mask=turn, other=1.0)
    sin = tl.load(sine + angle, mask=turn, other=0.0)
    turned = first * cos - second * sin
    partner = second * cos + first * sin
    if head < H:
        place = q + rows[None, :] * (H * C) + head * C + low[:, None]
        tl.store(place, turned.to(q.dtype.element_ty), mask=inside[:, None])
        tl.store(place + half, partner.to(q.dtype.element_ty), mask=inside[:, None])
    else:
        slot = tl.load(slots + rows).to(tl.int64)
        base = keys if head < H + K else values
        kv_head = (head - H) % K
        place = base + ((slot * K + kv_head) * P + at)[None, :] * C + low[:, None]
        tl.store(place, turned.to(q.dtype.element_ty), mask=inside[:, None])
        tl.store(place + half, partner.to(q.dtype.element_ty), mask=inside[:, None])


@triton.jit
def attention_kernel(
    q, keys, values, slots, position, sums, peaks, weights, arrived, out, scale,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Each row's queries over its slot up to its own position -> out [R, H, C].

    Program s of a row and key head takes tiles s, s + SPLITS, ... of positions; who comes last puts the parts together,
    in the order of s. `sums` [R, K, SPLITS, GROUP, C], `peaks` and `weights` [R, K, SPLITS, GROUP] hold the parts,
    `arrived` [R, K] counts them and is zero before and after.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(position + row) + 1
    tiles = (length + TILE - 1) // TILE
    if split < tiles:
        g = tl.arange(0, GROUP)
        c = tl.arange(0, C)
        mine = g < H // K
        here = row * (H * C) + (kv_head * (H // K) + g)[:, None] * C + c[None, :]
        query = tl.load(q + here, mask=mine[:, None], other=0)
        slot = tl.load(slots + row).to(tl.int64)
        base = (slot * K + kv_head) * P * C
        peak = tl.full([GROUP], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP], tl.float32)
        total = tl.zeros([GROUP, C], tl.float32)
        for tile in range(split, tiles, SPLITS):
            p = tile * TILE + tl.arange(0, TILE)
            seen = p < length  # what lies beyond may be of an older stream, and NaN
            key = tl.load(keys + base + p[None, :] * C + c[:, None], mask=seen[None, :], other=0)
            score = tl.dot(query, key, input_precision="ieee") * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            higher = tl.maximum(peak, tl.max(score, 1))
            share = tl.exp(score - higher[:, None])
            fade = tl.exp(peak - higher)
            value = tl.load(values + base + p[:, None] * C + c[None, :], mask=seen[:, None], other=0)
            weight = weight * fade + tl.sum(share, 1)
            total = total * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
            peak = higher
        if tiles == 1:
            tl.store(out + here, (total / weight[:, None]).to(out.dtype.element_ty), mask=mine[:, None])
        else:
            part = ((row * K + kv_head) * SPLITS + split) * GROUP
            tl.store(sums + (part + g)[:, None] * C + c[None, :], total)
            tl.store(peaks + part + g, peak)
            tl.store(weights + part + g, weight)
            tl.debug_barrier()  # every thread has stored before one of them says so
            parts = tl.minimum(tiles, SPLITS)
            if tl.atomic_add(arrived + row * K + kv_head, 1, sem="acq_rel") == parts - 1:
                peak = tl.full([GROUP], float("-inf"), tl.float32)
                weight = tl.zeros([GROUP], tl.float32)
                total = tl.zeros([GROUP, C], tl.float32)
                for other in range(0, parts):
                    part = ((row * K + kv_head) * SPLITS + other) * GROUP
                    theirs = tl.load(peaks + part + g, cache_modifier=".cg")
                    higher = tl.maximum(peak, theirs)
                    fade = tl.exp(peak - higher)
                    share = tl.exp(theirs - higher)
                    weight = weight * fade + tl.load(weights + part + g, cache_modifier=".cg") * share
                    more = tl.load(sums + (part + g)[:, None] * C + c[None, :], cache_modifier=".cg")
                    total = total * fade[:, None] + more * share[:, None]
                    peak = higher
                tl.store(out + here, (total / weight[:, None]).to(out.dtype.element_ty), mask=mine[:, None])
                tl.store(arrived + row * K + kv_head, 0)


@triton.jit
def add_projection_kernel(
    y, weight, x, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr
):
    """x [R, N] += y [R, D] times the weight [N, D], in place: each program owns its features."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1) * F + tl.arange(0, F)
    inside = f < N
    sums = tl.zeros([F, ROWS], tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)
        tile = tl.load(y + rows[None, :] * D + k[:, None])
        part = tl.load(weight + f[:, None] * D + k[None, :], mask=inside[:, None], other=0)
        sums = tl.dot(part, tile, sums, input_precision="ieee")
    place = x + rows[None, :] * N + f[:, None]
    before = tl.load(place, mask=inside[:, None], other=0)
    tl.store(place, (before.to(tl.float32) + sums).to(before.dtype), mask=inside[:, None])


@triton.jit
def gate_kernel(
    x, norm, gate, up, h, eps, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr
):
    """h [R, N] = silu(gate) * up of the rows after RMSNorm."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1) * F + tl.arange(0, F)
    inside = f < N
    opened, linear = _normed_pair(x, norm, gate, up, rows, f, f, inside, inside, eps, D, ROWS, F, BK)
    mixed = opened / (1 + tl.exp(-opened)) * linear
    tl.store(h + rows[None, :] * N + f[:, None], mixed.to(h.dtype.element_ty), mask=inside[:, None])


@triton.jit
def head_kernel(
    x, norm, weight, logits, eps, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """logits [R, N], float32, of the rows after the last RMSNorm."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a = tl.program_id(1) * (2 * F) + tl.arange(0, F)
    b = a + F
    first, second = _normed_pair(x, norm, weight, weight, rows, a, b, a < N, b < N, eps, D, ROWS, F, BK)
    tl.store(logits + rows[None, :] * N + a[:, None], first, mask=(a < N)[:, None])
    tl.store(logits + rows[None, :] * N + b[:, None], second, mask=(b < N)[:, None])
