"""What does the flow cost alone, hop by hop, and how far is each way of computing it from the plain one?

    python -m benchmarks.stages --shape demo --threads 2 --out benchmarks/results/flow-cpu.json

Weights are random, scaled as they are drawn: speed and numbers are shown, never the quality of speech. Tokens and voice
are seeded. The columns name the solve: `first hop` of 25 + pad tokens after the prompt, `second hop` of 50 more (which
the plan `throughput` leaves out), `final` with full attention over everything.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import hardware, measure_together, row, write_json
from runtime.config import DiTConfig, FlowConfig
from runtime.stage1.base import FlowSolver
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
    flow = Flow(shape).to(device).eval().requires_grad_(False)
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


@torch.inference_mode()
def compare(flow: Flow, prompt: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    config, device = flow.config, flow.input_embedding.weight.device
    plain = PlainSolver(flow.estimator, config.euler_steps, config.guidance_rate)
    packed = PackedSolver(flow.estimator, config.euler_steps, config.guidance_rate)
    text = sentence(flow, prompt, tokens)
    first = GRID + text.pad
    (voice,) = packed.solve([text.piece(first, is_last=False, keep=text.prompt_blocks)])
    past = voice.past
    wanted: dict[str, tuple[FlowSolver, Piece]] = {}
    for name, count, is_last in (
        ("first hop", first, False),
        ("second hop", first + 50, False),
        ("final", tokens, True),
    ):
        if count <= tokens:
            piece = text.piece(count, is_last=is_last)
            wanted |= {f"{name}, torch": (plain, piece), f"{name}, packed": (packed, piece)}
        if count <= tokens and not is_last:
            wanted[f"{name}, packed, voice kept"] = (packed, text.piece(count, is_last=False, past=past))
    arms: dict[str, Callable[[], object]] = {
        name: lambda solver=solver, piece=piece: solver.solve([piece])  # type: ignore[misc]
        for name, (solver, piece) in wanted.items()
    }
    timings = measure_together(arms, repeats=repeats, device=device)
    rows = []
    for name, (solver, piece) in wanted.items():
        truth = plain.solve([wanted[f"{name.split(',')[0]}, torch"][1]])[0].mel[:, -piece.frames :]
        deviation = (solver.solve([piece])[0].mel - truth).norm() / truth.norm()
        rows.append(row(name, timings[name], frames=piece.frames, relative_deviation=float(f"{deviation:.1e}")))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--prompt-tokens", type=int, default=87)
    parser.add_argument("--tokens", type=int, default=125, help="of the sentence, 25 to the second")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    flow = random_flow(SHAPES[options.shape], device, getattr(torch, options.precision))
    print(hardware(device))
    rows = compare(flow, options.prompt_tokens, options.tokens, options.repeats)
    for one in rows:
        print("  ".join(f"{name} {value}" for name, value in one.items()))
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        write_json(options.out, settings, device, rows)


if __name__ == "__main__":
    main()
