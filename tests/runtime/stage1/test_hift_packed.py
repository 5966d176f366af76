"""Windows laid end to end against the plain modules, row by row. On a CPU the kernels are their definition in torch."""

import pytest
import torch
from torch import Tensor

from runtime.stage1 import hift_packed
from runtime.stage1.causal import CausalConv1d
from runtime.stage1.graphs import GraphTable
from runtime.stage1.hift import Snake
from runtime.stage1.hift_packed import PackedHiFT, Window
from runtime.stage1.row_convolution import Kernel, convolve, snake
from runtime.stage1.vocoder import PlainHiFT, packed_runner
from tests.runtime.stage1 import tiny_hift
from tests.runtime.stage1.test_graphs import fails, record

CPU = torch.device("cpu")
LENGTHS = (1, 5, 9, 20, 64, 73, 6)
ENDS = (True, False, True, False, True, False, False)


@pytest.fixture(scope="module")
def plain() -> PlainHiFT:
    return PlainHiFT(tiny_hift.lively_hift())


@pytest.fixture(scope="module")
def packed() -> PackedHiFT:
    return packed_runner(tiny_hift.lively_hift(), CPU)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def windows(seed: int = 0) -> list[Window]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Window(tiny_hift.mel(frames, seed + frames), torch.rand(frames * 480, generator=generator) - 0.5, is_last)
        for frames, is_last in zip(LENGTHS, ENDS, strict=True)
    ]


def certain(window: Window) -> int:
    """Samples that will not change: without look-ahead the last frame waits for its overlap."""
    return 480 * (window.mel.shape[1] - (0 if window.is_last else 5))


def test_mixed_rows_give_the_samples_of_the_plain_modules(plain: PlainHiFT, packed: PackedHiFT) -> None:
    for window, ours, theirs in zip(windows(), packed.samples(windows()), plain.samples(windows()), strict=True):
        assert len(theirs) == certain(window)
        torch.testing.assert_close(ours[: len(theirs)], theirs, atol=1e-5, rtol=0)


def test_mixed_rows_give_the_pitch_of_the_plain_modules(plain: PlainHiFT, packed: PackedHiFT) -> None:
    """f0 in float32 against float64: within 0.05 Hz, the same frames voiced."""
    mels, ends = [window.mel for window in windows()], list(ENDS)
    for ours, theirs in zip(packed.pitch(mels, ends), plain.pitch(mels, ends), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0)
        assert torch.equal(ours > 10, theirs > 10)


def test_a_row_is_the_same_to_the_bit_alone_and_in_company(packed: PackedHiFT) -> None:
    for window, ours in zip(windows(), packed.samples(windows()), strict=True):
        (alone,) = packed.samples([window])
        assert torch.equal(alone, ours)


def test_neighbours_without_numbers_do_not_reach_a_row(packed: PackedHiFT) -> None:
    """Trap 43, before and behind, and in what the call before left in the slots."""
    window = windows()[3]
    poison = Window(torch.full((80, 20), torch.nan), torch.full((9600,), torch.nan), is_last=True)
    (alone,) = packed.samples([window])
    _, ours, _ = packed.samples([poison, window, poison])
    assert torch.equal(ours, alone)
    (again,) = packed.samples([window])
    assert torch.equal(again, alone)


def test_more_rows_than_one_run_holds_are_split(packed: PackedHiFT, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = packed.samples(windows())
    monkeypatch.setattr(hift_packed, "GRAPH_SLOTS", (32, 48))  # 64 and 73 frames run alone
    for ours, theirs in zip(packed.samples(windows()), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_graph_gives_what_the_eager_run_gives(packed: PackedHiFT) -> None:
    """The rules of replay: fixed inputs, second replay with other numbers, outputs that belong to the caller (58)."""
    graphed = packed_runner(tiny_hift.lively_hift(), CPU)
    graphed._inputs = graphed._new_inputs(256)
    graphed._graphs = GraphTable(record, limit_bytes=100)
    graphed._graphs.capture(192, lambda: graphed._generate(graphed._inputs, 192))
    first, second = graphed.samples(windows(0)), graphed.samples(windows(1))
    assert (graphed._graphs.replays, graphed._graphs.eager_runs) == (2, 0)
    for seed, made in ((0, first), (1, second)):
        for ours, theirs in zip(made, packed.samples(windows(seed)), strict=True):
            assert torch.equal(ours, theirs)


def test_a_graph_that_could_not_be_captured_costs_nothing_but_time(packed: PackedHiFT) -> None:
    """Trap 55."""
    graphed = packed_runner(tiny_hift.lively_hift(), CPU)
    graphed._inputs = graphed._new_inputs(256)
    graphed._graphs = GraphTable(record, limit_bytes=100)
    assert not graphed._graphs.capture(192, fails)
    for ours, theirs in zip(graphed.samples(windows()), packed.samples(windows()), strict=True):
        assert torch.equal(ours, theirs)
    assert graphed._graphs.eager_runs == 1


def rows_apart(x: Tensor, begins: list[int], conv: CausalConv1d) -> Tensor:
    parts = x.tensor_split(begins[1:])
    return torch.cat([conv(part.T[None])[0].T for part in parts])


@pytest.mark.parametrize(("taps", "dilation"), [(1, 1), (3, 5), (7, 3), (11, 1)])
def test_a_convolution_over_rows_end_to_end_stops_at_their_begins(taps: int, dilation: int) -> None:
    conv = CausalConv1d(6, 10, taps, dilation)
    rate, frames = 4, [0, 1, 7]  # rows of 1, 6 and 5 frames
    begin = torch.tensor([0, *[1] * 6, *[7] * 5], dtype=torch.int32)
    x, residual, alpha = torch.randn(12 * rate, 6), torch.randn(12 * rate, 10), torch.rand(10) + 0.5
    kernel = Kernel(conv.weight.permute(2, 0, 1).contiguous(), conv.bias, dilation)
    out, activated = convolve(x, kernel, begin, rate, residual=residual, activation="snake", alpha=alpha)
    expected = rows_apart(x, [frame * rate for frame in frames], conv) + residual
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(activated, snake(expected, alpha))


def test_snake_is_the_module_with_channels_last() -> None:
    module, x = Snake(5), torch.randn(7, 5)
    module.alpha.copy_(torch.rand(5) + 0.1)
    torch.testing.assert_close(snake(x, module.alpha), module(x.T[None])[0].T)
