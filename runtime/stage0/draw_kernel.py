"""Draws the next token of every row on the GPU, one program a row, inside the captured step.

The same two draws as `draws.two_draws` (which is the readable form), from the same numbers: a candidate out of the
nucleus, and where that was said too recently a second one out of everything else. Nothing is sorted: the border of the
nucleus is found by halving the range of scores. What it needs of a stream, and what changes with each token, lies in
two tables with a line per slot.
"""

import triton
import triton.language as tl

from runtime.stage0.early_launch import begin

# Columns of the table of whole numbers, int64: the first three change with each token.
TOKEN, POSITION, STEP, MIN_TOKENS, TOP_K, WINDOW, REPEATS, STANDARD, SEED = range(9)
NUMBERS = 16  # columns, a power of two
# and of the other one, float32
TEMPERATURE, TOP_P, PENALTY = range(3)
KNOBS = 4
BROKEN = -1  # given out for a row in which nothing can be drawn


@triton.jit
def philox(seed, counter):
    """Two numbers of 32 bits, as uint64: the first words of Philox 4x32-10 (Salmon et al., 2011) at (seed, counter)."""
    mask = 0xFFFFFFFF
    seed = seed.to(tl.uint64, bitcast=True)
    counter = counter.to(tl.uint64, bitcast=True)
    key_a, key_b = seed & mask, seed >> 32
    a, b = counter & mask, counter >> 32
    c, d = a & 0, a & 0
    for _ in tl.static_range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ key_a, right & mask, (left >> 32) ^ d ^ key_b, left & mask
        key_a = (key_a + 0x9E3779B9) & mask
        key_b = (key_b + 0xBB67AE85) & mask
    return a, b


@triton.jit
def _pick(weights, ids, number, SIZE: tl.constexpr):
    """The id on which a number of 32 bits falls when the weights are laid end to end. Never one without weight."""
    sums = tl.cumsum(weights.to(tl.float64), 0)
    at = number.to(tl.float64) * (1.0 / 4294967296.0) * tl.max(sums, 0)
    return tl.min(tl.where((sums > at) & (weights > 0), ids, SIZE), 0)


@triton.jit
def _likeliest(key, counted, wanted, limit, SIZE: tl.constexpr):
    """Which ids [SIZE] are among the `wanted` best and come before the sum of the better ones has reached `limit`.

    Both hold for the ids up to some key, and that is found by halving the range of keys. Equal ones go in order of id.
    """
    low = -1
    high = 0x7F800000  # of a score of -inf
    below = wanted * 0  # of the ids up to `low`, as in `counted`
    upto = below + ((SIZE + 1) << 48)
    middle = 0x41B20000  # of -22.25; further down no share has a bit within its 32
    turn = 0
    while (high - low > 1) & ((upto >> 48) - (below >> 48) > 1):
        if turn > 0:
            middle = low + (high - low) // 2
            if turn < 12:  # half of the scores' range, not of all their exponents
                mean = (tl.maximum(low, 0).to(tl.float32, bitcast=True) + high.to(tl.float32, bitcast=True)) * 0.5
                middle = tl.minimum(tl.maximum(mean.to(tl.int32, bitcast=True), low + 1), high - 1)
        turn += 1
        sums = tl.sum(tl.where(key <= middle, counted, 0), 0)
        count, mass = sums >> 48, (sums & 0xFFFFFFFFFFFF).to(tl.float64)
        enough = (count >= wanted) | (mass >= limit)
        high = tl.where(enough, middle, high)
        upto = tl.where(enough, sums, upto)
        low = tl.where(enough, low, middle)
        below = tl.where(enough & ((count != wanted) | (mass >= limit)), below, sums)  # or these are just they
    inside = key <= high
    if (upto >> 48) - (below >> 48) > 1:
        border = key == high
        order = tl.cumsum(border.to(tl.int32), 0) - 1
        each = tl.max(tl.where(border, counted & 0xFFFFFFFFFFFF, 0), 0)
        before = (below & 0xFFFFFFFFFFFF).to(tl.float64) + order.to(tl.float64) * each.to(tl.float64)
        inside = (key < high) | (border & ((below >> 48) + order < wanted) & (before < limit))
    return inside


@triton.jit
def draw_kernel(
    logits, slots, numbers, knobs, history, seen, drawn, spare,
    early_from, early_to, V: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    OTHERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """logits [R, V] -> drawn [R] int64, and every slot's line moved on by one token.

    Ids early_from..early_to cannot come before min_tokens. `history` [S, P] int32 and `seen` [S, V] uint8 keep what a
    slot has said. Rows of the slot `spare` are filler and leave no trace.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    line, other = numbers + slot * COLUMNS, knobs + slot * OTHERS
    step, penalty, temperature = tl.load(line + 2), tl.load(other + 2), tl.load(other + 0)
    wanted, window, allowed = tl.minimum(tl.load(line + 4), V), tl.minimum(tl.load(line + 5), step), tl.load(line + 6)
    standard, top_p = tl.load(line + 7) != 0, tl.load(other + 1).to(tl.float64)
    first, second = philox(tl.load(line + 8), step)
    ids = tl.arange(0, SIZE)
    inf = float("inf")
    early = (step < tl.load(line + 3)) & (ids >= early_from) & (ids < early_to)
    begin(EARLY)  # the tables are of the step before, which has ended; only the scores are new
    scores = tl.load(logits + row * V + ids, mask=ids < V, other=-inf)
    scores = tl.where((scores != scores) | early, -inf, scores)
    best = tl.max(scores, 0)
    broken = best == -inf  # told at the end
    scores = tl.where(best == inf, tl.where(scores == inf, 0.0, -inf), scores)  # an endless score takes everything
    scores = tl.where(broken, tl.where(ids < V, 0.0, -inf), scores)
    best = tl.where(broken | (best == inf), 0.0, best)
    if penalty != 1.0:
        said = tl.load(seen + slot * V + ids, mask=ids < V, other=0) != 0
        scores = tl.where(said, tl.where(scores > 0, scores / penalty, scores * penalty), scores)
        best = tl.max(scores, 0)
    scores = (scores - best) / tl.where(temperature == 0, 1.0, temperature)
    token = 0
    if temperature == 0:
        token = tl.min(tl.where(scores == 0, ids, SIZE), 0)
    else:
        shares = tl.exp(scores)
        key = (-scores).to(tl.int32, bitcast=True)  # 0 is the best, larger ones are worse
        key = tl.where(scores == 0, 0, key)
        # One sum tells how many and how much: a share in 48 bits of which 32 are behind the point, and above it a one.
        counted = (shares * 4294967296.0).to(tl.int64) + (1 << 48)
        everything = (tl.sum(counted, 0) & 0xFFFFFFFFFFFF).to(tl.float64)
        inside = _likeliest(key, counted, wanted, tl.where(standard, inf, top_p * everything), SIZE)
        if standard:  # top_p of what top_k left
            left = (tl.sum(tl.where(inside, counted, 0), 0) & 0xFFFFFFFFFFFF).to(tl.float64)
            inside = _likeliest(key, counted, wanted, top_p * left, SIZE)
        token = _pick(tl.where(inside, shares, 0.0), ids, first, SIZE)
        # Repetition-aware: what was said too recently is struck out, and the draw repeated over everything else.
        repeats = 0
        for start in range(0, window, 64):
            back = start + tl.arange(0, 64)
            recent = tl.load(history + slot * P + step - 1 - back, mask=back < window, other=-1)
            repeats += tl.sum((recent == token).to(tl.int32), 0)
        if (repeats >= allowed) & ~standard:
            rest = tl.where(ids == token, -inf, scores)
            best_left = tl.max(rest, 0)
            if best_left > -inf:
                token = _pick(tl.exp(rest - best_left), ids, second, SIZE)
    tl.store(drawn + row, tl.where(broken, -1, token).to(tl.int64))
    if slot != spare:
        tl.store(line + 0, token.to(tl.int64))
        tl.store(line + 1, tl.minimum(tl.load(line + 1) + 1, P - 1))
        tl.store(line + 2, step + 1)
        tl.store(history + slot * P + tl.minimum(step, P - 1), token.to(tl.int32))
        tl.store(seen + slot * V + token, 1)
