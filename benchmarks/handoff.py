"""What does a step of the hand-off to TensorRT cost the host, against one that waits for the device?

    python -m benchmarks.handoff --out benchmarks/results/handoff-h200.json

TensorRT itself is not run: in its place stands the DiT of the released shape with random weights, captured as a CUDA
graph at the addresses that the hand-off gives, and launched on the stream that it gives: the device has work of a real
size, but what a launch of TensorRT costs the host is not shown. `stream waits` is runtime/stage1/tensorrt_pool.py as it
is; `host waits` is the same code over streams whose wait is one of the host, like an engine that synchronises before
and after each call. `host_us` is the time until a step is handed over, and in the second arm done; `launch_us` the part
of it that is the launch of the graph.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.stages import SHAPES, random_flow
from benchmarks.timing import given, hardware, percentile, write_json
from runtime.stage1.dit import DiT
from runtime.stage1.dit_tensorrt import TensorRTEstimator, Velocity
from runtime.stage1.tensorrt_load import open_estimator
from runtime.stage1.tensorrt_plan import OWN
from runtime.stage1.tensorrt_pool import CudaStreams, Streams
from tests.runtime.stage1.tensorrt_stand_in import Raw, StandIn, graph_file, host_waits, on_device

STEPS = 10


class CapturedKernels:
    """The net as one graph for each set of addresses: captured at the first run there, launched afterwards."""

    def __init__(self, dit: DiT) -> None:
        self._dit = dit
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self.launch_us: list[float] = []

    @torch.inference_mode()
    def __call__(self, graph: bytes, inputs: dict[str, Raw], output: Raw, handle: int) -> None:
        addresses = tuple(raw.address for raw in (*inputs.values(), output))
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            if addresses not in self._graphs:
                self._graphs[addresses] = self._capture(inputs, output)
            before = time.perf_counter()
            self._graphs[addresses].replay()
            self.launch_us.append(1e6 * (time.perf_counter() - before))

    def _capture(self, inputs: dict[str, Raw], output: Raw) -> torch.cuda.CUDAGraph:
        given, target = {name: on_device(raw) for name, raw in inputs.items()}, on_device(output)
        given.pop("horizon")  # the torch estimator makes its own mask
        target.copy_(self._dit(**given, mask=None, chunked=True))  # libraries set themselves up before a capture
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            target.copy_(self._dit(**given, mask=None, chunked=True))
        return captured


class HostWaiting:
    """A stream for which the host waits where the device could."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    @property
    def cuda_stream(self) -> int:
        return self.stream.cuda_stream

    def wait_stream(self, other: "HostWaiting") -> None:
        other.stream.synchronize()


class HostWaits(CudaStreams):
    def new(self) -> HostWaiting:
        return HostWaiting(torch.cuda.Stream())

    def current(self) -> HostWaiting:
        return HostWaiting(torch.cuda.current_stream())

    def record(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream.stream)


def opened(kernels: CapturedKernels, dit: DiT, bins: int, streams: Streams, folder: Path) -> TensorRTEstimator:
    trt = StandIn(kernels)
    graph = replace(OWN, profiles=tuple(replace(sizes, rows=(2, 2, 128)) for sizes in OWN.profiles))
    onnx = graph_file(folder / "dit.onnx", graph, bins)
    return open_estimator(trt, dit, onnx, graph, bins, folder, "stand-in", streams)


def repeat(step: Velocity, x: Tensor, t: Tensor) -> None:
    for _ in range(STEPS):
        step(x, t)


@torch.inference_mode()
def compare(dit: DiT, bins: int, rows: int, frames: int, solves: int) -> list[dict[str, Any]]:
    """One row for each way of waiting, measured in turns (A B B A)."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(1)
    x, mu, cond = torch.randn(3, rows, bins, frames, generator=generator).to(device)
    speaker, t = torch.randn(rows, bins, generator=generator).to(device), torch.full((rows,), 0.4, device=device)
    truth = dit(x, None, mu, t, speaker, cond, chunked=True).float()
    found: dict[str, Tensor] = {}
    host: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
    waits: dict[str, dict[str, int]] = {}
    kernels = {name: CapturedKernels(dit) for name in ("stream waits", "host waits")}
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            name: opened(kernels[name], dit, bins, streams, Path(folder))
            for name, streams in (("stream waits", CudaStreams(device)), ("host waits", HostWaits(device)))
        }
        bound = {name: arm.bound(mu, speaker, cond, [frames] * rows, chunked=True) for name, arm in arms.items()}
        steps = {name: manager.__enter__() for name, manager in bound.items()}
        for name, step in steps.items():
            found[name] = step(x, t).clone()  # captures
            torch.cuda.synchronize()
            ten_steps = partial(repeat, step, x, t)
            waits[name] = host_waits(ten_steps, allowed=name == "host waits")
            host[name], whole[name] = [], []
        for turn in range(-2, solves):
            for name in arms if turn % 2 == 0 else reversed(list(arms)):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(STEPS):
                    before = time.perf_counter()
                    steps[name](x, t)
                    if turn >= 0:
                        host[name].append(1e6 * (time.perf_counter() - before))
                torch.cuda.synchronize()
                if turn >= 0:
                    whole[name].append(1e3 * (time.perf_counter() - began))
        for manager in bound.values():
            manager.__exit__(None, None, None)
    return [
        {
            "run": name,
            "rows": rows,
            "frames": frames,
            "host_us_p50": round(statistics.median(host[name]), 1),
            "host_us_p99": round(percentile(host[name], 99), 1),
            "launch_us_p50": round(statistics.median(kernels[name].launch_us), 1),
            "ten_steps_ms_p50": round(statistics.median(whole[name]), 2),
            "host_waits_per_step": sum(waits[name].values()) / STEPS,
            "bit_equal_to_other": torch.equal(*found.values()),
            "relative_deviation": float(f"{float((found[name] - truth).norm() / truth.norm()):.1e}"),
        }
        for name in arms
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="released")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--sizes", nargs="+", default=["2x250", "2x424", "16x424"], help="rows x frames")
    parser.add_argument("--solves", type=int, default=30, help="of ten steps each")
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")
    options = parser.parse_args()
    device = torch.device("cuda")
    flow = random_flow(SHAPES[options.shape], device, getattr(torch, options.precision))
    print(hardware(device))
    rows = []
    for size in options.sizes:
        pair_rows, frames = map(int, size.split("x"))
        rows += compare(flow.estimator, flow.config.mel_bins, pair_rows, frames, options.solves)
        for one in rows[-2:]:
            print("  ".join(f"{name} {value}" for name, value in one.items()))
    if options.out:
        write_json(options.out, given(options), device, rows)


if __name__ == "__main__":
    main()
