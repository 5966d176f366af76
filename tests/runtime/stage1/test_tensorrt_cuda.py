"""The hand-off on a real GPU: contexts of the stand-in run torch kernels on the streams and addresses they are given.

Each kernel first keeps its stream busy, so that whoever does not wait is seen. Where a test shows that something holds,
its control takes the guard away and sees it break.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.errors import GenerationError
from runtime.settings import EngineSettings
from runtime.stage1 import tensorrt_load
from runtime.stage1.base import build_stage1, load_flow
from runtime.stage1.dit import DiT
from runtime.stage1.dit_onnx import OnnxDiT, export_path
from runtime.stage1.dit_tensorrt import TensorRTEstimator, TensorRTSolver
from runtime.stage1.solver import Piece, PlainSolver
from runtime.stage1.tensorrt_load import check_numbers, open_estimator
from runtime.stage1.tensorrt_plan import OWN
from runtime.stage1.tensorrt_pool import CudaStreams, Stream
from runtime.types import PreparedReference
from tests.runtime.stage1.tensorrt_stand_in import StandIn, TorchKernels, graph_file, host_waits
from tests.runtime.stage1.tiny_flow import tiny_flow

pytestmark = pytest.mark.cuda
STEPS, RATE, BINS, FRAMES = 10, 0.7, 80, 131
BUSY = 40_000_000  # cycles: about 20 ms
DEVICE = torch.device("cuda")
Opened = tuple[TensorRTEstimator, StandIn, TorchKernels]


@pytest.fixture(autouse=True)
def float32_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def dit() -> DiT:
    return tiny_flow().estimator.to(DEVICE)


@pytest.fixture
def opened(tmp_path: Path, dit: DiT) -> Callable[..., Opened]:
    def make(cycles: int = 0, streams: CudaStreams | None = None) -> Opened:
        kernels = TorchKernels(OnnxDiT(dit))
        trt = StandIn(kernels)
        onnx = graph_file(tmp_path / "dit.onnx", OWN, BINS)
        estimator = open_estimator(trt, dit, onnx, OWN, BINS, tmp_path, "gpu", streams or CudaStreams(DEVICE))
        check_numbers(estimator, dit, BINS)  # also the first use of cuBLAS, which waits
        kernels.cycles = cycles
        return estimator, trt, kernels

    return make


def piece(frames: int = FRAMES, chunked: bool = True, seed: int = 0) -> Piece:
    generator = torch.Generator().manual_seed(seed)
    noise, mu, cond = torch.randn(3, BINS, frames, generator=generator).to(DEVICE)
    return Piece(noise, mu, cond, torch.randn(BINS, generator=generator).to(DEVICE), chunked)


@torch.inference_mode()
def mels(solver: TensorRTSolver | PlainSolver, pieces: list[Piece]) -> list[Tensor]:
    found = [solved.mel for solved in solver.solve(pieces)]
    torch.cuda.synchronize()
    return found


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def test_a_solve_gives_the_mel_of_torch(opened: Callable[..., Opened], dit: DiT) -> None:
    estimator, trt, _ = opened(cycles=BUSY // 20)
    pieces = [piece(), piece(60, False, 1), piece(50, False, 2)]
    found = mels(TensorRTSolver(estimator, STEPS, RATE, DEVICE), pieces)
    assert worst(found, mels(PlainSolver(dit, STEPS, RATE), pieces)) < 1e-4
    assert len(trt.named("execute_async_v3")) == 2 + 2 * STEPS  # two probes at load


def test_the_host_waits_for_nothing_in_a_whole_solve(opened: Callable[..., Opened]) -> None:
    """And is through with it before the device has done the first step."""
    estimator, _, _ = opened(cycles=BUSY)
    solver, one = TensorRTSolver(estimator, STEPS, RATE, DEVICE), piece()
    mels(solver, [one])  # memory is there from now on
    done, running = torch.cuda.Event(), []

    @torch.inference_mode()
    def solve() -> None:
        solver.solve([one])
        done.record()
        running.append(not done.query())

    assert host_waits(solve) == {}
    assert running == [True]


def test_control_a_wait_of_the_host_is_counted(opened: Callable[..., Opened]) -> None:
    estimator, _, _ = opened()
    solver, one = TensorRTSolver(estimator, STEPS, RATE, DEVICE), piece()
    mels(solver, [one])

    def solve_and_wait() -> None:
        mels(solver, [one])

    assert host_waits(solve_and_wait) == {"cudaDeviceSynchronize": 1}
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        host_waits(lambda: solver.solve([one])[0].mel.sum().item())


def test_the_stream_that_is_handed_over_is_the_pairs_own(opened: Callable[..., Opened]) -> None:
    estimator, _, kernels = opened()
    caller = torch.cuda.Stream()
    with torch.cuda.stream(caller):
        mels(TensorRTSolver(estimator, STEPS, RATE, DEVICE), [piece()])
    with estimator.pool.pair() as pair:
        own = pair.stream.cuda_stream
    assert set(kernels.handles) == {own}
    assert own not in (0, caller.cuda_stream, torch.cuda.default_stream().cuda_stream)


class Unrecorded(CudaStreams):
    """The guard taken away."""

    def record(self, tensor: Tensor, stream: Stream) -> None:
        pass


@torch.inference_mode()
def poisoned(estimator: TensorRTEstimator) -> tuple[Tensor, Tensor]:
    """A velocity whose inputs were freed and overwritten right after the call, and the same without that.

    The inputs belong to one stream and the call to another, which is where an allocator that was told nothing hands
    the memory out again: the first stream has nothing to wait for.
    """
    maker, caller = torch.cuda.Stream(), torch.cuda.Stream()
    generator = torch.Generator().manual_seed(3)
    x, mu, cond = torch.randn(3, 2, BINS, FRAMES, generator=generator)
    speaker, t = torch.randn(2, BINS, generator=generator), torch.full((2,), 0.4)
    results = []
    for poison in (False, True):
        with torch.cuda.stream(maker):
            told = [part.to(DEVICE) for part in (mu, speaker, cond)]
        with torch.cuda.stream(caller):
            renewed, time = x.to(DEVICE), t.to(DEVICE)
        torch.cuda.synchronize()
        with torch.cuda.stream(caller):
            velocity = estimator(renewed, None, told[0], time, told[1], told[2], chunked=True)
        if poison:
            shapes = [part.shape for part in told]
            del told
            with torch.cuda.stream(maker):  # enough of them to fill whatever is free
                kept = [torch.full(shape, torch.nan, device=DEVICE) for shape in 32 * shapes]
        torch.cuda.synchronize()
        results.append(velocity)
    assert len(kept) == 96
    return results[1], results[0]


def test_inputs_may_be_freed_and_overwritten_right_after_the_call(opened: Callable[..., Opened]) -> None:
    """Trap 40."""
    estimator, _, _ = opened(cycles=BUSY)
    found, truth = poisoned(estimator)
    assert torch.isfinite(truth).all() and torch.equal(found, truth)


def test_control_without_recording_the_poison_arrives(opened: Callable[..., Opened]) -> None:
    estimator, _, _ = opened(cycles=BUSY, streams=Unrecorded(DEVICE))
    found, truth = poisoned(estimator)
    assert not torch.equal(found, truth)


def test_control_without_the_wait_the_caller_reads_too_early(
    opened: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator, _, _ = opened(cycles=BUSY)
    solver, one = TensorRTSolver(estimator, STEPS, RATE, DEVICE), piece()
    truth = mels(solver, [one])
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda stream, other: None)
    assert not torch.equal(mels(solver, [one])[0], truth[0])


def test_a_pair_comes_back_behind_what_was_enqueued_before_an_error(opened: Callable[..., Opened]) -> None:
    """The run is refused after its kernels were enqueued; the next user of the pair gets clean numbers."""
    estimator, trt, _ = opened(cycles=BUSY)
    solver, one, other = TensorRTSolver(estimator, STEPS, RATE, DEVICE), piece(), piece(seed=1)
    truth = mels(solver, [other])
    trt.refuses.add("execute_async_v3")
    with torch.inference_mode(), pytest.raises(GenerationError, match="TensorRT refused to run"):
        solver.solve([one])
    trt.refuses.clear()
    assert torch.equal(mels(solver, [other])[0], truth[0])
    assert len(trt.named("create_execution_context")) == 1


def test_two_threads_on_two_contexts_give_what_one_after_the_other_gives(opened: Callable[..., Opened]) -> None:
    estimator, trt, kernels = opened(cycles=BUSY // 20)
    pieces = [[piece(80 + 7 * turn, seed=10 * thread + turn) for turn in range(6)] for thread in range(2)]
    solver = TensorRTSolver(estimator, STEPS, RATE, DEVICE)
    serial = [[mels(solver, [one])[0] for one in mine] for mine in pieces]
    found: list[list[Tensor]] = [[], []]
    meet = threading.Barrier(2)
    failed: list[BaseException] = []
    kernels.handles.clear()

    @torch.inference_mode()
    def work(thread: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for one in pieces[thread]:
                    with estimator.pool.pair():  # held, so that the other thread cannot wait for this one's pair
                        meet.wait(timeout=30)
                    meet.wait(timeout=30)
                    found[thread].append(solver.solve([one])[0].mel)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)
            meet.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(trt.named("create_execution_context")) == 2 and len(set(kernels.handles)) == 2
    for mine, alone in zip(found, serial, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, alone, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_stage_1_speaks_through_it(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """From the setting to the sound: the plan is built, checked, and streams as torch does."""
    settings = EngineSettings(flow_precision=precision, estimator="tensorrt", export_folder=tmp_path)  # type: ignore[arg-type]
    config = tiny_checkpoint.config.flow
    net = load_flow(config, tiny_checkpoint.weights("flow"), DEVICE).estimator
    for weight in net.parameters():
        weight.data = weight.data.to(getattr(torch, precision))
    graph_file(export_path(net, tmp_path), OWN, config.mel_bins)  # in place of the export, which is tested elsewhere
    trt = StandIn(TorchKernels(OnnxDiT(net)))
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setattr(tensorrt_load, "installed_tensorrt", lambda: trt.__version__)
    generator = torch.Generator().manual_seed(1)
    reference = PreparedReference(
        speech_tokens=torch.arange(30),
        mel=torch.randn(60, config.mel_bins, generator=generator),
        speaker=torch.randn(config.speaker_dim, generator=generator),
        key="voice",
    )
    sounds = []
    for estimator in ("tensorrt", "torch"):
        stage1 = build_stage1(tiny_checkpoint, replace(settings, estimator=estimator), DEVICE)
        state, tokens = stage1.open(reference), torch.arange(80)
        parts = [stage1.new_mel(state, tokens[:48], is_last=False), stage1.new_mel(state, tokens, is_last=True)]
        sounds.append(torch.cat(parts, dim=-1))
        if estimator == "tensorrt":
            assert stage1.describe()["flow estimator"].startswith("tensorrt 11.4.0.106, exported graph; ")
    assert trt.named("execute_async_v3")
    limit = 1e-4 if precision == "float32" else 10 ** (-30 / 20)
    assert float((sounds[0] - sounds[1]).norm() / sounds[1].norm()) < limit
