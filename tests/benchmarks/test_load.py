"""The load of the benchmarks: seeded work, clients that listen to the end, and what counts as an underrun."""

import pytest

from benchmarks.load import (
    Heard,
    closed_loop,
    mixed_tokens,
    open_loop,
    open_pipeline,
    random_checkpoint,
    speech,
    voice,
)
from benchmarks.throughput import figures
from runtime import EngineSettings


def test_an_underrun_is_a_moment_without_sound():
    """One second plays from 1.0 on; the second chunk comes 0.3 s too late, the third in time."""
    heard = Heard(0.5, [(1.0, 1.0), (2.3, 1.0), (3.0, 1.0)])
    assert heard.first == 0.5
    assert heard.seconds == 3.0
    assert heard.underruns(0.0) == 1
    assert heard.underruns(0.4) == 0


def test_answers_are_the_same_list_each_time_with_a_mean_near_five_seconds_and_some_long_ones():
    tokens = mixed_tokens(2000, 0)
    assert tokens == mixed_tokens(2000, 0) != mixed_tokens(2000, 1)
    short = [count for index, count in enumerate(tokens) if index % 20 != 19]
    assert sum(short) / len(short) / 25 == pytest.approx(5, abs=0.3)
    assert all(20 * 25 <= count <= 30 * 25 for count in tokens[19::20])


@pytest.fixture(scope="module")
def pipeline():
    checkpoint = random_checkpoint("tiny")
    settings = EngineSettings(device="cpu", profile="throughput", max_waiting=64)
    pipeline, _ = open_pipeline(checkpoint, settings)
    with pipeline:
        yield pipeline, checkpoint.config


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_every_client_hears_all_of_an_answer_of_forced_length(pipeline, loop):
    engine, config = pipeline
    voices = [voice(config, 30, seed) for seed in range(2)]
    speeches = [speech(config, voices[seed % 2], 40 + seed, seed) for seed in range(4)]
    if loop == "closed":
        heard = closed_loop(engine, speeches, clients=2, seconds=60)
    else:
        heard = open_loop(engine, speeches, rate=1000, seconds=60)
    assert [one.error for one in heard] == [""] * 4
    # Five of a run of silent tokens are kept, so that noise may lose one or two of its tokens.
    assert sum(one.seconds for one in heard) == pytest.approx((40 + 41 + 42 + 43) / 25, abs=0.1)
    told = figures(heard, wall=1.0)
    assert (told["requests"], told["failed"]) == (4, 0)


def test_a_failed_request_is_counted_and_not_averaged():
    told = figures([Heard(0.0, [(1.0, 2.0)], 1.5), Heard(0.0, [], 1.0, "Overloaded()")], wall=2.0)
    assert (told["requests"], told["failed"], told["audio_s_per_s"]) == (2, 1, 1.0)
