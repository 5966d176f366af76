"""The language model's arithmetic on a GPU, five kernels a layer: Triton, tensors in, tensors out.

Shapes: R rows, each one position of one stream; D hidden width, H query heads, K key/value heads, C head_dim, G = H / K
query heads of a key head, V ids, P positions of a slot. Matrices are [features, inputs] as in the module.

A row's numbers do not depend on the rows beside it: each program takes the same number of rows, of which each is a
column of the same matrix instructions, and sums over inputs and positions are cut in fixed places. So nothing changes
with the size of a batch but the number of programs. Products are summed in float32, activations lie in the model's
precision between kernels, as in the module.

RMSNorm takes no kernel of its own. Who writes the residual stream writes it a second time multiplied by the weight of
the norm that follows, and the squares of its features summed per row [parts, R]; who reads it multiplies that and
divides the products by the root at the end.

With EARLY a kernel may start while the one before it stores its results (early_launch.py): it waits for these before it
reads anything but constants and `slots`, which say whose each row is; rows of slot `spare` are filler.
"""

import triton
import triton.language as tl

from runtime.stage0.early_launch import begin, nearly_done


@triton.jit
def embed_kernel(
    ids, positions, at, stride, speech, text, norm, x, scaled, squares, position, parts, lines,
    D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The residual stream of the id at `at[row]`, and its position; an id below 0 is -1 - id of the text table."""
    begin(EARLY)
    row = tl.program_id(0)
    where = tl.load(at + row) * stride
    token = tl.load(ids + where)
    column = tl.arange(0, BLOCK)
    inside = column < D
    if token >= 0:
        value = tl.load(speech + token * D + column, mask=inside, other=0)
    else:
        value = tl.load(text + (-1 - token) * D + column, mask=inside, other=0)
    wide = value.to(tl.float32)
    tl.store(x + row * D + column, value, mask=inside)
    scale = tl.load(norm + column, mask=inside, other=0).to(tl.float32)
    tl.store(scaled + row * D + column, (wide * scale).to(value.dtype), mask=inside)
    tl.store(squares + row, tl.sum(wide * wide, 0))
    for part in range(1, parts):
        tl.store(squares + part * lines + row, 0.0)
    tl.store(position + row, tl.load(positions + where).to(tl.int32))


@triton.jit
def _product(
    x, weight, rows, alive, f, inside, split, D: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Features f of x [R, D] times the weight [N, D]: [ROWS, F], float32; of the tiles split, split + SPLITS, ...

    Rows that are not alive count as zeros and cost no memory traffic.
    """
    sums = tl.zeros([ROWS, F], tl.float32)
    for start in range(split * BK, D, SPLITS * BK):
        k = start + tl.arange(0, BK)
        tile = tl.load(x + rows[:, None] * D + k[None, :], mask=alive[:, None], other=0)
        part = tl.load(weight + f[None, :] * D + k[:, None], mask=inside[None, :], other=0)
        sums = tl.dot(tile, part, sums, input_precision="ieee")
    return sums


@triton.jit
def _products(
    x, first, second, rows, alive, a, b, in_a, in_b,
    D: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Features a of the first weight and b of the second, in one pass over x."""
    sums_a = tl.zeros([ROWS, F], tl.float32)
    sums_b = tl.zeros([ROWS, F], tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)
        tile = tl.load(x + rows[:, None] * D + k[None, :], mask=alive[:, None], other=0)
        part_a = tl.load(first + a[None, :] * D + k[:, None], mask=in_a[None, :], other=0)
        part_b = tl.load(second + b[None, :] * D + k[:, None], mask=in_b[None, :], other=0)
        sums_a = tl.dot(tile, part_a, sums_a, input_precision="ieee")
        sums_b = tl.dot(tile, part_b, sums_b, input_precision="ieee")
    return sums_a, sums_b


@triton.jit
def _squares(squares, rows, lines, parts, PARTS: tl.constexpr):
    """Sums of squares of rows by parts, [ROWS, PARTS]; asked for before the products, needed behind them."""
    part = tl.arange(0, PARTS)
    return tl.load(squares + part[None, :] * lines + rows[:, None], mask=part[None, :] < parts, other=0.0)


@triton.jit
def qkv_kernel(
    scaled, squares, weight, bias, cosine, sine, slots, spare, position, q, keys, values, eps, parts, lines,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
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
    slot = tl.load(slots + rows).to(tl.int64)
    begin(EARLY)
    square = _squares(squares, rows, lines, parts, PARTS)
    at = tl.load(position + rows)
    angle = at[:, None] * half + low[None, :]
    turn = inside[None, :] & (head < H + K)
    cos = tl.load(cosine + angle, mask=turn, other=1.0)
    sin = tl.load(sine + angle, mask=turn, other=0.0)
    bias_a = tl.load(bias + a, mask=inside, other=0).to(tl.float32)
    bias_b = tl.load(bias + b, mask=inside, other=0).to(tl.float32)
    first, second = _products(scaled, weight, weight, rows, slot != spare, a, b, inside, inside, D, ROWS, F, BK)
    nearly_done(EARLY)
    factor = 1 / tl.sqrt(tl.sum(square, 1) / D + eps)
    first = first * factor[:, None] + bias_a[None, :]
    second = second * factor[:, None] + bias_b[None, :]
    turned = first * cos - second * sin
    partner = second * cos + first * sin
    if head < H:
        place = q + rows[:, None] * (H * C) + head * C + low[None, :]
        tl.store(place, turned.to(q.dtype.element_ty), mask=inside[None, :])
        tl.store(place + half, partner.to(q.dtype.element_ty), mask=inside[None, :])
    else:
        base = keys if head < H + K else values
        kv_head = (head - H) % K
        place = base + ((slot * K + kv_head) * P + at)[:, None] * C + low[None, :]
        tl.store(place, turned.to(q.dtype.element_ty), mask=inside[None, :])
        tl.store(place + half, partner.to(q.dtype.element_ty), mask=inside[None, :])


@triton.jit
def attention_kernel(
    q, keys, values, slots, position, sums, peaks, weights, arrived, out, scale,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each row's queries over its slot up to its own position -> out [R, H, C].

    Program s of a row and key head takes tiles s, s + SPLITS, ... of positions; who comes last puts the parts together,
    in the order of s. `sums` [R, K, SPLITS, GROUP, C], `peaks` and `weights` [R, K, SPLITS, GROUP] hold the parts,
    `arrived` [R, K] counts them and is zero before and after.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    begin(EARLY)
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
        nearly_done(EARLY)
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
    y, weight, norm, slots, spare, x, scaled, squares, parts, arrived, lines, N: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The residual stream x [R, N] += y [R, D] times the weight [N, D].

    SPLITS programs share the inputs of F features, by tiles in turn; who comes last adds their parts in order.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1) * F + tl.arange(0, F)
    split = tl.program_id(2)
    inside = f < N
    scale = tl.load(norm + f, mask=inside, other=0).to(tl.float32)
    alive = tl.load(slots + rows) != spare
    begin(EARLY)
    place = rows[:, None] * N + f[None, :]
    before = tl.load(x + place, mask=inside[None, :], other=0)
    sums = _product(y, weight, rows, alive, f, inside, split, D, ROWS, F, BK, SPLITS)
    nearly_done(EARLY)
    is_last = True
    if SPLITS > 1:
        group = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        cell = group * SPLITS * ROWS * F + tl.arange(0, ROWS)[:, None] * F + tl.arange(0, F)[None, :]
        tl.store(parts + cell + split * ROWS * F, sums)
        tl.debug_barrier()  # every thread has stored before one of them says so
        is_last = tl.atomic_add(arrived + group, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            sums = tl.zeros([ROWS, F], tl.float32)
            for other in tl.static_range(SPLITS):
                sums += tl.load(parts + cell + other * ROWS * F, cache_modifier=".cg")
            tl.store(arrived + group, 0)
    if is_last:
        now = (before.to(tl.float32) + sums).to(before.dtype)
        wide = now.to(tl.float32)
        tl.store(x + place, now, mask=inside[None, :])
        tl.store(scaled + place, (wide * scale[None, :]).to(now.dtype), mask=inside[None, :])
        tl.store(squares + tl.program_id(1) * lines + rows, tl.sum(wide * wide, 1))


@triton.jit
def gate_kernel(
    scaled, squares, gate, up, slots, spare, h, eps, parts, lines,
    N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h [R, N] = silu(gate) * up of the rows after RMSNorm."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1) * F + tl.arange(0, F)
    inside = f < N
    alive = tl.load(slots + rows) != spare
    begin(EARLY)
    square = _squares(squares, rows, lines, parts, PARTS)
    opened, linear = _products(scaled, gate, up, rows, alive, f, f, inside, inside, D, ROWS, F, BK)
    nearly_done(EARLY)
    factor = 1 / tl.sqrt(tl.sum(square, 1) / D + eps)
    opened, linear = opened * factor[:, None], linear * factor[:, None]
    mixed = opened / (1 + tl.exp(-opened)) * linear
    tl.store(h + rows[:, None] * N + f[None, :], mixed.to(h.dtype.element_ty), mask=inside[None, :])


@triton.jit
def head_kernel(
    scaled, squares, weight, slots, spare, logits, eps, parts, lines,
    N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """logits [R, N], float32, of the rows after the last RMSNorm."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1) * F + tl.arange(0, F)
    inside = f < N
    alive = tl.load(slots + rows) != spare
    begin(EARLY)
    square = _squares(squares, rows, lines, parts, PARTS)
    sums = _product(scaled, weight, rows, alive, f, inside, 0, D, ROWS, F, BK, 1)
    nearly_done(EARLY)
    factor = 1 / tl.sqrt(tl.sum(square, 1) / D + eps)
    tl.store(logits + rows[:, None] * N + f[None, :], sums * factor[:, None], mask=inside[None, :])
