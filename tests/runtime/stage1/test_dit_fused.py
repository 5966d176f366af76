"""The GPU's solver against the packed one in float32, with and without graphs."""

import dataclasses
import logging
import random

import pytest
import torch
from torch import Tensor

from runtime.settings import EngineSettings
from runtime.stage1.base import build_solver
from runtime.stage1.conditioning import Flow
from runtime.stage1.dit_packed import PackedSolver
from runtime.stage1.graphs import CudaCapture, GraphTable
from runtime.stage1.packing import ladder
from runtime.stage1.past import Past
from runtime.stage1.solver import Piece
from tests.runtime.stage1 import test_dit_packed as packed_tests
from tests.runtime.stage1.test_dit_packed import after, ending, mels, worst
from tests.runtime.stage1.tiny_flow import tiny_flow

pytestmark = pytest.mark.cuda
GPU = torch.device("cuda")
STEPS, RATE = 3, 0.7
LENGTHS = (1, 49, 50, 51, 99)


def on_gpu(dtype: torch.dtype = torch.float32) -> Flow:
    flow = tiny_flow().to(GPU)
    for weight in flow.estimator.parameters():
        weight.data = weight.data.to(dtype)
    return flow


def fused(dtype: torch.dtype = torch.float32):
    from runtime.stage1.dit_fused import FusedSolver

    return FusedSolver(on_gpu(dtype).estimator, STEPS, RATE)


@pytest.fixture(scope="module")
def solver():
    return fused()


@pytest.fixture(scope="module")
def half():
    return fused(torch.bfloat16)


@pytest.fixture(scope="module")
def truth() -> PackedSolver:
    return PackedSolver(on_gpu().estimator, STEPS, RATE)


def piece(frames: int, chunked: bool = True, seed: int = 0) -> Piece:
    one = packed_tests.piece(frames, chunked, seed)
    moved = {name: getattr(one, name).to(GPU) for name in ("noise", "mu", "cond", "speaker")}
    return dataclasses.replace(one, **moved)


def snr(found: Tensor, expected: Tensor) -> float:
    return float(10 * torch.log10(expected.square().mean() / (found - expected).square().mean()))


@pytest.mark.parametrize("chunked", [False, True])
def test_ragged_pieces_equal_the_packed_solve(solver, truth, chunked):
    pieces = [piece(frames, chunked) for frames in LENGTHS]
    assert worst(mels(solver, pieces), mels(truth, pieces)) < 1e-4
    assert worst(mels(solver, pieces[::-1]), mels(truth, pieces)[::-1]) < 1e-4


def test_sixty_four_mixed_pieces_in_any_order(solver, half, truth):
    draw = random.Random(3)
    pieces = [piece(draw.choice((*LENGTHS, 250)), draw.random() < 0.5, seed) for seed in range(64)]
    order = draw.sample(range(64), 64)
    expected = mels(truth, pieces)
    assert worst(mels(solver, pieces), expected) < 1e-4
    assert worst(mels(solver, [pieces[i] for i in order]), [expected[i] for i in order]) < 1e-4
    for found, other in zip(mels(half, pieces), expected, strict=True):
        assert snr(found, other) >= 30


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_what_a_neighbour_holds_stays_with_it(solver, half, poison):
    """Trap 43, also in the frames that fill up a graph."""
    pieces = [piece(frames) for frames in (51, 30, 99)]
    broken = {name: torch.full_like(getattr(pieces[1], name), poison) for name in ("noise", "mu", "cond", "speaker")}
    for one in (solver, half):
        clean = mels(one, pieces)
        poisoned = mels(one, [pieces[0], dataclasses.replace(pieces[1], **broken), pieces[2]])
        assert torch.equal(poisoned[0], clean[0]) and torch.equal(poisoned[2], clean[2])
        assert not torch.isfinite(poisoned[1]).any()


def test_a_hop_behind_its_past_equals_the_whole_solve(solver, truth):
    whole = piece(230)
    (alone,) = mels(truth, [whole])
    (first,) = solver.solve([ending(whole, 150, keep=150)])
    for blocks in (1, 2, 3):
        past = Past(first.past.blocks[:blocks])
        company = [piece(33, False), after(whole, past), piece(7)]
        assert worst([mels(solver, company)[1]], [alone[:, past.frames :]]) < 1e-4
    (second,) = solver.solve([after(ending(whole, 200), first.past, keep=200)])
    assert second.past.blocks[:3] == first.past.blocks
    assert worst(mels(solver, [after(whole, second.past)]), [alone[:, 200:]]) < 1e-4


def test_a_half_precision_hop_behind_its_past_is_as_near_as_without(half, truth):
    """Asked for: at most 1.5 dB further from float32."""
    whole = piece(200)
    (expected,) = mels(truth, [whole])
    (first,) = half.solve([ending(whole, 100, keep=100)])
    without, behind = mels(half, [whole])[0][:, 100:], mels(half, [after(whole, first.past)])[0]
    assert snr(behind, expected[:, 100:]) > snr(without, expected[:, 100:]) - 1.5


# Graphs


@pytest.fixture(scope="module")
def captured():
    one = fused(torch.bfloat16)
    one.capture(512, GraphTable(CudaCapture(GPU), limit_bytes=2**30))
    return one


@pytest.mark.parametrize("frames", ladder(512))
def test_a_graph_gives_the_bits_of_the_same_run_without_it(captured, frames):
    for used in (frames, frames - 63):
        pieces = [piece(used // 2 + 1, seed=1), piece(used - used // 2 - 1, False, seed=2)] if used > 1 else [piece(1)]
        replays = captured.graphs.replays
        found = torch.cat(mels(captured, pieces), dim=-1)
        assert captured.graphs.replays == replays + 1
        inputs = captured.inputs(captured._captured_for(pieces).capacity)
        captured.load(inputs, pieces, [[] for _ in pieces])
        assert torch.equal(found, captured.run(inputs)[:used].T)


def test_a_graph_reads_and_writes_pasts(captured, truth):
    whole = piece(250)
    (expected,) = mels(truth, [whole])
    (first,) = captured.solve([ending(whole, 150, keep=150)])
    replays = captured.graphs.replays
    (hop,) = mels(captured, [after(whole, first.past)])
    assert captured.graphs.replays == replays + 1 and snr(hop, expected[:, 150:]) > 30


def test_results_of_a_replay_stay_after_the_next(captured):
    """Trap 58, also for NaN that a replay leaves in frames the next one does not use."""
    (first,) = mels(captured, [piece(60)])
    kept = first.clone()
    mels(captured, [dataclasses.replace(piece(64), noise=torch.full((80, 64), torch.nan, device=GPU))])
    (again,) = mels(captured, [piece(60)])
    assert torch.equal(first, kept) and torch.equal(again, kept)


def test_what_is_larger_than_every_graph_runs_eagerly_and_is_counted(captured, truth):
    eager = captured.eager_runs
    (found,) = mels(captured, [piece(600)])
    assert captured.eager_runs == eager + 1
    assert snr(found, mels(truth, [piece(600)])[0]) > 30


def test_a_capture_that_fails_leaves_its_size_to_the_next_or_to_no_graph(truth, caplog):
    """Trap 55."""
    capture = CudaCapture(GPU)

    def record(run):
        captured = capture(run)
        if len(captured.output) > 128:
            raise torch.OutOfMemoryError("out of memory")
        return captured

    one = fused()
    with caplog.at_level(logging.WARNING):
        one.capture(256, GraphTable(record, limit_bytes=2**30))
    assert len(caplog.records) == 2 and "out of memory" in caplog.text
    for frames, replays in ((100, 1), (200, 1)):
        assert worst(mels(one, [piece(frames)]), mels(truth, [piece(frames)])) < 1e-4
        assert one.graphs.replays == replays


def test_graphs_stay_within_their_budget(truth):
    """Trap 61."""
    roomy = fused()
    roomy.capture(512, GraphTable(CudaCapture(GPU), limit_bytes=2**30))
    limit = roomy.graphs.num_bytes // 2
    tight = fused()
    tight.capture(512, GraphTable(CudaCapture(GPU), limit_bytes=limit))
    assert tight.graphs.num_bytes <= limit and len(tight.graphs) < len(roomy.graphs)
    for frames in LENGTHS:
        assert worst(mels(tight, [piece(frames)]), mels(truth, [piece(frames)])) < 1e-4


def test_auto_is_fused_on_a_gpu_and_says_what_it_captured():
    solver = build_solver(on_gpu(), EngineSettings(flow_precision="bfloat16"))
    assert len(solver.graphs) == len(ladder(4096))
    assert solver.name.startswith(f"fused, {len(ladder(4096))} graphs in ")
