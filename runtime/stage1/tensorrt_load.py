"""TensorRT at load: whether it is there, its plan, and whether what it computes is what torch computes (spec 7)."""

import importlib
import re
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from runtime.errors import EngineUnavailable
from runtime.stage1.conditioning import Flow
from runtime.stage1.dit import DiT
from runtime.stage1.dit_onnx import export_dit
from runtime.stage1.dit_tensorrt import TensorRTEstimator, TensorRTSolver
from runtime.stage1.tensorrt_plan import OWN, RELEASED, Graph, build_plan, gpu_name, open_plan, plan_name
from runtime.stage1.tensorrt_pool import CudaStreams, Streams, open_engine

TENSORRT_VERSIONS = ((10, 8), (12,))  # from the first to before the last
_PROBE_FRAMES = 130  # two finished chunks and a part of a third
_DEVIATION = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}  # of a plan from torch, relative


def build_tensorrt(flow: Flow, onnx: Path | None, folder: Path) -> TensorRTSolver:
    """Exports the estimator, or takes the released file `onnx`; builds or finds its plan in `folder`; checks it.

    Raises EngineUnavailable without a CUDA device, without a TensorRT that is served, for a file that is not the
    estimator or is not held in the precision that was asked for, and for a plan whose numbers are not torch's.
    """
    dit, bins = flow.estimator, flow.config.mel_bins
    device = dit.proj_out.weight.device
    if device.type != "cuda":
        raise EngineUnavailable(f"TensorRT needs a CUDA device, not {device}; choose the packed estimator")
    check_tensorrt(installed_tensorrt())
    graph = OWN if onnx is None else RELEASED
    if onnx is None:
        onnx = export_dit(dit, folder)
    else:
        check_released(onnx, dit)
    estimator = open_estimator(import_tensorrt(), dit, onnx, graph, bins, folder, gpu_name(device), CudaStreams(device))
    check_numbers(estimator, dit, bins)
    estimator.solves = 0  # the probes were none
    return TensorRTSolver(estimator, flow.config.euler_steps, flow.config.guidance_rate, device)


def open_estimator(
    trt: Any, dit: DiT, onnx: Path, graph: Graph, bins: int, folder: Path, gpu: str, streams: Streams
) -> TensorRTEstimator:
    """The estimator over the plan of an ONNX file, which is built if it must be."""
    exact = dit.dtype == torch.float32
    name = plan_name(onnx, graph, bins, exact=exact, gpu=gpu, version=trt.__version__)
    logger = trt.Logger(trt.Logger.WARNING)
    runtime = trt.Runtime(logger)
    engine = open_plan(
        folder / name,
        build=partial(build_plan, trt, logger, onnx, graph, bins, exact=exact),
        load=partial(open_engine, runtime, streams=streams),
    )
    return TensorRTEstimator(dit, graph, engine, streams, trt.__version__)


@torch.inference_mode()
def check_numbers(estimator: TensorRTEstimator, dit: DiT, bins: int) -> None:
    """Asks plan and torch for the same velocities. Raises EngineUnavailable when they differ by more than rounding.

    A plan of other weights, or one that TensorRT compiled wrongly, speaks without an error, only not as it should.
    """
    of_another = "" if estimator.graph is OWN else "is the ONNX file this checkpoint's? If it is, "
    device = dit.proj_out.weight.device
    generator = torch.Generator().manual_seed(0)
    x, mu, cond = torch.randn(3, 2, bins, _PROBE_FRAMES, generator=generator).to(device)
    speaker, t = torch.randn(2, bins, generator=generator).to(device), torch.full((2,), 0.3, device=device)
    for chunked in (False, True) if estimator.graph.streams else (False,):
        truth = dit(x, None, mu, t, speaker, cond, chunked=chunked).float()
        found = estimator(x, None, mu, t, speaker, cond, chunked=chunked)
        deviation = float((found - truth).norm() / truth.norm())
        if not deviation <= _DEVIATION[dit.dtype]:  # NaN included
            raise EngineUnavailable(
                f"{estimator.name} is off from torch by {deviation:.1g} of the velocity, more than "
                f"{_DEVIATION[dit.dtype]:.1g}; {of_another}choose another precision or the packed estimator"
            )


def check_released(onnx: Path, dit: DiT) -> None:
    """Raises EngineUnavailable unless the file is there and the precision its own."""
    if not onnx.is_file():
        raise EngineUnavailable(f"there is no file {onnx}; `estimator_onnx` is flow.decoder.estimator.fp32.onnx")
    if dit.dtype != torch.float32:
        raise EngineUnavailable(
            f"{onnx.name} computes in float32, but {str(dit.dtype).removeprefix('torch.')} was asked for; choose "
            "float32 as flow_precision, or leave `estimator_onnx` out"
        )


def import_tensorrt() -> Any:
    """The module. Raises EngineUnavailable when it is broken."""
    try:
        return importlib.import_module("tensorrt")
    except (ImportError, OSError) as broken:  # a library of CUDA is missing, or is another version's
        raise EngineUnavailable(f"TensorRT is installed but does not load: {broken}") from broken


def installed_tensorrt() -> str | None:
    """Its version, or None. The package is a name for one of several, by the version of CUDA."""
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def check_tensorrt(installed: str | None) -> None:
    """Raises EngineUnavailable unless TensorRT is there in a version whose interfaces are those that we use."""
    wanted = "10.8 or newer and older than 12"
    if installed is None:
        raise EngineUnavailable(
            "TensorRT is not installed; install the `tensorrt` extra or choose the packed estimator"
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if not TENSORRT_VERSIONS[0] <= numbers < TENSORRT_VERSIONS[1]:
        raise EngineUnavailable(f"TensorRT {installed} is not served; install {wanted} or choose the packed estimator")
