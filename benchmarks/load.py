"""Work for both stages: random weights in a true shape, seeded requests of forced length, and clients that listen.

Nothing here is measured; `first_chunk.py` and `throughput.py` ask the questions. Weights are random and scaled so that
activations stay of order one, so speed is shown and never speech.
"""

import argparse
import gc
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from benchmarks.decode import random_lm
from benchmarks.stages import random_flow
from benchmarks.timing import given
from runtime.checkpoint import Checkpoint, Part, released_name
from runtime.config import ModelConfig
from runtime.engine import Pipeline, resolve_device
from runtime.settings import PROFILES, EngineSettings, Precision
from runtime.stage0.base import build_stage0
from runtime.stage1.base import build_stage1
from runtime.stage1.hift import HiFT
from runtime.types import (
    Mode,
    PreparedReference,
    PreparedSpeech,
    SamplingParams,
    Sentence,
    Stage0Prompt,
)
from training.seeded import QWEN, RECIPE_FIELDS, released_size

TOKENS_PER_SECOND = 25


@dataclass(frozen=True, slots=True)
class RandomCheckpoint(Checkpoint):
    """A checkpoint without files."""

    def weights(self, part: Part) -> dict[str, Tensor]:
        device, config = resolve_device("auto"), self.config
        module: nn.Module
        if part == "llm":
            module = random_lm(config.lm, device, torch.float32)
        elif part == "flow":
            module = random_flow(config.flow, device, torch.float32)
        else:
            torch.manual_seed(0)
            module = hift = HiFT(config.hift)
            nn.init.constant_(hift.f0_predictor.classifier.bias, 120.0)  # Hz
        return {released_name(part, name): value for name, value in module.state_dict().items()}


def random_checkpoint(size: str) -> RandomCheckpoint:
    recipe, qwen = deepcopy(RECIPE_FIELDS), dict(QWEN) | {"vocab_size": 512}
    if size == "released":
        released_size(recipe, qwen)
    return RandomCheckpoint(Path(f"random-{size}"), ModelConfig.from_recipe(recipe, qwen), "llm", "random")


def open_pipeline(checkpoint: Checkpoint, settings: EngineSettings) -> tuple[Pipeline, float]:
    """Both stages as the engine builds them, and the seconds that took."""
    began, device = time.perf_counter(), resolve_device(settings.device)
    stage0, stage1 = build_stage0(checkpoint, settings, device), build_stage1(checkpoint, settings, device)
    gc.freeze()  # as launch.py does
    return Pipeline(stage0, stage1, checkpoint.config, settings, device), time.perf_counter() - began


def voice(config: ModelConfig, tokens: int, seed: int) -> PreparedReference:
    generator = torch.Generator().manual_seed(seed)
    return PreparedReference(
        speech_tokens=torch.randint(config.lm.speech_tokens, (tokens,), generator=generator),
        mel=torch.randn(2 * tokens, config.flow.mel_bins, generator=generator),
        speaker=torch.randn(config.flow.speaker_dim, generator=generator),
        key=f"voice {seed} of {tokens} tokens",
    )


def speech(
    config: ModelConfig, reference: PreparedReference, tokens: int, seed: int, *, streaming: bool = True
) -> PreparedSpeech:
    """One sentence of exactly so many tokens, with the text that such a sentence and reference have."""
    generator = torch.Generator().manual_seed(seed)
    length = (tokens + len(reference.speech_tokens)) // 5
    prompt = Stage0Prompt(
        text_tokens=torch.randint(config.lm.qwen.vocab_size, (length,), generator=generator),
        speech_tokens=reference.speech_tokens,
        min_tokens=tokens,
        max_tokens=tokens,
    )
    sentence = Sentence("random", prompt=prompt, expected_seconds=tokens / TOKENS_PER_SECOND)
    return PreparedSpeech(Mode.ZERO_SHOT, reference, (sentence,), SamplingParams(), seed, 1.0, streaming)


def mixed_tokens(count: int, seed: int) -> list[int]:
    """Lengths of answers: log-normal with a mean of 5 s, and every twentieth of 20 to 30 s."""
    numbers = random.Random(seed)
    seconds = [
        numbers.uniform(20, 30) if index % 20 == 19 else numbers.lognormvariate(math.log(5) - 0.5**2 / 2, 0.5)
        for index in range(count)
    ]
    return [max(10, round(TOKENS_PER_SECOND * min(each, 30))) for each in seconds]


@dataclass(slots=True)
class Heard:
    """What one listener got."""

    asked: float  # of time.perf_counter, as all times
    chunks: list[tuple[float, float]] = field(default_factory=list)  # when, and seconds of sound
    ended: float = 0.0
    error: str = ""

    @property
    def first(self) -> float:
        return self.chunks[0][0] - self.asked

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.chunks)

    def underruns(self, buffer: float) -> int:
        """How often sound ran out, when playing begins `buffer` seconds after the first chunk."""
        plays_until, count = self.chunks[0][0] + buffer, 0
        for at, seconds in self.chunks:
            if at > plays_until + 1e-9:
                count += 1
                plays_until = at
            plays_until += seconds
        return count


def listen(pipeline: Pipeline, said: PreparedSpeech, asked: float | None = None) -> Heard:
    heard = Heard(time.perf_counter() if asked is None else asked)
    try:
        with pipeline.speak(said) as stream:
            for chunk in stream:
                heard.chunks.append((time.perf_counter(), len(chunk.samples) / chunk.sample_rate))
    except Exception as error:  # a row of the table tells how many
        heard.error = repr(error)
    heard.ended = time.perf_counter()
    return heard


def closed_loop(pipeline: Pipeline, speeches: Sequence[PreparedSpeech], clients: int, seconds: float) -> list[Heard]:
    """So many clients, each of which asks again when it has heard everything, for so long and to the end of that."""
    heard: list[Heard] = []
    wanted: Iterator[PreparedSpeech] = iter(speeches)
    lock, until = threading.Lock(), time.perf_counter() + seconds

    def client() -> None:
        while time.perf_counter() < until:
            with lock:
                said = next(wanted, None)
            if said is None:
                return
            result = listen(pipeline, said)
            with lock:
                heard.append(result)

    run_all([threading.Thread(target=client, daemon=True) for _ in range(clients)])
    return heard


def open_loop(pipeline: Pipeline, speeches: Sequence[PreparedSpeech], rate: float, seconds: float) -> list[Heard]:
    """Requests that come as they like, `rate` a second on average (Poisson), whoever is still listening."""
    heard: list[Heard] = []
    threads, numbers = [], random.Random(1)
    began = at = time.perf_counter()
    for said in speeches:
        at += numbers.expovariate(rate)
        if at > began + seconds:
            break
        time.sleep(max(0.0, at - time.perf_counter()))
        thread = threading.Thread(target=lambda said=said, at=at: heard.append(listen(pipeline, said, at)), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return heard


def run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=("released", "tiny"), default="released")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", choices=("none", *PROFILES), default="throughput")
    parser.add_argument("--stage0", default="auto")
    parser.add_argument("--precision", choices=get_args(Precision), default="auto")
    parser.add_argument("--reserved", type=int, default=0, help="multiprocessors that stage 1 leaves to stage 0")
    parser.add_argument("--plain", action="store_true", help="plain modules in float32 in place of kernels and graphs")
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")


def settings_of(options: argparse.Namespace) -> EngineSettings:
    if options.plain:
        return EngineSettings(
            device=options.device,
            stage0="torch",
            estimator="torch",
            lm_precision="float32",
            flow_precision="float32",
            vocoder_graph_bytes=0,
            hops="latency",
            max_streams=1,
            max_waiting=4096,
        )
    return EngineSettings(
        device=options.device,
        stage0=options.stage0,
        lm_precision=options.precision,
        flow_precision=options.precision,
        profile=options.profile,
        reserved_multiprocessors=options.reserved,
        max_waiting=4096,
    )


def in_effect(options: argparse.Namespace, pipeline: Pipeline, load_seconds: float) -> dict[str, Any]:
    """For the result file: what was asked for, and what the engine says that it is."""
    return given(options) | pipeline.describe() | {"load_seconds": round(load_seconds, 1)}


def memory_gb(device: torch.device) -> float | None:
    """That the GPU has given out, ours or not."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return round((total - free) / 2**30, 1)
