"""TensorRT plans: what they are built from, where they are kept, when they are built again (spec 7).

A plan is compiled for one GPU and one version of TensorRT, takes minutes and is as large as the weights. So it is kept,
under a name that holds all that it depends on; nothing half-written is ever loaded. `trt` is the module `tensorrt`,
10.8 to 11.x, given as an argument: this file runs without it.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from torch import Tensor

from runtime.errors import EngineUnavailable
from runtime.stage1.dit_onnx import Lengths, horizon

Shape = tuple[int, ...]
E = TypeVar("E")
Span = tuple[int, int, int]  # least, usual and most

_BUILD = 1  # of `build_plan`: plans of another way of building are not found
_WORKSPACE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes that a plan is compiled for. Rows are guidance pairs, so their numbers are even."""

    rows: Span
    frames: Span

    def holds(self, rows: int, frames: int) -> bool:
        return self.rows[0] <= rows <= self.rows[2] and self.frames[0] <= frames <= self.frames[2]


@dataclass(frozen=True, slots=True)
class Graph:
    """One kind of ONNX file: its names, its sizes, and whether it knows the chunk-causal attention of streaming."""

    name: str
    inputs: Callable[[int, int, int], dict[str, Shape]]  # rows, frames, mel bins -> shape by name
    output: str
    profiles: tuple[Profile, ...]
    streams: bool

    def tensors(
        self, x: Tensor, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor, lengths: Lengths, *, chunk: int | None
    ) -> dict[str, Tensor]:
        """The inputs by name, float32 and contiguous; lengths and chunk as in `horizon`."""
        rows, bins, frames = x.shape
        by_name = {"x": x, "mu": mu, "t": t, "speaker": speaker, "cond": cond}
        if self.streams:
            by_name["horizon"] = horizon(lengths, frames, chunk, x.device)
        else:
            assert chunk is None, "a graph without a chunk mask was given a streaming hop"
            real = torch.arange(frames, device=x.device) < horizon(lengths, frames, None, x.device)
            by_name["mask"] = real[:, None].float()
            by_name["spks"] = by_name.pop("speaker")
        return {name: by_name[name].contiguous() for name in self.inputs(rows, frames, bins)}


def _own_inputs(rows: int, frames: int, bins: int) -> dict[str, Shape]:
    wide = (rows, bins, frames)
    return {"x": wide, "mu": wide, "t": (rows,), "speaker": (rows, bins), "cond": wide, "horizon": (rows, frames)}


def _released_inputs(rows: int, frames: int, bins: int) -> dict[str, Shape]:
    wide = (rows, bins, frames)
    return {"x": wide, "mask": (rows, 1, frames), "mu": wide, "t": (rows,), "spks": (rows, bins), "cond": wide}


# Two profiles, as context memory grows with the largest product of rows and frames squared.
ALONE, COMPANY = Profile((2, 2, 2), (4, 500, 3000)), Profile((4, 8, 16), (4, 500, 1024))
OWN = Graph("exported", _own_inputs, "velocity", (ALONE, COMPANY), streams=True)
RELEASED = Graph("released", _released_inputs, "estimator_out", (ALONE,), streams=False)


def build_plan(trt: Any, logger: Any, onnx: Path, graph: Graph, bins: int, *, exact: bool) -> bytes:
    """Compiles an ONNX file, strongly typed: each tensor keeps the type that the graph gives it.

    `exact` keeps TF32 out of float32 products; a graph in half precision loses nothing by it (`dit_onnx.attend`).
    Raises EngineUnavailable for a file that TensorRT cannot read, that is not of this kind, or that cannot be built.
    """
    builder = trt.Builder(logger)
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # 11.x knows no other and may drop it
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        reasons = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise EngineUnavailable(f"TensorRT {trt.__version__} cannot read {onnx.name}: {reasons or 'no reason given'}")
    found = {
        network.get_input(index).name: tuple(network.get_input(index).shape) for index in range(network.num_inputs)
    }
    check_names(onnx.name, graph, list(found), [network.get_output(i).name for i in range(network.num_outputs)])
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
    if exact:
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default
    for profile in graph.profiles:
        sizes = [graph.inputs(rows, frames, bins) for rows, frames in zip(profile.rows, profile.frames, strict=True)]
        shapes = builder.create_optimization_profile()
        for name, declared in found.items():
            if -1 in declared:
                shapes.set_shape(name, *(size[name] for size in sizes))
        if config.add_optimization_profile(shapes) < 0:
            raise EngineUnavailable(f"TensorRT {trt.__version__} refuses the sizes {profile} for {onnx.name}")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineUnavailable(
            f"TensorRT {trt.__version__} could not build {onnx.name}; its log above has the reason, often memory"
        )
    return bytes(plan)


def check_names(file: str, graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Raises EngineUnavailable unless a network has the inputs and the output that this kind of graph has."""
    wanted, given = (sorted(graph.inputs(2, 4, 1)), [graph.output]), (sorted(inputs), list(outputs))
    if wanted != given:
        raise EngineUnavailable(
            f"{file} takes {given[0]} and gives {given[1]}; the {graph.name} estimator takes {wanted[0]} and gives "
            f"{wanted[1]}: is it another model?"
        )


def plan_name(onnx: Path, graph: Graph, bins: int, *, exact: bool, gpu: str, version: str) -> str:
    """Changes with the ONNX file's content, the GPU, TensorRT's version, the sizes, and how it is built."""
    content = hashlib.sha256()
    with onnx.open("rb") as file:
        while block := file.read(2**24):
            content.update(block)
    told = (_BUILD, content.hexdigest(), gpu, version, graph.name, graph.profiles, bins, exact)
    return f"dit-{hashlib.sha256(repr(told).encode()).hexdigest()[:24]}.plan"


def gpu_name(device: torch.device) -> str:
    """Name and compute capability: a plan runs on no other."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, capability {properties.major}.{properties.minor}"


def open_plan(path: Path, build: Callable[[], bytes], load: Callable[[bytes], E | None]) -> E:
    """The engine of the plan at `path`, built first unless a whole one is there that loads.

    Several processes may ask at once: one builds, the others wait for it. Raises EngineUnavailable, of `build` or for a
    plan that was just built and does not load.
    """
    if (engine := _load(path, load)) is not None:
        return engine
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if (engine := _load(path, load)) is not None:  # by another process, while we waited
            return engine
        plan = build()
        _write(path, plan)
    engine = load(plan)
    if engine is None:
        raise EngineUnavailable(f"TensorRT built {path.name} and does not load it; its log above has the reason")
    return engine


def _load(path: Path, load: Callable[[bytes], E | None]) -> E | None:
    """None for a plan that is missing, cut short, damaged or refused: it is built again."""
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, plan = stored[:32], stored[32:]
    return load(plan) if hashlib.sha256(plan).digest() == digest else None


def _write(path: Path, plan: bytes) -> None:
    """Digest, then plan; under a temporary name until complete."""
    handle, unfinished = tempfile.mkstemp(prefix="unfinished-", suffix=".plan", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(plan).digest())
            file.write(plan)
        Path(unfinished).replace(path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
