"""Stands in for the module `tensorrt`: notes each call, keeps to the documented answers, and computes for real.

A plan is a header and the graph file. A context is given raw addresses and a stream handle like TensorRT's own: on a
CPU `run_onnx` reads and writes there through onnxruntime, on a GPU `TorchKernels` runs kernels on that very stream.
"""

import ctypes
import json
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from runtime.stage1.tensorrt_plan import Graph


@dataclass(frozen=True)
class Raw:
    """What TensorRT knows of a tensor."""

    address: int
    shape: tuple[int, ...]
    dtype: str  # of numpy


Compute = Callable[[bytes, dict[str, Raw], Raw, int], None]  # graph, inputs, output, stream handle


class StandIn:
    """The module. `refuses` names calls that are to answer as TensorRT does when it fails."""

    class NetworkDefinitionCreationFlag(IntEnum):
        STRONGLY_TYPED = 1

    class MemoryPoolType(IntEnum):
        WORKSPACE = 0

    class BuilderFlag(IntEnum):
        TF32 = 5

    class Logger:
        WARNING = 2

        def __init__(self, severity: int) -> None:
            pass

    def __init__(self, compute: Compute, version: str = "11.4.0.106") -> None:
        self.__version__ = version
        self.compute = compute
        self.refuses: set[str] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.builds = 0

    def note(self, name: str, *details: Any) -> bool:
        self.calls.append((name, *details))
        return name not in self.refuses

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]

    def Builder(self, logger: Any) -> "Builder":
        return Builder(self)

    def OnnxParser(self, network: "Network", logger: Any) -> "Parser":
        return Parser(self, network)

    def Runtime(self, logger: Any) -> "Runtime":
        return Runtime(self)


@dataclass
class Network:
    graph: bytes = b""
    inputs: dict[str, list[Any]] = field(default_factory=dict)  # name -> numpy dtype and shape, -1 where it is free
    outputs: list[str] = field(default_factory=list)

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_input(self, index: int) -> Any:
        name = list(self.inputs)[index]
        return SimpleNamespace(name=name, shape=self.inputs[name][1])

    def get_output(self, index: int) -> Any:
        return SimpleNamespace(name=self.outputs[index])


class Parser:
    def __init__(self, trt: StandIn, network: Network) -> None:
        self._trt, self._network = trt, network
        self.num_errors = 1

    def get_error(self, index: int) -> str:
        return "In node 49: UNSUPPORTED_NODE"

    def parse_from_file(self, path: str) -> bool:
        network = self._network
        network.graph = Path(path).read_bytes()
        if network.graph.startswith(b"{"):  # names and sizes alone, for machines without the packages for ONNX
            told = json.loads(network.graph)
            network.inputs, network.outputs = told["inputs"], told["outputs"]
        else:
            session = onnxruntime.InferenceSession(network.graph)
            types = {"tensor(float)": "float32", "tensor(int32)": "int32"}
            for entry in session.get_inputs():
                shape = [size if isinstance(size, int) else -1 for size in entry.shape]
                network.inputs[entry.name] = [types[entry.type], shape]
            network.outputs = [entry.name for entry in session.get_outputs()]
        return self._trt.note("parse_from_file", path)


class Builder:
    def __init__(self, trt: StandIn) -> None:
        self._trt = trt

    def create_network(self, flags: int) -> Network:
        self._trt.note("create_network", flags)
        return Network()

    def create_builder_config(self) -> "Config":
        return Config(self._trt)

    def create_optimization_profile(self) -> "Sizes":
        return Sizes()

    def build_serialized_network(self, network: Network, config: "Config") -> bytes | None:
        self._trt.builds += 1
        if not self._trt.note("build_serialized_network"):
            return None
        profiles = [sizes.shapes for sizes in config.profiles]
        told = {"version": self._trt.__version__, "inputs": network.inputs, "outputs": network.outputs}
        return json.dumps(told | {"profiles": profiles}).encode() + b"\n" + network.graph


class Config:
    def __init__(self, trt: StandIn) -> None:
        self._trt = trt
        self.profiles: list[Sizes] = []

    def set_memory_pool_limit(self, pool: int, limit: int) -> None:
        self._trt.note("set_memory_pool_limit", pool, limit)

    def clear_flag(self, flag: int) -> None:
        self._trt.note("clear_flag", flag)

    def add_optimization_profile(self, sizes: "Sizes") -> int:
        self.profiles.append(sizes)
        return len(self.profiles) - 1 if self._trt.note("add_optimization_profile", sizes.shapes) else -1


class Sizes:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Any, Any, Any]] = {}

    def set_shape(self, name: str, least: Any, usual: Any, most: Any) -> None:
        self.shapes[name] = (least, usual, most)


class Runtime:
    def __init__(self, trt: StandIn) -> None:
        self._trt = trt

    def deserialize_cuda_engine(self, plan: bytes) -> "Engine | None":
        told, _, graph = plan.partition(b"\n")
        header = json.loads(told)
        if not self._trt.note("deserialize_cuda_engine") or header["version"] != self._trt.__version__:
            return None
        return Engine(self._trt, header, graph)


class Engine:
    def __init__(self, trt: StandIn, header: dict[str, Any], graph: bytes) -> None:
        self._trt, self.header, self.graph = trt, header, graph

    def create_execution_context(self) -> "Context | None":
        return Context(self._trt, self) if self._trt.note("create_execution_context") else None


class Context:
    """Fails the test when two threads are in it at once, or when it runs with something untold."""

    _numbers = count()

    def __init__(self, trt: StandIn, engine: Engine) -> None:
        self._trt, self._engine = trt, engine
        self._busy = threading.Lock()
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.number = next(Context._numbers)

    def set_optimization_profile_async(self, index: int, handle: int) -> bool:
        self._profile = index
        self._shapes.clear()
        return self._trt.note("set_optimization_profile_async", self.number, index, handle)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        _, declared = self._engine.header["inputs"][name]
        sizes = self._engine.header["profiles"][self._profile].get(name, (declared, declared, declared))
        fits = all(least <= size <= most for least, size, most in zip(sizes[0], shape, sizes[2], strict=True))
        self._shapes[name] = shape
        return self._trt.note("set_input_shape", self.number, name, shape) and fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return self._trt.note("set_tensor_address", self.number, name, address)

    def execute_async_v3(self, handle: int) -> bool:
        assert self._busy.acquire(blocking=False), "two threads are in one execution context"
        try:
            fine = self._trt.note("execute_async_v3", self.number, handle)
            header = self._engine.header
            inputs = {
                name: Raw(self._addresses[name], self._shapes[name], dtype)
                for name, (dtype, _) in header["inputs"].items()
            }
            (output,) = header["outputs"]
            self._trt.compute(
                self._engine.graph, inputs, Raw(self._addresses[output], inputs["x"].shape, "float32"), handle
            )
            return fine
        finally:
            self._busy.release()


def run_onnx(graph: bytes, inputs: dict[str, Raw], output: Raw, handle: int) -> None:
    """Through onnxruntime, in the memory that the addresses name."""
    session = onnxruntime.InferenceSession(graph)
    given = {name: memory(raw) for name, raw in inputs.items()}
    memory(output)[:] = session.run(None, given)[0]


def memory(raw: Raw) -> np.ndarray:
    size = int(np.prod(raw.shape)) * np.dtype(raw.dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(raw.address), raw.dtype).reshape(raw.shape)


class TorchKernels:
    """A module on the GPU, on the stream of the handle; `cycles` keeps that stream busy first, so that races show."""

    def __init__(self, module: nn.Module, cycles: int = 0) -> None:
        self._module, self.cycles = module, cycles
        self.handles: list[int] = []

    @torch.inference_mode()
    def __call__(self, graph: bytes, inputs: dict[str, Raw], output: Raw, handle: int) -> None:
        self.handles.append(handle)
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            if self.cycles:
                torch.cuda._sleep(self.cycles)
            on_device(output).copy_(self._module(**{name: on_device(raw) for name, raw in inputs.items()}))


def on_device(raw: Raw) -> Tensor:
    """A tensor over memory of the GPU that torch does not know to be its own."""
    typestr = {"float32": "<f4", "int32": "<i4"}[raw.dtype]
    interface = {"shape": raw.shape, "typestr": typestr, "data": (raw.address, False), "version": 3, "strides": None}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")


def host_waits(work: Callable[[], object], *, allowed: bool = False) -> dict[str, int]:
    """How often the host waits for the device while `work` runs, by name of CUDA's call.

    Unless `allowed`, torch's own check is on as well: it raises RuntimeError where an operation of torch would wait.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.cuda.set_sync_debug_mode("default" if allowed else "error")
        try:
            with record_function("work"):
                work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    (span,) = (
        event.time_range for event in seen.events() if event.name == "work" and event.device_type == DeviceType.CPU
    )
    inside = (event for event in seen.events() if span.start <= event.time_range.start <= span.end)
    return dict(Counter(event.name for event in inside if "ynchronize" in event.name))


def graph_file(path: Path, graph: Graph, bins: int) -> Path:
    """A file that says what an ONNX file of this kind would: names and sizes."""
    rows = graph.profiles[0].rows[2] if len(graph.profiles) == 1 else -1
    inputs = {
        name: ["int32" if name == "horizon" else "float32", [{3: rows, 5: -1}.get(size, size) for size in shape]]
        for name, shape in graph.inputs(3, 5, bins).items()
    }
    path.write_text(json.dumps({"inputs": inputs, "outputs": [graph.output]}))
    return path


@dataclass(eq=False)
class NotedStream:
    """A stream of a machine that has none: what waits for what is noted."""

    name: str
    cuda_stream: int
    notes: list[tuple[Any, ...]]

    def wait_stream(self, other: Any) -> None:
        self.notes.append(("wait", self.name, other.name))


class NotedStreams:
    """In place of CudaStreams. The caller's stream is called `caller`, those of the pairs `pair 1`, `pair 2`."""

    def __init__(self, trt: StandIn | None = None) -> None:
        self.notes: list[tuple[Any, ...]] = [] if trt is None else trt.calls
        self._caller = NotedStream("caller", 7, self.notes)
        self.made: list[NotedStream] = []

    def new(self) -> NotedStream:
        number = len(self.made) + 1
        self.made.append(NotedStream(f"pair {number}", 1000 + number, self.notes))
        return self.made[-1]

    def current(self) -> NotedStream:
        return self._caller

    def record(self, tensor: Tensor, stream: Any) -> None:
        self.notes.append(("record", tensor.data_ptr(), stream.name))

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()
