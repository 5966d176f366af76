"""The ruler itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.stages import SHAPES, compare, random_flow, solve_flop
from benchmarks.timing import Timing, measure_together, percentile, row, write_json
from runtime.stage1.solver import Piece

CPU = torch.device("cpu")


def test_arms_take_turns_there_and_back_and_warm_ups_do_not_count():
    heard: list[str] = []
    arms = {name: lambda name=name: heard.append(name) for name in "AB"}
    timings = measure_together(arms, repeats=2, warm_ups=1, device=CPU)
    assert "".join(heard) == "BA" + "AB" + "BA"
    assert {timing.repeats for timing in timings.values()} == {2}
    assert all(0 <= timing.best_ms <= timing.p50_ms <= timing.p99_ms for timing in timings.values())


@pytest.mark.parametrize(("percent", "value"), [(50, 3.0), (99, 5.0), (0, 1.0)])
def test_a_percentile_is_a_value_that_was_measured(percent, value):
    assert percentile([5.0, 1.0, 2.0, 4.0, 3.0], percent) == value


def test_a_result_says_where_it_was_measured(tmp_path: Path):
    write_json(tmp_path / "deep" / "out.json", {"repeats": 1}, CPU, [row("run", Timing(1, 2, 1, 1, 1), frames=3)])
    written = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert written["hardware"].keys() >= {"device", "threads", "torch", "load_1_min"}
    assert written["rows"][0]["frames"] == 3 and written["settings"] == {"repeats": 1}


def test_every_way_of_solving_stands_beside_its_deviation():
    tiny = replace(
        SHAPES["demo"], euler_steps=2, dit=replace(SHAPES["demo"].dit, dim=32, depth=2, heads=2, head_dim=16)
    )
    rows = compare(random_flow(tiny, CPU, torch.float32), prompt=30, tokens=60, repeats=1)
    assert [one["run"] for one in rows] == [
        *("first hop, torch", "first hop, packed", "first hop, packed, voice kept"),
        *("final, torch", "final, packed"),
    ]
    assert [one["frames"] for one in rows] == [150, 150, 100, 180, 180]
    assert all(one["relative_deviation"] < 1e-5 for one in rows)


def test_the_arithmetic_of_a_solve_follows_its_frames_and_keys():
    """The released size: 189 M products a frame and 90,112 operations a visible key, 20 times."""
    zeros = torch.zeros(80, 250)
    piece = Piece(zeros, zeros, zeros, zeros[:, 0], chunked=False)
    expected = 20 * 250 * (2 * 189.0e6 + 90_112 * 250)
    assert solve_flop(SHAPES["released"], piece) == pytest.approx(expected, rel=1e-3)
    streaming = replace(piece, chunked=True)
    assert solve_flop(SHAPES["released"], streaming) == pytest.approx(expected - 20 * 250 * 90_112 * 100, rel=1e-3)
