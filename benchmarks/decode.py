"""What does a step of stage 0 cost alone, by number of streams, and what does reading a prompt?

    python -m benchmarks.decode --device cuda --precision bfloat16 --out benchmarks/results/decode-h200.json

Weights are random, in the released shape (`--shape demo` is a small one), scaled so that activations stay of order one:
speed and numbers are shown, never speech. Every stream has a prompt of `--prompt` positions and never ends; steps are
timed as the worker takes them, with the tokens in the host's hands. The column `same_alone` counts streams whose tokens
are those that the engine gives to the same request alone; `deviation` is that of the logits behind a prompt from the
plain module's in float32, relative.
"""

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import given, hardware, percentile, synchronize, write_json
from runtime.config import LMConfig, QwenConfig, RasConfig
from runtime.stage0.base import Stage0
from runtime.stage0.lm import SpeechLM
from runtime.stage0.plain_steps import PlainSteps
from runtime.stage0.prompt import embed_prompt, prompt_ids
from runtime.stage0.slot_engine import PIECE, SlotStage0
from runtime.stage0.torch_engine import TorchStage0
from runtime.types import SamplingParams, Stage0Prompt

RAS = RasConfig(top_p=0.8, top_k=25, win_size=10, tau_r=0.1)
SHAPES = {
    "released": LMConfig(QwenConfig(151936, 896, 4864, 24, 14, 2, 32768, 1e6, 1e-6), 6561, 200, RAS),
    "demo": LMConfig(QwenConfig(1000, 384, 1024, 6, 6, 2, 4096, 1e6, 1e-6), 6561, 200, RAS),
}


def random_lm(config: LMConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> SpeechLM:
    """Seeded weights under which every layer has its say and the law of the next token has many ids."""
    with torch.device("meta"):
        lm = SpeechLM(config).to(dtype)
    lm.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in lm.named_parameters():
        if "norm" in name:
            weight.data.fill_(1)
        else:
            scale = 1.0 if "embed" in name else 0.1 if weight.dim() == 1 else weight.shape[-1] ** -0.5
            weight.data.normal_(0, 3 * scale if "decoder" in name else scale, generator=generator)
    return lm.eval().requires_grad_(False)


def request(config: LMConfig, positions: int, tokens: int, seed: int) -> Stage0Prompt:
    """A prompt of so many positions, half of them text, whose length is forced."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(config.qwen.vocab_size, ((positions - 2) // 2,), generator=generator)
    speech = torch.randint(config.speech_tokens, (positions - 2 - len(text),), generator=generator)
    return Stage0Prompt(text, speech, min_tokens=tokens, max_tokens=tokens)


def speak(engine: Stage0, prompts: dict[int, Stage0Prompt]) -> tuple[dict[int, list[int]], list[float]]:
    """Tokens by key, and the milliseconds of the steps in which all took part."""
    tokens: dict[int, list[int]] = {key: [] for key in prompts}
    for key, said in prompts.items():
        engine.add(key, said, SamplingParams(), key)
    steps = []
    while engine.live_streams:
        began = time.perf_counter()
        given = engine.step()
        if len(given) == len(prompts):
            steps.append(1000 * (time.perf_counter() - began))
        for step in given:
            assert step.error is None, step.error
            if step.token is not None:
                tokens[step.key].append(step.token)
    return tokens, steps[5:-5]


def read_ms(engine: Stage0, said: Stage0Prompt, device: torch.device, repeats: int) -> list[float]:
    """Milliseconds from a prompt's arrival to its first token, with nobody else there."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        engine.add(0, said, SamplingParams(), 0)
        while not engine.step():
            pass
        times.append(1000 * (time.perf_counter() - began))
        engine.drop(0)
        engine.step()
    return times[repeats // 5 :]


@torch.inference_mode()
def back_to_back(lm: SpeechLM, streams: int, positions: int, repeats: int) -> dict[str, float]:
    """Milliseconds of captured work that nobody reads: a step of so many streams, and one reading of a prompt.

    The device is never idle then, so this is the work's own time; a step as the worker takes it has the host's too.
    """
    config, device = lm.config, lm.speech_embedding.weight.device
    steps = captured_steps(lm, streams)
    for slot in range(streams):
        ids = prompt_ids(config, request(config, positions, 1, slot))
        steps.open(slot, ids[-1], len(ids) - 1, SamplingParams(), slot, 10**6)
        for start in range(0, len(ids) - 1, PIECE):
            steps.read([(slot, start, ids[start : min(start + PIECE, len(ids) - 1)])])
    piece = prompt_ids(config, request(config, min(positions, 150), 1, 0))
    works: dict[str, Callable[[], object]] = {
        f"step of {streams}": lambda: steps.launch(list(range(streams))),
        f"reading {len(piece)} positions": lambda: steps.read([(0, 0, piece)]),
    }
    times = {}
    for name, work in works.items():
        for count in (5, repeats):
            synchronize(device)
            began = time.perf_counter()
            for _ in range(count):
                work()
            synchronize(device)
        times[name] = 1000 * (time.perf_counter() - began) / repeats
    steps.close()
    return times


@torch.inference_mode()
def deviations(lm: SpeechLM, said: Stage0Prompt) -> dict[str, float]:
    """Of the logits behind a prompt, from the plain module's in float32: the captured step's and the plain module's."""
    exact, ids = deepcopy(lm).float(), prompt_ids(lm.config, said)
    wanted = exact.logits(exact(embed_prompt(exact, said)[None])[0, -1])
    plain = lm.logits(lm(embed_prompt(lm, said)[None])[0, -1])
    steps = captured_steps(lm, 1)
    steps.open(0, ids[-1], len(ids) - 1, SamplingParams(), 0, 1)
    for start in range(0, len(ids) - 1, PIECE):
        steps.read([(0, start, ids[start : min(start + PIECE, len(ids) - 1)])])
    steps.launch([0]).tokens()
    captured = steps.logits[0].clone()
    steps.close()
    return {
        name: float((given - wanted).norm() / wanted.norm())
        for name, given in (("captured", captured), ("torch", plain))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="released")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=300, help="positions of every prompt")
    parser.add_argument(
        "--read", type=int, nargs="+", default=[150], help="positions of prompts whose reading is timed"
    )
    parser.add_argument("--tokens", type=int, default=200, help="of every stream")
    parser.add_argument("--engines", nargs="+", default=["torch", "captured"])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")
    options = parser.parse_args()
    device, config = torch.device(options.device), SHAPES[options.shape]
    lm = random_lm(config, device, getattr(torch, options.precision))
    print(hardware(device))
    most = max(options.streams)
    builders: dict[str, Callable[[], Stage0]] = {
        "torch": lambda: TorchStage0(lm, most),
        "slots": lambda: SlotStage0(config, PlainSteps(lm, most, 1024)),
        "captured": lambda: SlotStage0(config, captured_steps(lm, most)),
    }
    rows: list[dict[str, Any]] = []
    for name in options.engines:
        engine = builders[name]()
        prompts = {key: request(config, options.prompt, options.tokens, key) for key in range(most)}
        alone: dict[int, list[int]] = {}
        for streams in sorted(options.streams):
            some = {key: prompts[key] for key in range(streams)}
            speak(engine, {key: request(config, 20, 20, key) for key in range(streams)})  # warm-up
            tokens, times = speak(engine, some)
            alone |= speak(engine, {0: prompts[0]})[0] if not alone else {}
            checked = sorted({0, 1, streams // 2, streams - 1} & set(some))
            for key in set(checked) - set(alone):
                alone |= speak(engine, {key: prompts[key]})[0]
            same = sum(tokens[key] == alone[key] for key in checked)
            p50, p99 = percentile(times, 50), percentile(times, 99)
            rows.append(
                {
                    "run": f"{name}, {streams} streams",
                    "step_p50_ms": round(p50, 3),
                    "step_p99_ms": round(p99, 3),
                    "tokens_per_second": round(1000 * streams / p50),
                    "steps": len(times),
                    "same_alone": f"{same} of {len(checked)}",
                }
            )
            print(rows[-1], flush=True)
        for positions in options.read:
            times = read_ms(engine, request(config, positions, 50, 0), device, options.repeats)
            p50, p99 = percentile(times, 50), percentile(times, 99)
            rows.append(
                {
                    "run": f"{name}, a prompt of {positions} to its first token",
                    "step_p50_ms": round(p50, 3),
                    "step_p99_ms": round(p99, 3),
                }
            )
            print(rows[-1], flush=True)
        print(engine.describe())
        engine.close()
    if "captured" in options.engines:
        for streams in options.streams:
            for name, ms in back_to_back(lm, streams, options.prompt, options.repeats).items():
                rows.append({"run": f"captured, {name}, back to back", "step_p50_ms": round(ms, 3)})
                print(rows[-1], flush=True)
        for name, relative in deviations(lm, request(config, options.prompt, 1, 0)).items():
            rows.append({"run": f"{name}, logits behind {options.prompt} positions", "deviation": f"{relative:.1e}"})
            print(rows[-1])
    if options.out:
        write_json(options.out, given(options), device, rows)


def captured_steps(lm: SpeechLM, streams: int) -> Any:
    from runtime.stage0.captured import CapturedSteps

    return CapturedSteps(lm, streams, 1024)


if __name__ == "__main__":
    main()
