"""How much longer does a step of stage 0 take while stage 1 is busy beside it?

    python -m benchmarks.overlap --out benchmarks/results/overlap-h200.json

Random weights in the released shape. Streams of stage 0 that never end are stepped as its worker does, on a stream of
the GPU with priority; a second thread solves whole answers of `--group` streams one group after the other, on a normal
one. Both arms in one process, alternating.
"""

import argparse
import threading
import time
from typing import Any

import torch

from benchmarks.load import engine_flags, random_checkpoint, settings_of, voice
from benchmarks.timing import given, percentile, write_json
from runtime.engine import resolve_device
from runtime.stage0.base import Stage0, build_stage0
from runtime.stage1.base import build_stage1
from runtime.stage1.decoder import Stage1
from runtime.stage1.partition import stage1_stream
from runtime.stage1.state import Chunk
from runtime.types import SamplingParams, Stage0Prompt


class Busy:
    """Solves on a thread and a CUDA stream of its own until it is told to stop."""

    def __init__(
        self, stage1: Stage1, references: list[Any], tokens: int, device: torch.device, reserved: int = 0
    ) -> None:
        self._stage1, self._references, self._tokens, self._device = stage1, references, tokens, device
        self._reserved = reserved
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.rounds = 0

    def __enter__(self) -> "Busy":
        self._thread.start()
        time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        stream = stage1_stream(self._device, self._reserved) if self._device.type == "cuda" else None
        with torch.inference_mode(), torch.cuda.stream(stream):
            while not self._stop.is_set():
                states = [self._stage1.open(reference) for reference in self._references]
                tokens = torch.arange(self._tokens)
                self._stage1.decode_together([Chunk(state, tokens, is_last=True) for state in states])
                self.rounds += 1


def step_times(stage0: Stage0, prompts: list[Stage0Prompt], seconds: float) -> list[float]:
    """Milliseconds of steps in which all take part."""
    for key, prompt in enumerate(prompts):
        stage0.add(key, prompt, SamplingParams(), key)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until and stage0.live_streams:
        began = time.perf_counter()
        if len(stage0.step()) == len(prompts):
            times.append(1000 * (time.perf_counter() - began))
    for key in range(len(prompts)):
        stage0.drop(key)
    return times[10:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_flags(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--group", type=int, default=16, help="answers that stage 1 solves at once")
    parser.add_argument("--tokens", type=int, default=125, help="of each of them")
    parser.add_argument("--seconds", type=float, default=3, help="of each arm")
    options = parser.parse_args()
    device, checkpoint, settings = resolve_device(options.device), random_checkpoint(options.size), settings_of(options)
    stage0, stage1 = (build(checkpoint, settings, device) for build in (build_stage0, build_stage1))
    references = [voice(checkpoint.config, 87, seed) for seed in range(options.group)]
    text = torch.arange(40) % checkpoint.config.lm.qwen.vocab_size
    rows: list[dict[str, Any]] = []
    for streams in options.streams:
        prompts = [Stage0Prompt(text, one.speech_tokens, 3500, 3500) for one in (references * streams)[:streams]]
        times: dict[str, list[float]] = {"alone": [], "beside stage 1": []}
        step_times(stage0, prompts, 0.5)
        rounds, busy_seconds = 0, 0.0
        for arm in ("alone", "beside stage 1", "beside stage 1", "alone"):
            if arm == "alone":
                times[arm] += step_times(stage0, prompts, options.seconds)
            else:
                with Busy(stage1, references, options.tokens, device, options.reserved) as busy:
                    began, before = time.perf_counter(), busy.rounds
                    times[arm] += step_times(stage0, prompts, options.seconds)
                    busy_seconds += time.perf_counter() - began
                    rounds += busy.rounds - before
        for arm, one in times.items():
            percents = {f"step_p{p}_ms": round(percentile(one, p), 3) for p in (50, 95, 99)}
            rows.append({"run": f"{streams} streams, {arm}", **percents, "steps": len(one)})
            if arm != "alone":
                rows[-1]["solves_per_s"] = round(rounds / busy_seconds, 2)
            print(rows[-1], flush=True)
    if options.out:
        write_json(options.out, given(options) | stage0.describe() | stage1.describe(), device, rows)


if __name__ == "__main__":
    main()
