"""Draws the next token from one row of logits: repetition-aware (spec 3.4) or standard sampling.

Pure functions on one CPU row [V] in float32; randomness comes from the generator alone. What a broken row means is
settled in `legal`: NaN is impossible, an id at +inf takes everything, and a row without any possible id is an error of
its request, never a uniform draw.
"""

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from runtime.errors import GenerationError, RequestError
from runtime.types import SamplingParams


def draw(
    logits: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    generator: Generator,
    forbidden: Tensor | None = None,
) -> int:
    """Next id by the law that `params` names. `history` is what this stream generated, its prompt not included."""
    law = ras if params.method == "ras" else standard
    return law(logits, history, params, generator, forbidden)


def ras(
    scores: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    generator: Generator,
    forbidden: Tensor | None = None,
) -> int:
    """Repetition-aware draw from scores [V] (logits or log-probabilities); temperature 0 is greedy.

    A candidate from the nucleus that occurs too often in the last `window` generated tokens is struck out and the draw
    repeated over everything else, without top-p and top-k.
    """
    scores = legal(scores, forbidden)
    if params.temperature == 0:
        return int(scores.argmax())
    scores = heated(scores, params.temperature)
    ids, probs = candidates(scores.softmax(-1), params.top_p, params.top_k)
    token = int(ids[_pick(probs, generator)])
    repeats = history[max(0, len(history) - params.window) :].count(token)
    if not repeats or repeats < params.window * params.repeat_threshold:
        return token
    rest = scores.index_fill(0, torch.tensor(token), -math.inf)
    if rest.max() == -math.inf:  # the repeated id is the only legal one
        return token
    return _pick(rest.softmax(-1), generator)


def standard(
    logits: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    generator: Generator,
    forbidden: Tensor | None = None,
) -> int:
    """Repetition penalty, temperature (0 is greedy), top-k, then top-p within what top-k left."""
    scores = legal(logits, forbidden)
    if params.repetition_penalty != 1 and history:
        seen = torch.tensor(sorted(set(history)))
        penalised = scores[seen]
        less = torch.where(penalised > 0, penalised / params.repetition_penalty, penalised * params.repetition_penalty)
        scores = scores.index_copy(0, seen, less)
    if params.temperature == 0:
        return int(scores.argmax())
    ids, probs = candidates(heated(scores, params.temperature).softmax(-1), 1.0, params.top_k)
    kept = nucleus_size(probs / probs.sum(), params.top_p)
    return int(ids[_pick(probs[:kept], generator)])


def legal(logits: Tensor, forbidden: Tensor | None = None) -> Tensor:
    """Scores [V] in which an id is possible if and only if its score is finite; at least one is.

    `forbidden` [V] is True at ids that must not be drawn. NaN becomes -inf. Ids at +inf, the limit of a softmax with a
    growing logit, share the probability among themselves. Raises GenerationError when nothing is left.
    """
    scores = logits if forbidden is None else logits.masked_fill(forbidden, -math.inf)
    if math.isfinite(scores.max()):  # max hands NaN on, so this one pass clears nearly every row
        return scores
    if logits.isnan().all():
        raise GenerationError("the language model gave NaN for every token; a wider lm_precision may help")
    scores = scores.masked_fill(scores.isnan(), -math.inf)
    endless = scores == math.inf
    if endless.any():
        return torch.zeros_like(scores).masked_fill(~endless, -math.inf)
    if scores.max() == -math.inf:
        raise GenerationError("no token is left to draw: every id is NaN, -inf or forbidden at this step")
    return scores


def heated(scores: Tensor, temperature: float) -> Tensor:
    """Scores over temperature; moved so that the best is 0, and no temperature overflows it."""
    return scores if temperature == 1 else (scores - scores.max()) / temperature


def candidates(probs: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """The likeliest ids of probs [V] with their probabilities, not renormalised; equal ones in order of id.

    At most `top_k` (0 is no limit), and no more once their sum has reached `top_p`; the first is always in.
    """
    if 0 < top_k < len(probs):  # a threshold first: sorting a few ids is cheaper than sorting all
        ids = (probs >= probs.topk(top_k, sorted=False).values.min()).nonzero().squeeze(1)
        ranked, order = probs[ids].sort(descending=True, stable=True)
        ranked, ids = ranked[:top_k], ids[order]
    else:
        ranked, ids = probs.sort(descending=True, stable=True)
    size = nucleus_size(ranked, top_p)
    return ids[:size], ranked[:size]


def nucleus_size(ranked: Tensor, top_p: float) -> int:
    """How many of the falling probabilities are taken while the sum of those before is below `top_p`; at least 1."""
    return 1 + int((ranked.cumsum(0)[:-1] < top_p).sum())


def check_sampling(params: SamplingParams) -> None:
    """Raises RequestError that names the first parameter without a meaning."""
    rules = (
        ("method", params.method, params.method in ("ras", "standard"), "ras or standard"),
        ("temperature", params.temperature, 0 <= params.temperature < math.inf, "0 (greedy) or more"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("top_k", params.top_k, params.top_k >= 0, "0 (no limit) or more"),
        ("repetition_penalty", params.repetition_penalty, 0 < params.repetition_penalty < math.inf, "above 0"),
        ("window", params.window, params.window >= 0, "0 or more"),
        ("repeat_threshold", params.repeat_threshold, params.repeat_threshold >= 0, "0 or more"),
    )
    for name, value, valid, allowed in rules:
        if not valid:
            raise RequestError(f"{name} is {value!r}; it must be {allowed}")


def _pick(weights: Tensor, generator: Generator) -> int:
    return int(torch.multinomial(weights, 1, replacement=True, generator=generator))
