"""The order of the hand-off, by what is noted of it; whether that order is enough is shown in test_tensorrt_cuda.py."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.errors import GenerationError
from runtime.stage1.tensorrt_plan import OWN, build_plan
from runtime.stage1.tensorrt_pool import ContextPool, Run
from tests.runtime.stage1.tensorrt_stand_in import NotedStreams, StandIn, graph_file

Pool = tuple[ContextPool, StandIn, NotedStreams]


@pytest.fixture
def make_pool(tmp_path: Path) -> Callable[..., Pool]:
    def make(limit: int = 2) -> Pool:
        trt = StandIn(lambda graph, inputs, output, handle: None)
        plan = build_plan(trt, trt.Logger(2), graph_file(tmp_path / "dit.onnx", OWN, 80), OWN, 80, exact=True)
        engine = trt.Runtime(trt.Logger(2)).deserialize_cuda_engine(plan)
        trt.calls.clear()
        streams = NotedStreams(trt)
        return ContextPool(engine, streams, limit), trt, streams

    return make


def tensors(rows: int = 2, frames: int = 60) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    x, mu, cond, output = (torch.zeros(rows, 80, frames) for _ in range(4))
    t, speaker, lengths = torch.zeros(rows), torch.zeros(rows, 80), [frames] * rows
    return OWN.tensors(x, mu, t, speaker, cond, lengths, chunk=50), {"velocity": output}


def steps(trt: StandIn) -> list[tuple[object, ...]]:
    return [call for call in trt.calls if call[0] in ("wait", "execute_async_v3")]


def test_each_run_stands_between_two_waits_of_the_device(make_pool: Callable[..., Pool]) -> None:
    pool, trt, streams = make_pool()
    inputs, outputs = tensors()
    with pool.pair() as pair:
        run = Run(pair, streams, 0, inputs, outputs)
        run()
        run()
        number = pair.context.number
    there, back = ("wait", "pair 1", "caller"), ("wait", "caller", "pair 1")
    executed = ("execute_async_v3", number, 1001)
    assert steps(trt) == [there, executed, back, there, executed, back, back]


def test_every_address_that_is_handed_over_is_recorded_on_the_stream_that_uses_it(
    make_pool: Callable[..., Pool],
) -> None:
    """Trap 40."""
    pool, trt, streams = make_pool()
    inputs, outputs = tensors()
    with pool.pair() as pair:
        Run(pair, streams, 0, inputs, outputs)
    told = {address for _, _, _, address in trt.named("set_tensor_address")}
    assert told == {tensor.data_ptr() for tensor in (*inputs.values(), *outputs.values())}
    assert {(address, stream) for _, address, stream in trt.named("record")} == {
        (address, "pair 1") for address in told
    }


def test_shapes_and_addresses_are_told_once_for_all_runs(make_pool: Callable[..., Pool]) -> None:
    pool, trt, streams = make_pool()
    with pool.pair() as pair:
        run = Run(pair, streams, 0, *tensors())
        for _ in range(10):
            run()
    assert len(trt.named("set_input_shape")) == 6 and len(trt.named("set_tensor_address")) == 7
    assert len(trt.named("execute_async_v3")) == 10


def test_a_context_changes_its_profile_on_its_own_stream_and_only_when_it_must(make_pool: Callable[..., Pool]) -> None:
    pool, trt, streams = make_pool()
    for profile, rows in ((0, 2), (1, 4), (1, 6), (0, 2)):
        with pool.pair() as pair:
            Run(pair, streams, profile, *tensors(rows))()
    changes = [(index, handle) for _, _, index, handle in trt.named("set_optimization_profile_async")]
    assert changes == [(1, 1001), (0, 1001)]


@pytest.mark.parametrize("call", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_a_pair_comes_back_after_tensorrt_refused(make_pool: Callable[..., Pool], call: str) -> None:
    """Trap 41: behind whatever was enqueued, as the caller's stream waits before anybody else gets the pair."""
    pool, trt, streams = make_pool(limit=1)
    trt.refuses.add(call)
    with pytest.raises(GenerationError, match="TensorRT refused"), pool.pair() as pair:
        Run(pair, streams, 0, *tensors())()
    assert steps(trt)[-1] == ("wait", "caller", "pair 1")
    trt.refuses.clear()
    with pool.pair() as again:
        Run(again, streams, 0, *tensors())()
    assert again is pair and len(trt.named("create_execution_context")) == 1


def test_a_pair_comes_back_after_any_error_of_its_user(make_pool: Callable[..., Pool]) -> None:
    pool, trt, _ = make_pool(limit=1)
    with pytest.raises(ZeroDivisionError), pool.pair() as pair:
        raise ZeroDivisionError
    assert steps(trt) == [("wait", "caller", "pair 1")]
    with pool.pair() as again:
        assert again is pair


def test_a_pair_comes_back_even_if_its_stream_is_beyond_waiting_for(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _, streams = make_pool(limit=1)

    def broken(other: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side"), pool.pair() as pair:
        monkeypatch.setattr(streams.current(), "wait_stream", broken)
    monkeypatch.undo()
    with pool.pair() as again:
        assert again is pair


def test_no_memory_for_a_context_ends_one_request_and_not_the_pool(make_pool: Callable[..., Pool]) -> None:
    pool, trt, _ = make_pool(limit=1)
    trt.refuses.add("create_execution_context")
    with pytest.raises(GenerationError, match="no memory for a further execution context"), pool.pair():
        pass
    trt.refuses.clear()
    with pool.pair() as pair:
        assert pair.context is not None


def test_contexts_are_made_when_they_are_needed_and_have_streams_of_their_own(make_pool: Callable[..., Pool]) -> None:
    pool, trt, _ = make_pool(limit=2)
    assert not trt.named("create_execution_context")
    with pool.pair() as first, pool.pair() as second:
        assert first.context is not second.context
        assert first.stream.cuda_stream != second.stream.cuda_stream
    with pool.pair():
        pass
    assert len(trt.named("create_execution_context")) == 2


def test_who_finds_every_pair_in_use_waits_for_one(make_pool: Callable[..., Pool]) -> None:
    """Each context has scratch memory of its own, gigabytes at the released size."""
    pool, trt, _ = make_pool(limit=2)
    got = threading.Event()

    def third() -> None:
        with pool.pair():
            got.set()

    waiting = threading.Thread(target=third)
    with pool.pair():
        with pool.pair():
            waiting.start()
            assert not got.wait(timeout=0.1)
        assert got.wait(timeout=30)
    waiting.join()
    assert len(trt.named("create_execution_context")) == 2


def test_a_pair_has_one_user_at_a_time(make_pool: Callable[..., Pool]) -> None:
    """Trap 41: eight threads share two pairs; the stand-in fails when two meet in one context."""
    pool, _, streams = make_pool(limit=2)
    using: set[int] = set()
    shared, failed, lock = [], [], threading.Lock()

    def work() -> None:
        try:
            for _ in range(25):
                with pool.pair() as pair:
                    with lock:
                        shared.extend([pair] if id(pair) in using else [])
                        using.add(id(pair))
                    Run(pair, streams, 0, *tensors(frames=4))()
                    with lock:
                        using.discard(id(pair))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not shared and not failed


def test_tensors_of_a_run_are_contiguous(make_pool: Callable[..., Pool]) -> None:
    """An address and a shape say nothing of strides; concatenated views gave wrong mels upstream (spec 9.35)."""
    x = torch.zeros(2, 60, 80).transpose(1, 2)
    inputs = OWN.tensors(x, x, torch.zeros(1).expand(2), torch.zeros(80, 2).T, x, [60, 60], chunk=None)
    assert all(tensor.is_contiguous() for tensor in inputs.values())
    pool, _, streams = make_pool()
    with pytest.raises(AssertionError, match="x is not contiguous"), pool.pair() as pair:
        Run(pair, streams, 0, inputs | {"x": x}, {"velocity": torch.zeros(2, 80, 60)})
