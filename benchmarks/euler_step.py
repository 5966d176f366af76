"""What does one Euler step of the flow cost on a GPU as a captured graph, and what its attention beside the library's?

    python -m benchmarks.euler_step --out benchmarks/results/euler-step-h200.json

The DiT at the released size with random weights, in bfloat16; rows are pieces with their guidance twins. Each figure is
the mean of `repeats` replays between two CUDA events. The attention is one launch over the same rows, beside torch's
flash and cuDNN kernels where all rows are full and of one length. Parity is that of whole solves (`stages.py`, tests).
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.stages import SHAPES, random_flow, solve_flop
from benchmarks.timing import given, hardware, write_json
from runtime.stage1.attention import attend
from runtime.stage1.dit_fused import FusedSolver, Inputs
from runtime.stage1.graphs import CudaCapture
from runtime.stage1.packing import Tables, needed
from runtime.stage1.solver import Piece

SHAPE = SHAPES["released"]
CASES = ((1, 100, True), (1, 250, True), (1, 424, False), (8, 424, False), (32, 250, True), (64, 424, False))
LIBRARY = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def piece(frames: int, chunked: bool, seed: int, device: torch.device) -> Piece:
    draw = torch.Generator().manual_seed(seed)
    noise, mu, cond = torch.randn(3, 80, frames, generator=draw).to(device)
    return Piece(noise, mu, cond, torch.randn(80, generator=draw).to(device), chunked)


def mean_ms(run: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        run()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(repeats):
        run()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / repeats


def captured_ms(run: Callable[[], Tensor], repeats: int, device: torch.device) -> float:
    graph = CudaCapture(device)(run).graph
    return mean_ms(graph.replay, repeats)


def attention_ms(solver: FusedSolver, inputs: Inputs, repeats: int, device: torch.device) -> float:
    dit, tables = SHAPE.dit, Tables.of(inputs.numbers, inputs.capacity)
    qkv = torch.randn(2, inputs.capacity.frames, 3 * dit.heads * dit.head_dim, device=device).bfloat16()

    def run() -> Tensor:
        return attend(
            qkv,
            tables.tiles,
            tables.seen,
            tables.past,
            solver._anchor,
            heads=dit.heads,
            block_frames=dit.chunk_frames,
            past_offset=0,
        )

    return captured_ms(run, repeats, device)


def library_ms(name: str, rows: int, frames: int, repeats: int, device: torch.device) -> float:
    q, k, v = torch.randn(3, rows, SHAPE.dit.heads, frames, SHAPE.dit.head_dim, device=device).bfloat16()
    with sdpa_kernel(LIBRARY[name]):
        return captured_ms(lambda: F.scaled_dot_product_attention(q, k, v), repeats, device)


@torch.inference_mode()
def measure(device: torch.device, repeats: int, peak_tflops: float) -> list[dict[str, Any]]:
    flow = random_flow(SHAPE, device, torch.bfloat16)
    solver = FusedSolver(flow.estimator, SHAPE.euler_steps, SHAPE.guidance_rate)
    rows = []
    for count, frames, chunked in CASES:
        pieces = [piece(frames, chunked, seed, device) for seed in range(count)]
        inputs = solver.inputs(needed(pieces))
        solver.load(inputs, pieces, [[] for _ in pieces])
        step = partial(solver._velocity, inputs, Tables.of(inputs.numbers, inputs.capacity), 0)
        ms = captured_ms(step, repeats, device)
        tflops = sum(solve_flop(SHAPE, one) for one in pieces) / SHAPE.euler_steps / ms / 1e9
        one: dict[str, Any] = {
            "run": f"{2 * count} x {frames}{', by blocks' if chunked else ''}",
            "step_ms": round(ms, 3),
            "tflops": round(tflops),
            "of_peak": round(tflops / peak_tflops, 2),
            "attention_us": round(1000 * attention_ms(solver, inputs, repeats, device), 1),
        }
        if not chunked:
            for name in LIBRARY:
                one[f"{name}_us"] = round(1000 * library_ms(name, 2 * count, frames, repeats, device), 1)
        rows.append(one)
        print("  ".join(f"{name} {value}" for name, value in one.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--peak-tflops", type=float, default=790, help="of a large bf16 product on this device")
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(hardware(device))
    rows = measure(device, options.repeats, options.peak_tflops)
    if options.out:
        write_json(options.out, given(options), device, rows)


if __name__ == "__main__":
    main()
