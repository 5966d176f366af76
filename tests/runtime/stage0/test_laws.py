"""The laws written out, against the sampler that draws one row at a time, and against rows no model should give."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.errors import GenerationError
from runtime.stage0.laws import Laws, next_token_law, philox, pick, two_draws, uniform
from runtime.stage0.sampling import candidates, draw
from runtime.types import SamplingParams
from tests import golden
from tests.runtime.stage0.models import GREEDY, RAS, STANDARD

V = 6761
SMALL = 12  # ids of the chi-square rows


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def law_of(
    rows: Tensor,
    params: SamplingParams | list[SamplingParams],
    history: list[list[int]],
    forbidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Probabilities of rows [N, V] for histories of any length."""
    many = params if isinstance(params, list) else [params] * len(rows)
    ids = rows.shape[-1]
    windows = [past[max(0, len(past) - one.window) :] for past, one in zip(history, many, strict=True)]
    width = max(1, *map(len, windows))
    recent = torch.tensor([past + [ids] * (width - len(past)) for past in windows])
    seen = torch.zeros(rows.shape, dtype=torch.bool)
    for row, past in enumerate(history):
        seen[row, past] = True
    if forbidden is None:
        forbidden = torch.zeros(rows.shape, dtype=torch.bool)
    return next_token_law(rows, Laws.of(many, ids, rows.device), recent, forbidden, seen)


def one_law(
    row: Tensor, params: SamplingParams, history: Sequence[int] = (), forbidden: Tensor | None = None
) -> Tensor:
    law, broken = law_of(row[None], params, [list(history)], None if forbidden is None else forbidden[None])
    assert not broken.any()
    return law[0]


def only(*ids: int, at: float = 0.0) -> Tensor:
    return torch.full((V,), -math.inf).index_fill(0, torch.tensor(ids), at)


def mask(*ids: int, size: int = V) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill(0, torch.tensor(ids, dtype=torch.long), True)


def reference_draws(row: Tensor, history: list[int], params: SamplingParams, draws: int, forbidden: Tensor) -> Tensor:
    """The reference's two draws (spec 3.4), step by step over a million rows: counts [V]."""
    probs = row.double().masked_fill(forbidden, -math.inf).softmax(-1)
    order = probs.argsort(descending=True, stable=True).tolist()
    candidates: list[int] = []
    taken = 0.0
    for token in order:
        if taken >= params.top_p or len(candidates) == params.top_k:
            break
        candidates.append(token)
        taken += float(probs[token])
    generator = seeded(77)
    first = torch.multinomial(probs[candidates], draws, replacement=True, generator=generator)
    drawn = torch.tensor(candidates)[first]
    tokens = drawn.clone()
    window = history[max(0, len(history) - params.window) :]
    for token in set(window):
        struck = drawn == token
        if window.count(token) >= params.window * params.repeat_threshold and struck.any():
            rest = probs.index_fill(0, torch.tensor(token), 0.0)
            if rest.sum() > 0:
                tokens[struck] = torch.multinomial(rest, int(struck.sum()), replacement=True, generator=generator)
    return tokens.bincount(minlength=len(row))


def chi_square(counts: Tensor, law: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells expected fewer than 10 times are put together."""
    expected = law * counts.sum()
    small = expected < 10
    assert not counts[law == 0].any(), "an id without probability was drawn"
    observed = torch.cat((counts[~small].double(), counts[small].sum()[None].double()))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    kept = expected > 5
    return float(((observed - expected).square() / expected)[kept].sum()), int(kept.sum()) - 1


HISTORIES = {
    "nothing said yet": [],
    "nothing repeated": [11],
    "best repeated": [0],
    "two of the nucleus repeated": [0, 2, 11, 0],
    "whole nucleus repeated": [0, 1, 2, 3, 4],
    "repeated, but long ago": [0, *range(1, 11)],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("sharp", [0.7, 2.0, 6.0])
def test_closed_form_is_the_law_of_the_references_two_draws(history, sharp):
    """A million draws of the reference loop; bound at five standard deviations, so that only a wrong law fails."""
    row = sharp * torch.linspace(2, -2, SMALL)
    forbidden = mask(5, size=SMALL)
    statistic, freedom = chi_square(
        reference_draws(row, history, RAS, 1_000_000, forbidden), one_law(row, RAS, history, forbidden)
    )
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)), (statistic, freedom)


def test_chi_square_notices_a_wrong_law():
    """The same test with the window forgotten, and with the struck id left in the second draw."""
    row, none = torch.linspace(2, -2, SMALL), torch.zeros(SMALL, dtype=torch.bool)
    counts = reference_draws(row, [0], RAS, 1_000_000, none)
    right = one_law(row, RAS, [0])
    nucleus, full = one_law(row, RAS), row.double().softmax(-1)
    kept_in = nucleus.index_fill(0, torch.tensor(0), 0) + nucleus[0] * full
    statistics = [chi_square(counts, law)[0] for law in (right, nucleus.clamp_min(1e-9), kept_in)]
    assert statistics[0] < 40 < 1000 < min(statistics[1:])


@pytest.mark.parametrize(
    "params", [RAS, STANDARD, replace(STANDARD, top_k=4, top_p=0.5), replace(RAS, temperature=0.6)]
)
def test_law_is_that_of_the_sampler_which_draws_one_row(params):
    row, history = 2 * torch.randn(SMALL, generator=seeded(4)), [3, 3, 7]
    generator = seeded(5)
    counts = torch.tensor([draw(row, history, params, generator) for _ in range(5_000)]).bincount(minlength=SMALL)
    statistic, freedom = chi_square(counts, one_law(row, params, history))
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)), (statistic, freedom)


@pytest.mark.parametrize("history", [[], [0, 2, 11, 0], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("params", [RAS, replace(STANDARD, top_k=6), replace(RAS, window=4, repeat_threshold=0.5)])
def test_two_draws_of_many_rows_have_the_written_law(params, history):
    """Rows with the same scores, each with a seed of its own; a million of them on a GPU in test_captured.py."""
    row, rows = torch.linspace(2, -2, SMALL), 100_000
    window = history[max(0, len(history) - params.window) :]
    recent = torch.tensor([window + [SMALL] * (10 - len(window))])
    forbidden, seen = mask(5, size=SMALL)[None], mask(*history, size=SMALL)[None]
    numbers = philox(torch.arange(rows) * 7919 + 13, torch.full((rows,), len(history)))
    laws = Laws.of([params], SMALL, row.device)
    tokens, broken = two_draws(row.expand(rows, SMALL), laws, recent, forbidden, seen, numbers)
    assert not broken.any()
    law = one_law(row, params, history, forbidden[0])
    statistic, freedom = chi_square(tokens.bincount(minlength=SMALL), law)
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)), (statistic, freedom)


@pytest.mark.parametrize("case", golden.meta("ras")["cases"], ids=lambda case: case["name"])
def test_certain_cases_of_the_reference_are_certain(case):
    row = golden.load("ras")[f"{case['name']}.logits"]
    law = one_law(row, RAS, case["history"], mask(6561) if case["ignore_eos"] else None)
    assert law[case["expected"]] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("case", golden.meta("ras")["candidate_sets"], ids=lambda case: case["name"])
def test_nucleus_is_the_references(case):
    tensors = golden.load("ras")
    law = one_law(tensors[f"{case['name']}.logits"], RAS)
    assert law.nonzero().squeeze(1).tolist() == sorted(tensors[f"{case['name']}.candidate_ids"].tolist())


@pytest.mark.parametrize("top_k", [1, 3, 25, 6760, 0])
@pytest.mark.parametrize("top_p", [0.02, 0.8, 1.0])
def test_equal_scores_come_in_by_order_of_id(top_k, top_p):
    """Half precision gives many equal logits; which of them fill the last places is the sampler's choice too."""
    row = torch.randint(0, 8, (V,), generator=seeded(3)).float() / 4
    ids, probs = candidates(row.double().softmax(-1), top_p, top_k)
    law = one_law(row, replace(RAS, top_k=top_k, top_p=top_p))
    assert law.nonzero().squeeze(1).tolist() == ids.sort().values.tolist()
    torch.testing.assert_close(law[ids], probs / probs.sum())


@pytest.mark.parametrize("token", [0, 1, 6560, 6562])
@pytest.mark.parametrize("params", [RAS, STANDARD, GREEDY])
def test_only_legal_token_is_kept_however_often_it_repeats(params, token):
    """Traps 4 and 6."""
    for history in ([], [token], [token] * 20):
        law = one_law(only(token, at=-3.0), params, history)
        assert law[token] == 1
        assert law.sum() == 1


@pytest.mark.parametrize("gap", [5.0, 30.0, 40.0, 100.0, 700.0])
def test_struck_token_gives_way_even_when_it_had_all_mass(gap):
    """Pf(w) rounds to 1 from a gap of about 37 on, yet what remains has its own law."""
    row = only(200, 300).index_fill(0, torch.tensor(100), gap)
    law = one_law(row, RAS, [100])
    assert law[100] == 0
    assert law[[200, 300]].tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("params", [RAS, STANDARD])
def test_forbidden_ids_have_no_probability_and_are_never_picked(params):
    """Trap 7: also not after a repeated id was struck out, and not by the numbers at the ends."""
    row = torch.full((V,), -5.0)
    row[100], row[6561:] = 20.0, 15.0
    stops = torch.arange(V) >= 6561
    law = one_law(row, params, [100], stops)
    assert not law[stops].any()
    edges = torch.tensor([0.0, 0.5, 1 - 2.0**-48], dtype=torch.float64)
    assert (pick(law.expand(3, V), edges) < 6561).all()


def test_broken_rows_are_named_and_their_neighbours_untouched():
    """Traps 1, 2, 3, 5 and 43."""
    clean = 3 * torch.randn(V, generator=seeded(5))
    rows = torch.stack((clean, torch.full((V,), math.nan), clean, torch.full((V,), -math.inf), clean, clean))
    rows[4, ::2] = math.nan
    rows[5, 4321] = math.inf
    for params in (RAS, STANDARD, GREEDY):
        law, broken = law_of(rows, params, [[1, 3]] * 6)
        assert broken.tolist() == [False, True, False, True, False, False]
        assert not law[broken].any()
        assert torch.equal(law[0], one_law(clean, params, [1, 3]))
        assert torch.equal(law[2], law[0])
        holes = clean.index_fill(0, torch.arange(0, V, 2), -math.inf)
        assert torch.equal(law[4], one_law(holes, params, [1, 3]))
        assert law[5, 4321] == 1
    for row in rows[broken]:
        with pytest.raises(GenerationError):
            draw(row, [], RAS, seeded(0))


def test_rows_of_different_laws_do_not_mix():
    rows = 2 * torch.randn(5, 300, generator=seeded(6))
    params = [RAS, STANDARD, GREEDY, replace(RAS, temperature=0.5, window=2), replace(STANDARD, top_k=0, top_p=1.0)]
    history = [[1, 2], [4, 4, 9], [], list(range(20)), [7]]
    law, _ = law_of(rows, params, history)
    for index in range(5):
        assert torch.allclose(law[index], one_law(rows[index], params[index], history[index]), atol=1e-15)
        assert law[index].sum() == pytest.approx(1)
    assert law[2, rows[2].argmax()] == 1


def test_pick_lays_probabilities_end_to_end():
    law = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    numbers = torch.tensor([0.0, 0.2, 0.25, 0.5, 0.74, 0.75, 0.999, 1 - 2.0**-48], dtype=torch.float64)
    assert pick(law.expand(8, 6), numbers).tolist() == [1, 1, 3, 3, 3, 4, 4, 4]


def test_numbers_depend_on_seed_and_position_alone_and_fill_the_interval():
    numbers = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert numbers == [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert len(set(numbers)) == 4000
    assert min(numbers) >= 0 and max(numbers) < 1
    counts = torch.histc(torch.tensor(numbers), 20, 0, 1)
    assert chi_square(counts.long(), torch.full((20,), 1 / 20))[0] < 19 + 5 * math.sqrt(38)
    assert uniform(2**64 - 1, 0) != uniform(0, 0) == uniform(2**64, 0)


def test_philox_gives_the_published_words():
    """Known answers of the authors' test vectors for Philox 4x32-10; the seed is the key, the position the counter."""
    zero = torch.tensor([0])
    words = philox(zero, zero)[0] * 2.0**32
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D]
    assert (philox(~zero, ~zero) < 1).all()


def test_philox_depends_on_seed_and_position_alone_and_fills_the_interval():
    seeds, positions = torch.arange(40).repeat_interleave(100), torch.arange(100).repeat(40)
    numbers = philox(seeds, positions)
    assert torch.equal(numbers[1234], philox(seeds[1234:1235], positions[1234:1235])[0])
    assert len(numbers.flatten().unique()) == 8000
    for column in numbers.T:
        counts = torch.histc(column.float(), 20, 0, 1)
        assert chi_square(counts.long(), torch.full((20,), 1 / 20))[0] < 19 + 5 * math.sqrt(38)
