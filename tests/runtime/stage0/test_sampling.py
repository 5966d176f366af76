"""Sampling against the reference's cases, and against rows that no model should give."""

import math
from dataclasses import replace

import pytest
import torch

from runtime.errors import GenerationError, RequestError
from runtime.stage0.sampling import candidates, check_sampling, draw, legal, ras, standard
from runtime.types import SamplingParams
from tests import golden
from tests.runtime.stage0.models import GREEDY, RAS, STANDARD

V = 6761
SEEDS = range(8)
LAWS = pytest.mark.parametrize("params", [RAS, STANDARD, GREEDY, replace(STANDARD, temperature=0)])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def only(*ids: int, at: float = 0.0) -> torch.Tensor:
    """A row in which only these ids are possible."""
    return torch.full((V,), -math.inf).index_fill(0, torch.tensor(ids), at)


def mask(*ids: int) -> torch.Tensor:
    return torch.zeros(V, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)


@pytest.mark.parametrize("case", golden.meta("ras")["cases"], ids=lambda case: case["name"])
def test_ras_matches_the_reference_for_every_seed(case):
    logits = golden.load("ras")[f"{case['name']}.logits"]
    forbidden = mask(6561) if case["ignore_eos"] else None
    for seed in SEEDS:
        assert ras(logits, case["history"], RAS, seeded(seed), forbidden) == case["expected"]


@pytest.mark.parametrize("case", golden.meta("ras")["candidate_sets"], ids=lambda case: case["name"])
def test_candidates_match_the_reference(case):
    tensors = golden.load("ras")
    ids, probs = candidates(tensors[f"{case['name']}.logits"].softmax(-1), 0.8, 25)
    assert ids.tolist() == tensors[f"{case['name']}.candidate_ids"].tolist()
    assert float(probs.sum()) == pytest.approx(case["sum_probs"], abs=1e-6)
    if case["name"] == "ties":
        torch.testing.assert_close(probs, tensors["ties.candidate_probs"], atol=1e-6, rtol=0)


def test_ras_repeats_the_references_seeded_trace():
    rows, generator, history = seeded(22), seeded(1234), []
    for _ in range(40):
        history.append(ras(5 * torch.randn(V, generator=rows), history, RAS, generator))
    assert history == golden.load("ras")["seeded_trace.tokens"].tolist()


def test_candidates_without_limits_are_everything_in_order():
    ids, probs = candidates(torch.tensor([0.2, 0.5, 0.3]), top_p=1.0, top_k=0)
    assert ids.tolist() == [1, 2, 0]
    assert probs.tolist() == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize("top_k", [1, 3, 25, 6760, 6761, 9000])
def test_candidates_equal_a_full_stable_sort(top_k):
    probs = torch.randint(0, 50, (V,), generator=seeded(3)).float()  # full of ties
    probs /= probs.sum()
    ids, ranked = candidates(probs, 1.0, top_k)
    expected = probs.sort(descending=True, stable=True)
    assert ids.tolist() == expected.indices[: len(ids)].tolist()
    assert len(ids) <= top_k
    assert torch.equal(ranked, expected.values[: len(ids)])


@LAWS
def test_row_of_nan_is_an_error_of_its_request(params):
    """Trap 1: never a uniform draw, never a crash."""
    row = torch.full((V,), math.nan)
    for forbidden in (None, mask(6561)):
        with pytest.raises(GenerationError, match="NaN for every token"):
            draw(row, [], params, seeded(0), forbidden)


@LAWS
def test_nan_ids_are_impossible_and_the_others_keep_their_law(params):
    """Traps 2 and 8: also a greedy draw is never the index of a NaN."""
    clean = 3 * torch.randn(V, generator=seeded(5))
    broken = torch.arange(0, V, 2)
    nan, minus = clean.index_fill(0, broken, math.nan), clean.index_fill(0, broken, -math.inf)
    for seed in SEEDS:
        token = draw(nan, [1, 3], params, seeded(seed))
        assert token % 2 == 1
        assert token == draw(minus, [1, 3], params, seeded(seed))


@LAWS
def test_id_at_plus_infinity_is_taken(params):
    """Trap 3: the limit of a softmax whose logit grows."""
    row = torch.randn(V, generator=seeded(6)).index_fill(0, torch.tensor([4321]), math.inf)
    row[7] = math.nan
    for seed in SEEDS:
        assert draw(row, [], params, seeded(seed)) == 4321


def test_ids_at_plus_infinity_share_and_forbidden_ones_do_not_count():
    """Trap 3, beside a mask: a forbidden +inf neither wins nor pushes the legal ids out."""
    row = torch.zeros(V).index_fill(0, torch.tensor([8, 9]), math.inf)
    assert {draw(row, [], STANDARD, seeded(seed)) for seed in range(30)} == {8, 9}
    assert draw(row, [], RAS, seeded(0), mask(8, 9)) not in (8, 9)
    assert torch.equal(legal(row, mask(8)).exp(), only(9).exp())


@pytest.mark.parametrize("token", [0, 1, 6560, 6562])
@LAWS
def test_sampler_keeps_the_only_legal_token(params, token):
    """Trap 4 without history, trap 6 with: RAS rejects the token and has nothing else."""
    for history in ([], [token], [token] * 20):
        for seed in SEEDS:
            assert draw(only(token, at=-3.0), history, params, seeded(seed)) == token


@LAWS
def test_no_legal_token_is_an_error_of_its_request(params):
    """Trap 5."""
    with pytest.raises(GenerationError, match="no token is left"):
        draw(only(4), [], params, seeded(0), mask(4))
    with pytest.raises(GenerationError, match="no token is left"):
        draw(torch.full((V,), -math.inf), [], params, seeded(0))


def test_second_draw_of_ras_never_gives_a_forbidden_id():
    """Trap 7: after 100 is rejected nearly all mass of the unmasked row would lie on the stop ids."""
    row = torch.full((V,), -5.0)
    row[100], row[6561:] = 20.0, 15.0
    stops = torch.arange(V) >= 6561
    drawn = {ras(row, [100], RAS, seeded(seed), stops) for seed in range(200)}
    assert 100 not in drawn
    assert max(drawn) < 6561
    assert ras(only(100, 6562), [100], RAS, seeded(0), mask(6562)) == 100


def test_ras_does_not_write_into_its_input():
    """Trap 6: what is kept of a score is no view of a row that changes."""
    row = 5 * torch.randn(V, generator=seeded(8))
    before = row.clone()
    ras(row, list(range(V)), RAS, seeded(0), mask(3))
    assert torch.equal(row, before)


@pytest.mark.parametrize("produced", range(10))
def test_repetition_window_counts_only_what_exists(produced):
    """Trap 15: at positions 0 to 9 the window is what was generated so far."""
    row = only(100, at=10.0).index_fill(0, torch.tensor(200), -10.0)
    assert ras(row, list(range(produced)), RAS, seeded(0)) == 100
    assert ras(row, [100, *range(produced)], RAS, seeded(0)) == 200


def test_window_of_zero_looks_at_nothing():
    row = only(100, at=10.0).index_fill(0, torch.tensor(200), -10.0)
    assert ras(row, [100] * 5, replace(RAS, window=0), seeded(0)) == 100


def test_repeat_threshold_is_a_share_of_the_window():
    row = only(100, at=10.0).index_fill(0, torch.tensor(200), -10.0)
    tolerant = replace(RAS, repeat_threshold=0.3)
    assert ras(row, [100, 100, 1], tolerant, seeded(0)) == 100
    assert ras(row, [100, 100, 100], tolerant, seeded(0)) == 200


def test_top_k_limits_standard_sampling_and_zero_does_not():
    row = torch.zeros(V)
    narrow = SamplingParams(method="standard", top_p=1.0, top_k=3)
    assert {draw(row, [], narrow, seeded(seed)) for seed in range(60)} == {0, 1, 2}
    assert len({draw(row, [], replace(narrow, top_k=0), seeded(seed)) for seed in range(60)}) > 50


def test_top_p_of_standard_sampling_is_a_share_of_what_top_k_left():
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    params = SamplingParams(method="standard", top_p=0.55, top_k=2)  # of 4/7 and 3/7 the first is enough
    assert {draw(row, [], params, seeded(seed)) for seed in range(40)} == {0}
    assert {draw(row, [], replace(params, top_p=0.6), seeded(seed)) for seed in range(40)} == {0, 1}


def test_standard_sampling_follows_the_distribution():
    probs, generator = torch.tensor([0.5, 0.3, 0.2]), seeded(9)
    params = SamplingParams(method="standard", top_p=1.0, top_k=0)
    drawn = torch.tensor([standard(probs.log(), [], params, generator) for _ in range(3000)])
    torch.testing.assert_close(drawn.bincount(minlength=3) / 3000, probs, atol=0.03, rtol=0)
    cold = torch.tensor([standard(probs.log(), [], replace(params, temperature=0.5), generator) for _ in range(3000)])
    expected = probs.square() / probs.square().sum()
    torch.testing.assert_close(cold.bincount(minlength=3) / 3000, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("row", [[2.0, 1.5], [-1.0, -1.5]])
def test_repetition_penalty_weakens_generated_tokens_once_whatever_their_sign(row):
    greedy = SamplingParams(method="standard", temperature=0, repetition_penalty=2.0)
    assert standard(torch.tensor(row), [], greedy, seeded(0)) == 0
    assert standard(torch.tensor(row), [0], greedy, seeded(0)) == 1
    assert standard(torch.tensor(row), [0, 0, 0, 1], greedy, seeded(0)) == 0


@pytest.mark.parametrize("temperature", [1e-45, 1e-6])
@pytest.mark.parametrize("method", ["ras", "standard"])
def test_smallest_temperature_is_greedy_and_not_nan(temperature, method):
    row = 3 * torch.randn(V, generator=seeded(10))
    params = SamplingParams(method=method, temperature=temperature)
    assert draw(row, [], params, seeded(0)) == row.argmax()


@pytest.mark.parametrize(
    "field",
    [
        {"method": "beam"},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"window": -1},
        {"repeat_threshold": -0.1},
    ],
    ids=str,
)
def test_meaningless_sampling_is_refused_by_name(field):
    with pytest.raises(RequestError, match=f"{next(iter(field))} is .*; it must be"):
        check_sampling(replace(RAS, **field))
