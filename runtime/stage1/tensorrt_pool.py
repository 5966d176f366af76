"""Execution contexts, each with a CUDA stream of its own, and the hand-off between a caller's stream and theirs.

TensorRT takes raw addresses and a stream handle, so it is on us that what lies there is written before it is read and
not used again too early. Caller's stream -> context's stream -> caller's stream wait for each other on the device; the
host waits for neither. `Streams` is torch.cuda's part of it: tests bring their own to a machine without a GPU.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.errors import GenerationError


class Stream(Protocol):
    """torch.cuda.Stream, as far as it is used here."""

    @property
    def cuda_stream(self) -> int: ...

    def wait_stream(self, other: Any) -> None: ...


class Streams(Protocol):
    def new(self) -> Stream: ...

    def current(self) -> Stream:
        """The one on which the calling thread enqueues its work."""
        ...

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """The tensor's memory is not handed out again before the stream has come past this use of it."""
        ...

    def on_device(self) -> AbstractContextManager[Any]:
        """TensorRT works on the current device of the thread."""
        ...


class CudaStreams:
    """Streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def record(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)


@dataclass(slots=True, eq=False)
class Pair:
    """An execution context and the only stream that it ever runs on."""

    context: Any
    stream: Stream
    profile: int = 0  # of the context; a new one has the first


class ContextPool:
    """Pairs of one engine, made when they are first needed, at most `limit`. Any thread may use it.

    A pair belongs to one user at a time, as a context's scratch memory does.
    """

    def __init__(self, engine: Any, streams: Streams, limit: int = 2) -> None:
        self._engine = engine
        self._streams = streams
        self._limit = limit
        self._made = 0
        self._lock = threading.Lock()
        self._free: queue.LifoQueue[Pair] = queue.LifoQueue()

    @contextmanager
    def pair(self) -> Iterator[Pair]:
        """A pair that nobody else uses. It comes back however the block is left, and in stream order.

        What was enqueued before an error may still run. So the caller's stream waits for the pair's first; and whoever
        has the pair next stands behind that work, on the same stream.
        """
        pair = self._take()
        try:
            yield pair
        finally:
            try:
                self._streams.current().wait_stream(pair.stream)
            finally:
                self._free.put(pair)

    def _take(self) -> Pair:
        with self._lock:
            if self._free.empty() and self._made < self._limit:
                pair = self._make()
                self._made += 1
                return pair
        return self._free.get()

    def _make(self) -> Pair:
        with self._streams.on_device():
            context = self._engine.create_execution_context()
        if context is None:
            raise GenerationError(
                "TensorRT has no memory for a further execution context; leave it more of the GPU or ask for less"
            )
        return Pair(context, self._streams.new())


class Run:
    """A pair that has been told shapes and addresses, and can be run as often as what lies there is renewed."""

    def __init__(
        self, pair: Pair, streams: Streams, profile: int, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        """Raises GenerationError when TensorRT refuses a shape. Tensors are contiguous; the run keeps them alive."""
        self._pair, self._streams = pair, streams
        self._tensors = [*inputs.values(), *outputs.values()]
        context, stream = pair.context, pair.stream
        with streams.on_device():
            if pair.profile != profile:
                accept(context.set_optimization_profile_async(profile, stream.cuda_stream), f"profile {profile}")
                pair.profile = profile
            for name, tensor in inputs.items():
                accept(context.set_input_shape(name, tuple(tensor.shape)), f"{name} of shape {list(tensor.shape)}")
            for name, tensor in (*inputs.items(), *outputs.items()):
                assert tensor.is_contiguous(), f"{name} is not contiguous; TensorRT sees an address and a shape"
                accept(context.set_tensor_address(name, tensor.data_ptr()), f"the address of {name}")
        # Alive as long as the run, but their memory must outlive what is enqueued, also when the host is long past it.
        for tensor in self._tensors:
            streams.record(tensor, stream)

    def __call__(self) -> None:
        """Enqueues one run behind all that the caller's stream has, and the caller's stream behind the run."""
        caller, stream = self._streams.current(), self._pair.stream
        stream.wait_stream(caller)
        with self._streams.on_device():
            accept(self._pair.context.execute_async_v3(stream.cuda_stream), "to run")
        caller.wait_stream(stream)


def accept(answer: bool, what: str) -> None:
    """TensorRT answers False where others raise."""
    if not answer:
        raise GenerationError(f"TensorRT refused {what}; its log has the reason")


def open_engine(runtime: Any, plan: bytes, streams: Streams) -> Any:
    """The engine of a plan, or None when TensorRT refuses it: it is of another version, GPU, or damaged."""
    with streams.on_device():
        return runtime.deserialize_cuda_engine(plan)
