"""The packed solver against the plain one, one piece at a time in float64.

Traps by design: there is no padding that could hold NaN (43) and no masked key whose weight would have to vanish (42),
as each query segment is given the keys that it sees and no others; one table of times serves all rows (32).
"""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from runtime.errors import EngineUnavailable
from runtime.settings import EngineSettings
from runtime.stage1.base import build_solver
from runtime.stage1.conditioning import Flow
from runtime.stage1.dit_packed import PackedSolver
from runtime.stage1.noise import NoiseBank
from runtime.stage1.past import Past
from runtime.stage1.solver import Piece, PlainSolver
from tests import golden
from tests.runtime.stage1.tiny_flow import CPU, tiny_flow

STEPS, RATE = 3, 0.7


def exact_flow() -> Flow:
    flow = tiny_flow()
    flow.estimator.double()
    return flow


@pytest.fixture(scope="module")
def packed() -> PackedSolver:
    return PackedSolver(tiny_flow().estimator, STEPS, RATE)


@pytest.fixture(scope="module")
def exact() -> PackedSolver:
    return PackedSolver(exact_flow().estimator, STEPS, RATE)


@pytest.fixture(scope="module")
def truth() -> PlainSolver:
    return PlainSolver(exact_flow().estimator, STEPS, RATE)


def piece(frames: int, chunked: bool = True, seed: int = 0) -> Piece:
    generator = torch.Generator().manual_seed(1000 * seed + frames)
    noise, mu, cond = torch.randn(3, 80, frames, generator=generator)
    return Piece(noise, mu, cond, torch.randn(80, generator=generator), chunked)


def after(whole: Piece, past: Past, keep: int = 0) -> Piece:
    """The frames of a piece behind a past."""
    rest = {name: getattr(whole, name)[:, past.frames :] for name in ("noise", "mu", "cond")}
    return dataclasses.replace(whole, **rest, past=past, keep=keep)


def ending(whole: Piece, frames: int, keep: int = 0) -> Piece:
    start = {name: getattr(whole, name)[:, :frames] for name in ("noise", "mu", "cond")}
    return dataclasses.replace(whole, **start, keep=keep)


@torch.inference_mode()
def mels(solver: PackedSolver | PlainSolver, pieces: list[Piece]) -> list[Tensor]:
    return [solved.mel for solved in solver.solve(pieces)]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def test_a_solve_matches_golden() -> None:
    io = golden.load("flow_io")
    solver = PackedSolver(tiny_flow().estimator, 10, RATE)
    mu, cond, speaker = io["cfm.mu"][0], io["cfm.cond"][0], io["cfm.spks"][0]
    (out,) = mels(solver, [Piece(NoiseBank(CPU).flow_noise(mu.shape[-1]), mu, cond, speaker, False)])
    torch.testing.assert_close(out[None], io["cfm.out"], atol=5e-5, rtol=0)


@pytest.mark.parametrize("chunked", [False, True])
def test_ragged_pieces_equal_each_alone_in_float64(packed: PackedSolver, truth: PlainSolver, chunked: bool) -> None:
    pieces = [piece(frames, chunked) for frames in (1, 49, 50, 51, 99)]
    expected = mels(truth, pieces)
    assert worst(mels(packed, pieces), expected) < 1e-5
    assert worst(mels(packed, pieces[::-1]), expected[::-1]) < 1e-5
    for alone, one in zip(expected, pieces, strict=True):
        assert worst(mels(packed, [one]), [alone]) < 1e-5


def test_sixty_four_mixed_pieces_in_any_order_equal_each_alone(packed: PackedSolver, truth: PlainSolver) -> None:
    lengths = random.Random(3).choices((1, 2, 30, 49, 50, 51, 99, 100), k=64)
    pieces = [piece(frames, chunked=seed % 2 == 0, seed=seed) for seed, frames in enumerate(lengths)]
    expected = mels(truth, pieces)
    order = random.Random(4).sample(range(64), 64)
    assert worst(mels(packed, pieces), expected) < 1e-5
    assert worst(mels(packed, [pieces[i] for i in order]), [expected[i] for i in order]) < 1e-5


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_what_a_neighbour_holds_stays_with_it(packed: PackedSolver, poison: float) -> None:
    """Trap 43."""
    pieces = [piece(frames) for frames in (51, 30, 99)]
    clean = mels(packed, pieces)
    broken = {name: torch.full_like(getattr(pieces[1], name), poison) for name in ("noise", "mu", "cond", "speaker")}
    poisoned = mels(packed, [pieces[0], dataclasses.replace(pieces[1], **broken), pieces[2]])
    assert torch.equal(poisoned[0], clean[0]) and torch.equal(poisoned[2], clean[2])
    assert not torch.isfinite(poisoned[1]).any()


def test_a_hop_behind_its_past_equals_the_whole_solve(packed: PackedSolver, exact: PackedSolver) -> None:
    """In float64 the remembered frames are the very numbers; in float32 kernels of another width round otherwise."""
    whole = piece(230)
    for solver, tolerance in ((exact, 1e-10), (packed, 1e-5)):
        (alone,) = solver.solve([whole])
        (first,) = solver.solve([ending(whole, 150, keep=150)])
        assert first.past
        for past in (Past(first.past.blocks[:count]) for count in (1, 2, 3)):
            assert worst(mels(solver, [after(whole, past)]), [alone.mel[:, past.frames :]]) < tolerance


def test_a_past_may_be_built_hop_by_hop(exact: PackedSolver) -> None:
    whole = piece(230)
    (alone,) = mels(exact, [whole])
    (hop,) = exact.solve([ending(whole, 50, keep=50)])
    parts, past = [hop.mel], hop.past
    for end in (100, 200):
        rest = after(ending(whole, end), past, keep=end)
        (hop,) = exact.solve([rest])
        parts.append(hop.mel)
        past = hop.past
    parts += mels(exact, [after(whole, past)])
    assert worst([torch.cat(parts, dim=-1)], [alone]) < 1e-10


def test_streams_with_and_without_a_past_share_a_solve(exact: PackedSolver, truth: PlainSolver) -> None:
    wholes = [piece(frames, seed=7) for frames in (130, 200, 51)]
    pasts = [exact.solve([dataclasses.replace(one, keep=50)])[0].past for one in wholes]
    mixed = [after(wholes[0], pasts[0]), wholes[1], after(wholes[2], pasts[2]), piece(99, chunked=False)]
    found = mels(exact, mixed)
    expected = mels(truth, [*wholes, piece(99, chunked=False)])
    expected = [whole[:, -len(mel[0]) :] for whole, mel in zip(expected, found, strict=True)]
    assert worst(found, expected) < 1e-6  # the mel is handed on in float32


def test_a_past_weighs_what_was_foretold(packed: PackedSolver) -> None:
    (solved,) = packed.solve([dataclasses.replace(piece(120), keep=100)])
    assert solved.past and solved.past.frames == 100
    assert solved.past.num_bytes == packed.past_bytes(100)


def test_a_past_owns_its_memory(packed: PackedSolver) -> None:
    """What is kept is what is counted: no view holds the larger tensors of the solve alive."""
    (solved,) = packed.solve([dataclasses.replace(piece(120), keep=50)])
    assert solved.past
    parts = [part for block in solved.past.blocks for part in (block.kv, block.tails)]
    assert all(part.untyped_storage().nbytes() == part.numel() * part.element_size() for part in parts)


def test_weights_are_held_once() -> None:
    flow = tiny_flow()
    solver = PackedSolver(flow.estimator, STEPS, RATE)
    for block, (weight, _) in zip(flow.estimator.transformer_blocks, solver._qkv, strict=True):
        assert block.attn.to_q.weight.data_ptr() == weight.data_ptr()
        own = {getattr(block.attn, name).weight.untyped_storage().data_ptr() for name in ("to_q", "to_k", "to_v")}
        assert own == {weight.untyped_storage().data_ptr()}


def test_half_precision_stays_near(truth: PlainSolver) -> None:
    solver = PackedSolver(tiny_flow(EngineSettings(flow_precision="bfloat16")).estimator, STEPS, RATE)
    pieces = [piece(frames) for frames in (51, 120)]
    for found, expected in zip(mels(solver, pieces), mels(truth, pieces), strict=True):
        noise = (found - expected).square().mean() / expected.square().mean()
        assert -10 * torch.log10(noise) >= 30  # dB


def test_a_half_precision_hop_behind_its_past_is_as_near_as_without(truth: PlainSolver) -> None:
    """Asked for: at most 1.5 dB further from float32."""
    solver = PackedSolver(tiny_flow(EngineSettings(flow_precision="bfloat16")).estimator, STEPS, RATE)
    whole = piece(200)
    (expected,) = mels(truth, [whole])
    (first,) = solver.solve([ending(whole, 100, keep=100)])
    without, behind = mels(solver, [whole])[0][:, 100:], mels(solver, [after(whole, first.past)])[0]
    error, other = ((mel - expected[:, 100:]).square().mean() for mel in (behind, without))
    assert 10 * torch.log10(error / other) < 1.5


def test_the_fused_estimator_is_refused_where_it_cannot_run_and_auto_does_without_it() -> None:
    """Trap 62: never silently another one than was asked for."""
    flow = tiny_flow()
    with pytest.raises(EngineUnavailable, match="CUDA device"):
        build_solver(flow, EngineSettings(estimator="fused"))
    assert build_solver(flow, EngineSettings()).name == "packed"
