"""Who is solved next: on a fake clock nobody underruns and nobody starves."""

import math
import random
from dataclasses import dataclass, field

import pytest

from runtime.batching import Ready, next_group


def keys(ready: list[Ready[str]], limit: int, soon: float = math.inf) -> list[str]:
    return [one.key for one in next_group(ready, limit, soon)]


def test_the_earliest_due_goes_first():
    ready = [Ready("plays", 9.0, 100), Ready("new", 5.0, 100), Ready("runs out", 4.0, 100)]
    assert keys(ready, 1) == ["runs out"]
    assert keys(ready, 200) == ["runs out", "new"]
    assert keys(ready, 1000) == ["runs out", "new", "plays"]


def test_equally_urgent_chunks_keep_their_order():
    assert keys([Ready(name, 1.0, 10) for name in "abc"], 20) == ["a", "b"]


def test_a_runaway_is_solved_alone_and_keeps_nobody_from_filling_a_group():
    """Trap 47."""
    ready = [Ready("short", 1.0, 250), Ready("runaway", 2.0, 4300), Ready("also short", 3.0, 250)]
    assert keys(ready, 1000) == ["short", "also short"]
    assert keys(ready[1:], 1000) == ["runaway"]


def test_a_first_chunk_waits_for_none_that_can_wait():
    ready = [Ready("new", 1.0, 80, is_first=True), Ready("runs out", 3.0, 400), Ready("plays", 9.0, 400)]
    ready += [Ready("newer", 2.0, 80, is_first=True)]
    assert keys(ready, 1000, soon=4.0) == ["new", "newer", "runs out"]
    assert keys(ready, 1000, soon=0.0) == ["new", "newer"]
    assert keys(ready[1:], 1000, soon=0.0) == ["newer"]


def test_beside_one_that_runs_out_first_chunks_and_others_fill_the_group():
    ready = [Ready("ran out", 1.0, 400), Ready("new", 2.0, 80, is_first=True), Ready("plays", 9.0, 400)]
    assert keys(ready, 1000, soon=0.0) == ["ran out", "new", "plays"]


def test_nothing_ready_is_an_empty_group():
    assert next_group([], 100) == []


@dataclass
class Playback:
    """A stream of chunks, each with its frames and the seconds it sounds."""

    asked_at: float
    chunks: list[tuple[int, float]]
    ahead: float = math.inf  # seconds of sound in hand beyond which its consumer does not read
    due: float = 0.0
    heard_at: float | None = None
    waits: list[float] = field(default_factory=list)  # how late each chunk was; below 0 it was in time

    def __post_init__(self) -> None:
        self.due = self.asked_at


def play(
    streams: list[Playback], limit: int, solve_seconds: float, seconds_per_frame: float, *, mixed: bool = False
) -> None:
    """Runs one worker over all of them on a fake clock. `mixed` lets first chunks wait for what could wait."""
    taken = 0.0
    now, live, to_come = 0.0, [], sorted(streams, key=lambda stream: -stream.asked_at)
    while live or to_come:
        while to_come and to_come[-1].asked_at <= now:
            live.append(to_come.pop())
        live = [stream for stream in live if stream.chunks]
        ready = [
            Ready(one, one.due, one.chunks[0][0], one.heard_at is None) for one in live if one.due - one.ahead <= now
        ]
        if not ready:
            begins = [stream.due - stream.ahead for stream in live] + [stream.asked_at for stream in to_come[-1:]]
            now = min(begins, default=now)
            continue
        group = next_group(ready, limit, math.inf if mixed else now + 2 * taken)
        taken = solve_seconds + seconds_per_frame * sum(one.frames for one in group)
        now += taken
        for stream in (one.key for one in group):
            _, seconds = stream.chunks.pop(0)
            stream.waits.append(now - stream.due)
            stream.due = (now if stream.heard_at is None else max(now, stream.due)) + seconds
            stream.heard_at = now if stream.heard_at is None else stream.heard_at


def speech(asked_at: float, later: int = 3) -> Playback:
    return Playback(asked_at, [(250, 1.36), *[(400, 2.0)] * later])


@pytest.mark.parametrize("seed", range(5))
def test_at_a_load_that_can_be_served_no_stream_underruns(seed: int):
    """4 new streams a second at a quarter of what the card can do, then a burst of 16."""
    draw = random.Random(seed)
    streams = [speech(draw.uniform(0, 20)) for _ in range(80)] + [speech(10.0) for _ in range(16)]
    play(streams, 4000, solve_seconds=0.01, seconds_per_frame=4e-5)
    late = [wait for stream in streams for wait in stream.waits[1:]]
    assert max(late) <= 0
    assert max(stream.waits[0] for stream in streams) < 0.5


@pytest.mark.parametrize("seed", range(3))
def test_first_chunks_by_themselves_are_heard_sooner_and_nobody_underruns(seed: int):
    """43 requests a second at a card that solves a full group of 8,192 frames in 0.2 s."""

    def first_p50(mixed: bool) -> float:
        draw = random.Random(seed)
        streams = [Playback(draw.uniform(0, 15), [(80, 1.36), (100, 2.0), (424, 1.6)]) for _ in range(640)]
        play(streams, 8192, solve_seconds=0.01, seconds_per_frame=24.5e-6, mixed=mixed)
        assert max(wait for stream in streams for wait in stream.waits[1:]) <= 0
        return sorted(stream.waits[0] for stream in streams)[320]

    assert first_p50(mixed=False) < 0.8 * first_p50(mixed=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_runaway_among_short_requests_hardly_delays_them(seed: int):
    """Trap 47: 2,048 tokens in hops of 100, each solved from the start, read as they are played, four hops ahead."""
    draw = random.Random(seed)
    at = [draw.uniform(0, 90) for _ in range(2700)]
    runaway = Playback(5.0, [(250, 1.36), *[(250 + 200 * n, 4.0) for n in range(1, 21)]], ahead=16.0)

    def p99(extra: list[Playback]) -> float:
        short = [speech(asked_at, later=1) for asked_at in at]
        play([*short, *extra], 8192, solve_seconds=0.01, seconds_per_frame=1.7e-5)
        return sorted(stream.waits[0] for stream in short)[2673]

    assert p99([runaway]) <= 1.5 * p99([])


def test_a_flood_of_new_streams_does_not_starve_one_that_plays():
    """Trap 73: what comes after its sound ran out stands behind it."""
    old = speech(0.0)
    flood = [speech(0.5 + 0.01 * n, later=0) for n in range(1000)]
    play([old, *flood], 1, solve_seconds=0.02, seconds_per_frame=0.0)
    assert max(old.waits[1:]) < 0.1 + 0.02 * sum(stream.asked_at < old.waits[0] + 1.36 for stream in flood)
    assert not old.chunks


def test_streams_that_play_do_not_starve_a_new_one():
    """Trap 73, the reverse: it stands before all that still have sound in hand."""
    old = [speech(0.0, later=50) for _ in range(100)]
    new = speech(3.0)
    play([*old, new], 1, solve_seconds=0.015, seconds_per_frame=0.0)
    assert new.waits[0] < 0.05 + max(wait for stream in old for wait in stream.waits)
