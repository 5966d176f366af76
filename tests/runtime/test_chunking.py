"""Cuts and silence between the stages."""

from itertools import pairwise
from typing import get_args

import pytest

from runtime.chunking import ChunkSchedule, Cut, HopPlan, SilenceThinner
from runtime.config import RELEASED_SILENT_TOKENS
from runtime.errors import RequestError
from tests import golden


def cuts(schedule: ChunkSchedule, total: int, arriving: int = 1) -> list[Cut]:
    """All cuts of a segment whose tokens come `arriving` at a time."""
    found = []
    for available in [*range(0, total, arriving), total]:
        while cut := schedule.next(available, finished=available == total):
            found.append(cut)
    return found


def test_thinning_equals_the_official_filter():
    case = golden.meta("stream")["cases"]["silent_thinning"]
    thinner = SilenceThinner(RELEASED_SILENT_TOKENS)
    assert set(case["silent_tokens"]) == RELEASED_SILENT_TOKENS
    assert [token for token in case["in"] if thinner.keeps(token)] == case["out"]


def test_cuts_equal_the_official_loop():
    # 120 tokens after a prompt of 30: 39360, 48000, 27840 samples
    assert cuts(ChunkSchedule(30), 120) == [Cut(48, False), Cut(98, False), Cut(120, True)]


@pytest.mark.parametrize("arriving", [1, 2, 7, 1000])
@pytest.mark.parametrize("hops", get_args(HopPlan))
def test_cuts_do_not_depend_on_when_tokens_come(hops, arriving):
    for total in (40, 137, 144, 700):
        expected = cuts(ChunkSchedule(87, hops=hops), total, total)
        assert cuts(ChunkSchedule(87, hops=hops), total, arriving) == expected


def test_throughput_takes_the_first_hop_and_then_everything():
    # 5 s after a prompt of 87: two solves, where the official loop takes three
    assert cuts(ChunkSchedule(87, hops="throughput"), 125) == [Cut(41, False), Cut(125, True)]
    assert cuts(ChunkSchedule(87), 125) == [Cut(41, False), Cut(91, False), Cut(125, True)]


def test_throughput_hops_again_past_its_cap():
    """A long text does not make its listener wait for all of it."""
    ends = [cut.tokens for cut in cuts(ChunkSchedule(87, hops="throughput"), 300)]
    assert ends == [38 + 3, 138 + 3, 238 + 3, 300]
    ends = [cut.tokens for cut in cuts(ChunkSchedule(0, hops="throughput", cap_tokens=50), 150)]
    assert ends == [25 + 3, 75 + 3, 125 + 3, 150]


def test_both_plans_begin_with_the_same_hop():
    for prompt in range(60):
        first, other = (ChunkSchedule(prompt, hops=hops).next(60, False) for hops in get_args(HopPlan))
        assert first == other


@pytest.mark.parametrize(("prompt", "first"), [(0, 25), (1, 49), (24, 26), (25, 25), (26, 49), (87, 38)])
def test_first_hop_fills_the_grid_of_the_prompt(prompt, first):
    """Trap 35."""
    emitted = [cut.tokens - 3 for cut in cuts(ChunkSchedule(prompt), 500) if not cut.is_last]
    assert emitted[0] == first
    assert all((prompt + end) % 25 == 0 for end in emitted)


@pytest.mark.parametrize("total", [0, 1, 2, 3, 27])
def test_a_text_shorter_than_one_hop_is_one_final_chunk(total):
    """Trap 35."""
    assert cuts(ChunkSchedule(0), total) == [Cut(total, True)]


def test_a_chunk_that_can_be_filled_is_streamed_even_after_the_end():
    assert ChunkSchedule(0).next(28, finished=True) == Cut(28, False)


def test_hops_grow_to_a_hundred_and_every_stream_starts_small_again():
    """Trap 36."""
    for _ in range(2):
        ends = [0] + [cut.tokens - 3 for cut in cuts(ChunkSchedule(0), 600) if not cut.is_last]
        assert [b - a for a, b in pairwise(ends)] == [25, 50, 100, 100, 100, 100, 100]


def test_without_streaming_everything_is_one_chunk():
    assert cuts(ChunkSchedule(30, streaming=False), 120) == [Cut(120, True)]


def test_a_hop_off_the_grid_is_refused():
    """Trap 34."""
    with pytest.raises(RequestError, match="multiple of 25"):
        ChunkSchedule(0, first_hop=15)
    with pytest.raises(RequestError, match="multiple of 25"):
        ChunkSchedule(0, hops="throughput", cap_tokens=110)


def test_another_hop_is_expected_where_the_plan_makes_it_likely():
    growing, two_goes = ChunkSchedule(0), ChunkSchedule(0, hops="throughput")
    for schedule, expected in ((growing, [True, True]), (two_goes, [False, True])):
        expects = []
        for available in (28, 128):
            assert schedule.next(available, finished=False)
            expects.append(schedule.hops_again)
        assert expects == expected


def test_an_urgent_stream_takes_what_there_is_by_whole_steps_of_the_grid():
    schedule = ChunkSchedule(87, hops="throughput")
    assert schedule.next(41, False) == Cut(41, False)
    assert schedule.next(65, False, is_urgent=True) is None  # one token short of a step and the look-ahead
    assert schedule.next(119, False) is None
    assert schedule.next(119, False, is_urgent=True) == Cut(113 + 3, False, is_extra=True)
    assert schedule.hops_again
    assert schedule.next(125, True, is_urgent=True) == Cut(125, True)


def test_the_first_hop_is_never_cut_short():
    schedule = ChunkSchedule(87)
    assert schedule.next(40, False, is_urgent=True) is None


def test_a_hop_that_comes_in_time_is_not_an_extra_one():
    schedule = ChunkSchedule(0)
    assert schedule.next(28, False, is_urgent=True) == Cut(28, False)
    assert schedule.next(78, False, is_urgent=True) == Cut(78, False)
