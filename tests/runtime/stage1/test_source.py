import torch
from torch import Tensor

from runtime.stage1.noise import NoiseBank
from runtime.stage1.source import HarmonicSource
from tests import golden
from tests.runtime.stage1 import tiny_hift


def noise(samples: int) -> Tensor:
    return NoiseBank(torch.device("cpu")).source_noise(0, samples)[None]


def contour(frames: int) -> Tensor:
    """f0 [1, frames] with voiced and unvoiced stretches."""
    f0 = 220 + 180 * torch.sin(torch.arange(frames) * 0.37)
    return torch.where(torch.arange(frames) % 23 < 4, 0.0, f0)[None]


def test_source_matches_the_reference() -> None:
    fixture = golden.load("hift_io")
    hift = tiny_hift.hift()
    for f0, expected in (
        (fixture["f0_final_fp64"], fixture["source_final"][..., 0]),
        (fixture["f0_stream_fp64"], fixture["source_stream"][:, 0]),
    ):
        source = hift.source(f0.float(), noise(expected.shape[1]))
        torch.testing.assert_close(source, expected, atol=2e-5, rtol=0)


def test_source_still_matches_after_six_seconds() -> None:
    fixture = golden.load("hift_io")
    source = tiny_hift.hift().source(fixture["long_f0"], noise(300 * 480))
    torch.testing.assert_close(source[:, -20 * 480 :], fixture["long_source_tail"][..., 0], atol=2e-5, rtol=0)


def test_pieces_with_carried_sums_are_the_whole_to_the_bit() -> None:
    """Trap 50. Over a minute, where one frame's rounding is already a tenth of a radian."""
    source: HarmonicSource = tiny_hift.hift().m_source
    f0 = contour(3000)
    whole_noise = torch.rand(1, 3000 * 480, 9)
    whole, _ = source(f0, whole_noise, source.open(f0.device))
    sums, pieces = source.open(f0.device), []
    for start, end in ((0, 1), (1, 48), (48, 1000), (1000, 1001), (1001, 3000)):
        piece, sums = source(f0[:, start:end], whole_noise[:, start * 480 : end * 480], sums)
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces, dim=1), whole)


def test_phase_is_the_reference_float32_cumsum() -> None:
    source: HarmonicSource = tiny_hift.hift().m_source
    f0 = contour(2000)
    cycles = (f0[..., None] * torch.arange(1, 10) / 24_000) % 1
    expected = torch.cumsum(cycles, dim=1) * 2 * torch.pi * 480
    phase, _ = source._phase(f0, source.open(f0.device))
    assert torch.equal(phase, expected)


def test_source_draws_nothing() -> None:
    """Trap 51: noise is an argument, addressed by sample index; the global generator is left alone."""
    hift, given = tiny_hift.hift(), noise(960)
    before = torch.get_rng_state()
    first = hift.source(contour(2), given)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(hift.source(contour(2), given), first)
    assert not torch.equal(hift.source(contour(2), given * 0.5), first)


def test_only_the_mixing_layer_learns_from_the_source() -> None:
    hift = tiny_hift.hift()
    f0 = contour(5).requires_grad_()
    hift.source(f0, noise(5 * 480)).sum().backward()
    assert f0.grad is None
    assert hift.m_source.l_linear.weight.grad is not None


def test_rows_do_not_meet() -> None:
    hift = tiny_hift.hift()
    f0 = torch.cat([contour(20), contour(20).flip(1)])
    both = hift.source(f0, noise(20 * 480).expand(2, -1, -1))
    alone = hift.source(f0[1:], noise(20 * 480))
    torch.testing.assert_close(both[1:], alone, atol=1e-6, rtol=0)
