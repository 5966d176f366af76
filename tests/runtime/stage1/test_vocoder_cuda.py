"""The packed vocoder with its Triton kernels and graphs, held to what the CPU tests hold to the plain modules."""

import gc
import logging
import threading

import pytest
import torch
from torch import Tensor

from runtime.stage1.graphs import CudaCapture, GraphTable
from runtime.stage1.hift_packed import GRAPH_SLOTS, PackedHiFT, Window
from runtime.stage1.noise import NoiseBank
from runtime.stage1.row_convolution import Kernel, Precision, convolve, snake
from runtime.stage1.vocoder import MelChunk, PlainHiFT, Vocoder, packed_runner
from tests.runtime.stage1 import tiny_hift
from tests.runtime.stage1.test_hift_packed import ENDS, LENGTHS
from tests.runtime.stage1.test_vocoder import signal_to_noise_db, stream

pytestmark = pytest.mark.cuda
TOLERANCE: dict[Precision, float] = {"ieee": 5e-5, "tf32x3": 5e-5, "tf32": 1e-2}  # of sums of 2,816 products


@pytest.fixture(autouse=True)
def _exact_and_without_gradients():
    torch.backends.cudnn.allow_tf32 = False  # as the engine sets it
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def graphed() -> PackedHiFT:
    return packed_runner(tiny_hift.lively_hift(), torch.device("cuda"), graph_bytes=2 * 2**30)


@pytest.fixture(scope="module")
def eager() -> PackedHiFT:
    return packed_runner(tiny_hift.lively_hift(), torch.device("cuda"))


def windows(seed: int = 0) -> list[Window]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Window(
            tiny_hift.mel(frames, seed + frames).cuda(),
            (torch.rand(frames * 480, generator=generator) - 0.5).cuda(),
            is_last,
        )
        for frames, is_last in zip(LENGTHS, ENDS, strict=True)
    ]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(
    ("frames", "rate", "channels_in", "channels_out", "taps", "dilation", "activation"),
    [
        (20, 8, 256, 256, 11, 5, "snake"),
        (20, 40, 128, 128, 7, 3, ""),
        (20, 120, 64, 18, 7, 1, ""),
        (60, 1, 400, 512, 1, 1, "elu"),
        (9, 8, 512, 2048, 3, 1, ""),
        (9, 120, 4, 4, 3, 1, "snake"),
        (9, 1, 512, 1, 1, 1, ""),
    ],
)
def test_the_kernel_is_its_definition(
    precision: Precision,
    frames: int,
    rate: int,
    channels_in: int,
    channels_out: int,
    taps: int,
    dilation: int,
    activation: str,
) -> None:
    torch.manual_seed(0)
    begin = torch.tensor([0] * 7 + [7] * (frames - 7), dtype=torch.int32)
    x = torch.randn(frames * rate, channels_in)
    weight = torch.randn(taps, channels_out, channels_in) / (taps * channels_in) ** 0.5
    bias, alpha, residual = torch.randn(channels_out), torch.rand(channels_out) + 0.1, torch.randn(len(x), channels_out)

    def run(device: str) -> tuple[Tensor, Tensor]:
        kernel = Kernel(weight.to(device), bias.to(device), dilation, precision)
        more = {"residual": residual.to(device), "activation": activation, "alpha": alpha.to(device)}
        return convolve(x.to(device), kernel, begin.to(device), rate, **more)

    for ours, theirs in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=TOLERANCE[precision], rtol=0)


def test_snake_is_its_definition() -> None:
    x, alpha = torch.randn(333, 64) * 5, torch.rand(64) * 3 + 0.1
    torch.testing.assert_close(snake(x.cuda(), alpha.cuda()).cpu(), snake(x, alpha), atol=1e-5, rtol=0)


def test_a_row_is_the_same_to_the_bit_alone_in_company_eagerly_and_replayed(
    graphed: PackedHiFT, eager: PackedHiFT
) -> None:
    together = graphed.samples(windows())
    for window, ours, uncaptured in zip(windows(), together, eager.samples(windows()), strict=True):
        (alone,) = graphed.samples([window])
        assert torch.equal(alone, ours) and torch.equal(ours, uncaptured)


def test_a_second_replay_has_its_own_numbers_and_leaves_the_first(graphed: PackedHiFT, eager: PackedHiFT) -> None:
    """Trap 58."""
    first, second = graphed.samples(windows(0)), graphed.samples(windows(7))
    for made, seed in ((first, 0), (second, 7)):
        for ours, theirs in zip(made, eager.samples(windows(seed)), strict=True):
            assert torch.equal(ours, theirs)


def test_neighbours_without_numbers_do_not_reach_a_row(graphed: PackedHiFT) -> None:
    """Trap 43."""
    poison = Window(torch.full((80, 20), torch.nan).cuda(), torch.full((9600,), torch.nan).cuda(), is_last=True)
    (alone,) = graphed.samples([windows()[3]])
    _, ours, _ = graphed.samples([poison, windows()[3], poison])
    assert torch.equal(ours, alone)
    assert torch.equal(graphed.samples([windows()[3]])[0], alone)


def test_samples_and_pitch_are_near_the_plain_modules(graphed: PackedHiFT) -> None:
    plain = PlainHiFT(tiny_hift.lively_hift().cuda())
    for window, ours, theirs in zip(windows(), graphed.samples(windows()), plain.samples(windows()), strict=True):
        if len(theirs):
            assert signal_to_noise_db(ours[: len(theirs)], theirs) > 40, window.mel.shape
    mels, ends = [window.mel for window in windows()], list(ENDS)
    for ours, theirs in zip(graphed.pitch(mels, ends), plain.pitch(mels, ends), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0)
        assert torch.equal(ours > 10, theirs > 10)


@pytest.mark.parametrize("hop", [1, 2, 13, 50, 100])
def test_any_hop_gives_the_whole(graphed: PackedHiFT, hop: int) -> None:
    vocoder = Vocoder(tiny_hift.lively_hift().cuda(), NoiseBank(torch.device("cuda")), graphed)
    frames = 80 + hop
    mel = tiny_hift.mel(frames).cuda()
    whole = vocoder.decode(vocoder.open(), mel, is_last=True)
    torch.testing.assert_close(torch.cat(stream(vocoder, mel, range(hop, frames, hop))), whole, atol=1e-5, rtol=0)


def test_the_host_waits_only_for_the_copy(graphed: PackedHiFT, monkeypatch: pytest.MonkeyPatch) -> None:
    vocoder = Vocoder(tiny_hift.lively_hift().cuda(), NoiseBank(torch.device("cuda")), graphed)
    chunks = [MelChunk(vocoder.open(), tiny_hift.mel(frames).cuda(), is_last=True) for frames in (30, 70)]
    vocoder.decode_together([MelChunk(vocoder.open(), chunk.mel, is_last=True) for chunk in chunks])  # draws the noise
    monkeypatch.setattr(vocoder, "_checked", lambda rows: [(row, 0, 0) for row in rows])
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = vocoder.decode_together(chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(samples) for samples in made] == [30, 70]  # frames, as nobody has copied them


def test_all_shapes_are_captured_at_load_inside_the_budget(graphed: PackedHiFT) -> None:
    assert graphed._graphs is not None
    assert len(graphed._graphs) == len(GRAPH_SLOTS)
    assert 0 < graphed._graphs.num_bytes <= 2 * 2**30
    before = graphed._graphs.eager_runs
    graphed.samples(windows())
    assert graphed._graphs.eager_runs == before


def test_a_run_that_cannot_be_captured_is_disabled_and_cuda_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Trap 55."""
    table: GraphTable[str] = GraphTable(CudaCapture(torch.device("cuda")), limit_bytes=2**30)
    number, stream = torch.ones(1, device="cuda"), torch.cuda.current_stream()
    with caplog.at_level(logging.WARNING):
        assert not table.capture("waits", lambda: number * number.item())
    assert len(caplog.records) == 1
    assert torch.cuda.current_stream() == stream
    assert table.run("waits", lambda: number * number.item()).item() == 1.0
    assert table.capture("does not", lambda: number * 2)
    assert table.run("does not", lambda: number).item() == 2.0


def test_no_garbage_is_collected_within_a_capture() -> None:
    """Trap 60: a tensor in a dead cycle, freed there, would end the capture."""
    table: GraphTable[int] = GraphTable(CudaCapture(torch.device("cuda")), limit_bytes=2**30)
    number, within = torch.ones(1000, device="cuda"), []

    def run() -> torch.Tensor:
        for _ in range(100):
            cycle: list[object] = [torch.empty(10, device="cuda")]
            cycle.append(cycle)
        return number * 2

    def collected(phase: str, _: dict[str, int]) -> None:
        within.append(torch.cuda.is_current_stream_capturing())

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(10, 1, 1)
    try:
        assert table.capture(0, run)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert within and not any(within) and gc.isenabled()


def test_a_graph_keeps_its_precision_when_a_switch_of_the_process_is_turned() -> None:
    """Trap 59: what was captured is replayed, and a table belongs to one solver, whose precision does not change."""
    table: GraphTable[int] = GraphTable(CudaCapture(torch.device("cuda")), limit_bytes=2**30)
    torch.manual_seed(0)
    left, right = torch.randn(2, 512, 512, device="cuda")
    assert table.capture(0, lambda: left @ right)
    exact = table.run(0, lambda: left).clone()
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        assert not torch.equal(left @ right, exact)
        assert torch.equal(table.run(0, lambda: left), exact)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_other_threads_may_use_cuda_during_a_capture() -> None:
    """Trap 56."""
    stop, failures = threading.Event(), []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                try:
                    assert torch.empty(1_000_000, device="cuda").fill_(1.0).sum().item() == 1_000_000
                except Exception as error:
                    failures.append(error)
                    return

    thread = threading.Thread(target=work)
    thread.start()
    table: GraphTable[int] = GraphTable(CudaCapture(torch.device("cuda")), limit_bytes=2**30)
    number = torch.ones(1000, device="cuda")
    captured = [table.capture(key, lambda: (number * 2).cumsum(0)) for key in range(20)]
    stop.set()
    thread.join()
    assert all(captured) and not failures
