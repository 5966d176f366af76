"""What does the flow cost alone, hop by hop, and how far is each way of computing it from the plain one?

    python -m benchmarks.stages --shape demo --threads 2 --out benchmarks/results/flow-cpu.json
    python -m benchmarks.stages --shape released --device cuda --precision bfloat16 --streams 1 8 64 --peak-tflops 790

Weights are random, scaled as they are drawn: speed and numbers are shown, never the quality of speech. Tokens and voice
are seeded. The columns name the solve: `first hop` of 25 + pad tokens after the prompt, `second hop` of 50 more (which
the plan `throughput` leaves out), `final` with full attention over everything.
"""

import argparse
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import Timing, given, hardware, measure_together, row, write_json
from runtime.config import DiTConfig, FlowConfig
from runtime.stage1.base import FlowSolver, build_fused, why_not_fused
from runtime.stage1.conditioning import Flow
from runtime.stage1.dit_packed import PackedSolver
from runtime.stage1.noise import NoiseBank
from runtime.stage1.past import Past
from runtime.stage1.solver import Piece, PlainSolver

_DEMO_DIT = DiTConfig(320, 8, 5, 64, 2, 80, 80, 80, 50)
_DEMO = FlowConfig(6561, 80, 80, 192, 2, 3, 512, 0.7, 10, _DEMO_DIT)
SHAPES = {
    "demo": _DEMO,
    "released": replace(_DEMO, lookahead_channels=1024, dit=replace(_DEMO_DIT, dim=1024, depth=22, heads=16)),
}
GRID = 25
TOKEN_RATE = 25
SLOW = ("torch", "packed")  # on a GPU they launch each stream's kernels by themselves: measured alone


@dataclass(frozen=True, slots=True, eq=False)
class Sentence:
    """A voice and the tokens of a sentence, as stage 1 solves them."""

    flow: Flow
    noise: NoiseBank
    tokens: Tensor  # [P + n]
    prompt: int  # P
    prompt_mel: Tensor  # [M, 2 P]
    speaker: Tensor  # [M]

    def piece(self, tokens: int, *, is_last: bool, past: Past | None = None, keep: int = 0) -> Piece:
        """Prompt and so many tokens behind it, unless they are in the past."""
        lookahead = 0 if is_last else self.flow.config.lookahead_tokens
        mu = self.flow.mu(self.tokens[None, : self.prompt + tokens + lookahead], is_last=is_last)[0]
        noise, cond = self.noise.flow_noise(mu.shape[-1]), torch.zeros_like(mu)
        cond[:, : self.prompt_mel.shape[-1]] = self.prompt_mel
        start = past.frames if past else 0
        noise, mu, cond = (part[:, start:] for part in (noise, mu, cond))
        return Piece(noise, mu, cond, self.speaker, not is_last, past, keep)

    @property
    def pad(self) -> int:
        return -self.prompt % GRID

    @property
    def prompt_blocks(self) -> int:
        """Frames of the prompt that no token behind it reaches."""
        config = self.flow.config
        frames = config.mel_per_token * (self.prompt - config.lookahead_tokens)
        return frames - frames % config.dit.chunk_frames


def random_flow(shape: FlowConfig, device: torch.device, dtype: torch.dtype) -> Flow:
    """Seeded weights under which activations stay of order one and no gate is zero."""
    torch.manual_seed(0)
    with device:  # drawn where they are used: on a CPU the released size takes its time
        flow = Flow(shape).eval().requires_grad_(False)
    for block in flow.estimator.transformer_blocks:
        nn.init.normal_(block.attn_norm.linear.bias, std=0.3)
    for weight in flow.estimator.parameters():
        weight.data = weight.data.to(dtype)
    return flow


@torch.inference_mode()
def sentence(flow: Flow, prompt: int, tokens: int) -> Sentence:
    device = flow.input_embedding.weight.device
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(flow.config.speech_tokens, (prompt + tokens,), generator=generator).to(device)
    mel = torch.randn(flow.config.mel_bins, 2 * prompt, generator=generator).to(device)
    speaker = flow.speaker(torch.randn(1, flow.config.speaker_dim, generator=generator).to(device))[0]
    return Sentence(flow, NoiseBank(device), ids, prompt, mel, speaker)


def solve_flop(shape: FlowConfig, piece: Piece) -> float:
    """Arithmetic of one solve of a piece: products of the DiT for each frame, attention for each key it sees."""
    dit = shape.dit
    width = dit.heads * dit.head_dim
    block = 4 * dit.dim * width + 2 * dit.dim * dit.dim * dit.ff_mult
    conv = 2 * dit.dim * dit.dim // dit.conv_groups * dit.conv_kernel
    inputs = dit.dim * (2 * dit.mel_bins + dit.mu_dim + dit.speaker_dim)
    per_frame = 2 * (dit.depth * block + conv + inputs + dit.dim * dit.mel_bins)
    total = piece.start + piece.frames
    at = torch.arange(piece.start, total)
    seen = (at - at % dit.chunk_frames + dit.chunk_frames).clamp(max=total) if piece.chunked else at * 0 + total
    attention = 4 * width * dit.depth * int(seen.sum())
    return 2 * shape.euler_steps * (per_frame * piece.frames + attention)


def solvers(flow: Flow) -> dict[str, FlowSolver]:
    """Each way of solving that this device has, the plain one first."""
    steps, rate = flow.config.euler_steps, flow.config.guidance_rate
    arms: dict[str, FlowSolver] = {
        "torch": PlainSolver(flow.estimator, steps, rate),
        "packed": PackedSolver(flow.estimator, steps, rate),
    }
    if why_not_fused(flow) is None:
        arms |= {"fused": build_fused(flow, graph_bytes=0), "fused, graphs": build_fused(flow, graph_bytes=8 * 2**30)}
    return arms


@torch.inference_mode()
def compare(
    flow: Flow, prompt: int, tokens: int, repeats: int, streams: Sequence[int] = (1,), peak_tflops: float | None = None
) -> list[dict[str, Any]]:
    """Rows of a table. The truth is the plain solver in float32, over the very weights."""
    text = sentence(flow, prompt, tokens)
    first = GRID + text.pad
    arms = solvers(flow)
    learner = arms.get("fused", arms["packed"])
    past = learner.solve([text.piece(first, is_last=False, keep=text.prompt_blocks)])[0].past
    exact = copy.deepcopy(flow.estimator).float()
    truth = PlainSolver(exact, flow.config.euler_steps, flow.config.guidance_rate)
    kinds = [("first hop", first, False), ("second hop", first + 50, False), ("final", tokens, True)]
    rows = []
    for count in streams:
        for kind, length, is_last in kinds:
            if length > tokens:
                continue
            piece = text.piece(length, is_last=is_last)
            wanted = {arm: (arms[arm], piece) for arm in arms if count == 1 or arm not in SLOW}
            if not is_last:
                behind = text.piece(length, is_last=False, past=past)
                wanted |= {f"{arm}, voice kept": (arms[arm], behind) for arm in wanted if arm != "torch"}
            found = measure(wanted, count, repeats, piece.noise.device)
            expected = truth.solve([piece])[0].mel
            for arm, (solver, one) in wanted.items():
                mels = [solved.mel for solved in solver.solve([one] * count)]
                tflops = count * solve_flop(flow.config, one) / found[arm].p50_ms / 1e9
                columns = {"frames": count * one.frames, **deviation(mels, expected), "tflops": round(tflops, 3)}
                if peak_tflops:
                    columns["of_peak"] = round(tflops / peak_tflops, 3)
                if is_last:
                    columns["audio_s_per_s"] = round(1000 * count * tokens / TOKEN_RATE / found[arm].p50_ms, 1)
                prefix = f"{count} x " if count > 1 else ""
                rows.append(row(f"{prefix}{kind}, {arm}", found[arm], **columns))
    return rows


def measure(
    wanted: Mapping[str, tuple[FlowSolver, Piece]], count: int, repeats: int, device: torch.device
) -> dict[str, Timing]:
    arms = {arm: partial(solver.solve, [piece] * count) for arm, (solver, piece) in wanted.items()}
    return measure_together(arms, repeats=repeats, warm_ups=2, device=device)


def deviation(mels: Sequence[Tensor], expected: Tensor) -> dict[str, float]:
    """Of the worst of several mels from the frames of the whole one that they are."""
    parts = [(mel, expected[:, -mel.shape[1] :]) for mel in mels]
    worst = max(float((mel - part).norm() / part.norm()) for mel, part in parts)
    return {"relative_deviation": float(f"{worst:.1e}"), "snr_db": round(-20 * math.log10(max(worst, 1e-12)), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--prompt-tokens", type=int, default=87)
    parser.add_argument("--tokens", type=int, default=125, help="of the sentence, 25 to the second")
    parser.add_argument("--streams", type=int, nargs="*", default=[1], help="solved together")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for the column that compares with it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    flow = random_flow(SHAPES[options.shape], device, getattr(torch, options.precision))
    print(hardware(device))
    rows = compare(flow, options.prompt_tokens, options.tokens, options.repeats, options.streams, options.peak_tflops)
    for one in rows:
        print("  ".join(f"{name} {value}" for name, value in one.items()))
    if options.out:
        write_json(options.out, given(options), device, rows)


if __name__ == "__main__":
    main()
