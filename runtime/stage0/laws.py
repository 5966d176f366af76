"""Laws of the next token as probabilities: many rows at once, on any device, without a second draw or a host wait.

Shapes: N rows (one per stream), V ids. `sampling.py` draws one row on the CPU and is the truth; here the same laws are
written out, so that a single number per row decides, and engines can sample inside their step. Probabilities are
float64: their sums then tell apart what float32 scores can.

Repetition-aware sampling in closed form: with Pn the nucleus law, Pf the full one and R the repeated ids, an id x comes
    p(x) = Pn(x) [x not in R] + sum over w in R of Pn(w) Pf(x) [x != w] / (1 - Pf(w)),
that is, straight away, or after any repeated w was drawn, struck out and the draw repeated over everything else.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.types import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Laws:
    """SamplingParams of N rows, as tensors [N, 1] on one device."""

    standard: Tensor  # bool; the other rows are ras
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor  # V where there is no limit
    widest: int  # the largest top_k of all rows
    penalty: Tensor
    repeats: Tensor  # occurrences in the window from which an id counts as repeated

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], ids: int, device: torch.device) -> "Laws":
        def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype)[:, None].to(device)

        return cls(
            standard=column([row.method == "standard" for row in rows], torch.bool),
            temperature=column([row.temperature for row in rows]),
            top_p=column([row.top_p for row in rows]),
            top_k=column([row.top_k or ids for row in rows], torch.int64),
            widest=max(min(row.top_k or ids, ids) for row in rows),
            penalty=column([row.repetition_penalty if row.method == "standard" else 1.0 for row in rows]),
            repeats=column([max(1.0, row.window * row.repeat_threshold) for row in rows]),
        )


def next_token_law(
    logits: Tensor, laws: Laws, recent: Tensor, forbidden: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Probabilities [N, V] of the next id, and [N] bool: rows that allow no id at all, whose probabilities are 0.

    `recent` [N, W] are the ids of the repetition window, with V where it has fewer; `forbidden` and `seen` [N, V] are
    True at ids that must not come and at ids that a row has generated so far (None: no row has a penalty).
    """
    scores, best, broken = heated_rows(logits, laws, forbidden, seen)
    full = scores.softmax(-1)
    nucleus = nucleus_law(scores, full, laws)
    struck_out = repeated(recent, laws, scores.shape[-1])
    law = torch.where(laws.standard, nucleus, ras_law(scores, full, best, nucleus, struck_out))
    law = torch.where(laws.temperature == 0, torch.zeros_like(law).scatter(-1, best, 1.0), law)
    return law.masked_fill(broken[:, None], 0), broken


def two_draws(
    logits: Tensor, laws: Laws, recent: Tensor, forbidden: Tensor, seen: Tensor | None, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids [N] drawn as the reference does, from two numbers [N, 2] a row; and rows [N] that allow no id at all.

    The same law as `next_token_law`: what was said too often within the window is struck out, and drawn again.
    """
    scores, best, broken = heated_rows(logits, laws, forbidden, seen)
    first = pick(nucleus_law(scores, scores.softmax(-1), laws), numbers[:, 0])[:, None]
    repeats = (recent == first).sum(-1, keepdim=True)
    rest = scores.scatter(-1, first, -math.inf)
    alone = rest.amax(-1, keepdim=True) == -math.inf  # the only legal id stays even when it repeats
    second = pick(torch.where(alone, scores, rest).softmax(-1), numbers[:, 1])[:, None]
    tokens = torch.where((repeats >= laws.repeats) & ~alone & ~laws.standard, second, first)
    return torch.where(laws.temperature == 0, best, tokens).squeeze(-1), broken


def heated_rows(logits: Tensor, laws: Laws, forbidden: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [N, V] after penalty and temperature with the best at 0, that id [N, 1], and broken rows [N]."""
    scores, broken = legal_rows(logits, forbidden)
    if seen is not None:
        scores = torch.where(seen, torch.where(scores > 0, scores / laws.penalty, scores * laws.penalty), scores)
    best = scores.argmax(-1, keepdim=True)
    heat = torch.where(laws.temperature == 0, 1.0, laws.temperature)
    return (scores - scores.gather(-1, best)) / heat, best, broken


def legal_rows(logits: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [N, V] that are finite where an id is possible, and rows [N] without any; `sampling.legal` for many.

    A broken row is given zeros, so that nothing in it spreads.
    """
    scores = logits.double().masked_fill(forbidden | logits.isnan(), -math.inf)
    endless = scores == math.inf
    limit = torch.zeros_like(scores).masked_fill(~endless, -math.inf)
    scores = torch.where(endless.any(-1, keepdim=True), limit, scores)
    broken = scores.amax(-1) == -math.inf
    return scores.masked_fill(broken[:, None], 0), broken


def nucleus_law(scores: Tensor, full: Tensor, laws: Laws) -> Tensor:
    """`full`, the softmax of scores, within the likeliest ids: top_k of them, and no more once their sum reached top_p.

    In ras top_p is a share of all ids, in standard sampling of what top_k left. Equal scores go in order of id.
    """
    ranked = scores.topk(laws.widest, sorted=True).values
    probs = (ranked - scores.logsumexp(-1, keepdim=True)).exp()
    probs = probs.masked_fill(torch.arange(laws.widest, device=probs.device) >= laws.top_k, 0)
    sums = probs.cumsum(-1)
    within = sums[:, :-1] < laws.top_p * torch.where(laws.standard, sums[:, -1:], 1.0)
    within &= probs[:, 1:] > 0
    size = 1 + within.sum(-1, keepdim=True)
    last = ranked.gather(-1, size - 1)  # of equals at the border, those with the lowest ids come in
    above, equal = scores > last, scores == last
    kept = above | (equal & (equal.cumsum(-1) <= size - above.sum(-1, keepdim=True)))
    nucleus = full.masked_fill(~kept, 0)
    return nucleus / nucleus.sum(-1, keepdim=True)


def ras_law(scores: Tensor, full: Tensor, best: Tensor, nucleus: Tensor, repeated: Tensor) -> Tensor:
    """The closed form above. The best id stands apart: it alone can have nearly all mass, where 1 - Pf is all noise."""
    struck = nucleus.masked_fill(~repeated, 0)
    after_best = scores.scatter(-1, best, -math.inf)
    alone = after_best.amax(-1, keepdim=True) == -math.inf  # the only legal id stays even when it repeats
    after_best = torch.where(alone, torch.zeros_like(full).scatter(-1, best, 1.0), after_best.softmax(-1))
    others = struck.scatter(-1, best, 0.0) / (1 - full).clamp_min(0.5)  # only the best id has more than half
    again = (others.sum(-1, keepdim=True) - others).clamp_min(0)
    return nucleus.masked_fill(repeated, 0) + full * again + struck.gather(-1, best) * after_best


def repeated(recent: Tensor, laws: Laws, ids: int) -> Tensor:
    """[N, V]: which ids occur in the window often enough to be struck out."""
    counts = torch.zeros(len(recent), ids + 1, dtype=torch.float64, device=recent.device)
    counts.scatter_add_(-1, recent, torch.ones_like(recent, dtype=torch.float64))
    return counts[:, :ids] >= laws.repeats


def pick(law: Tensor, uniform: Tensor) -> Tensor:
    """Ids [N] for numbers [N] in 0..1: where each falls when the probabilities are laid end to end. Never one at 0."""
    sums = law.cumsum(-1)
    at = uniform[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True).squeeze(-1).clamp_max(law.shape[-1] - 1)


def uniform(seed: int, position: int) -> float:
    """A number in 0..1 (1 excluded) that depends on a stream's seed and the position of its token, on nothing else.

    48 bits: times any sum of probabilities it then stays below that sum.
    """
    digest = hashlib.blake2b(struct.pack("<Qq", seed % 2**64, position), digest_size=6).digest()
    return int.from_bytes(digest, "little") * 2.0**-48


def philox(seeds: Tensor, positions: Tensor) -> Tensor:
    """Two numbers [N, 2] in 0..1 (1 excluded) for seeds and positions [N] int64, of which each depends on nothing else.

    The first two words of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the
    seed as key and the position as counter. int64 wraps, and keeps the bits that are asked for.
    """
    mask = 0xFFFFFFFF
    key_a, key_b = seeds & mask, (seeds >> 32) & mask
    a, b = positions & mask, (positions >> 32) & mask
    c = d = torch.zeros_like(a)
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = ((right >> 32) & mask) ^ b ^ key_a, right & mask, ((left >> 32) & mask) ^ d ^ key_b, left & mask
        key_a, key_b = (key_a + 0x9E3779B9) & mask, (key_b + 0xBB67AE85) & mask
    return torch.stack((a, b), dim=-1).double() * 2.0**-32
