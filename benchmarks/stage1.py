"""What does stage 1 make of recorded tokens: ms to the first sound, and seconds of sound per second?

    python -m benchmarks.stage1 --device cuda --precision bfloat16 --out benchmarks/results/stage1-h200.json

Flow and vocoder at the released size with random weights; tokens are seeded and all there at once, so stage 0 costs
nothing here. 8 voices of 87 prompt tokens, their prompts' keys and values kept; a sentence is 5 s. `first hop` is from
tokens to samples in host memory, opening included; `whole` is one solve per sentence; `streams` are the plan
`throughput`: first hops, then the rest. Groups hold as many frames as the engine puts into one solve.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.stages import SHAPES, TOKEN_RATE, random_flow
from benchmarks.timing import given, hardware, measure_together, row, write_json
from benchmarks.vocoder import random_hift
from runtime.batching import Ready, next_group
from runtime.chunking import ChunkSchedule, Cut, HopPlan
from runtime.engine import GROUP_FRAMES
from runtime.settings import EngineSettings
from runtime.stage1.base import assemble
from runtime.stage1.decoder import Stage1
from runtime.stage1.noise import NoiseBank
from runtime.stage1.state import Chunk
from runtime.stage1.vocoder import Vocoder
from runtime.types import PreparedReference

PROMPT, TOKENS, VOICES = 87, 125, 8


def build(device: torch.device, settings: EngineSettings, *, plain_vocoder: bool = False) -> Stage1:
    flow, hift = random_flow(SHAPES["released"], device, torch.float32), random_hift(device)
    return assemble(flow, hift, settings, Vocoder(hift, NoiseBank(device)) if plain_vocoder else None)


def voices(count: int) -> list[PreparedReference]:
    draw = torch.Generator().manual_seed(2)
    return [
        PreparedReference(
            speech_tokens=torch.randint(6561, (PROMPT,), generator=draw),
            mel=torch.randn(2 * PROMPT, 80, generator=draw) * 2 - 4,
            speaker=torch.randn(192, generator=draw),
            key=f"voice {number}",
        )
        for number in range(count)
    ]


class Load:
    """Sentences that all wait for stage 1. `hops` is the plan by which those that are streamed are cut."""

    def __init__(
        self, stage1: Stage1, streams: int, tokens: int, group_frames: int, hops: HopPlan = "throughput"
    ) -> None:
        self._stage1, self._group_frames, self._hops = stage1, group_frames, hops
        known = voices(VOICES)
        draw = torch.Generator().manual_seed(3)
        self._tokens = [torch.randint(6561, (tokens,), generator=draw) for _ in range(streams)]
        self._voices = [known[number % VOICES] for number in range(streams)]

    def first_hops(self) -> None:
        self._speak(islice(self._cuts(), 1))

    def whole(self) -> None:
        self._speak(self._cuts(streaming=False))

    def streamed(self) -> None:
        self._speak(self._cuts())

    def _cuts(self, *, streaming: bool = True) -> Iterator[tuple[Cut, bool]]:
        """Where every sentence is cut, and whether what is solved up to there is kept."""
        schedule = ChunkSchedule(PROMPT, hops=self._hops, streaming=streaming)
        while cut := schedule.next(len(self._tokens[0]), finished=True):
            yield cut, schedule.hops_again and not cut.is_last

    def _speak(self, cuts: Iterable[tuple[Cut, bool]]) -> None:
        """All sentences from their beginning, one chunk of each after the other."""
        states = [self._stage1.open(voice) for voice in self._voices]
        for cut, keep in cuts:
            pairs = zip(states, self._tokens, strict=True)
            self._decode([Chunk(state, tokens[: cut.tokens], cut.is_last, keep) for state, tokens in pairs])

    def _decode(self, chunks: list[Chunk]) -> None:
        waiting: list[Ready[Chunk]] = [
            Ready(chunk, float(n), 2 * (PROMPT + len(chunk.tokens))) for n, chunk in enumerate(chunks)
        ]
        while waiting:
            group = next_group(waiting, self._group_frames)
            waiting = [one for one in waiting if one not in group]
            for samples in self._stage1.decode_together([one.key for one in group]):
                if not isinstance(samples, Tensor):
                    raise samples


def measure(
    stage1: Stage1, streams: Sequence[int], group_frames: int, repeats: int, tokens: int = TOKENS, warm_ups: int = 2
) -> list[dict[str, Any]]:
    device = torch.device(stage1.describe()["stage 1 device"])
    rows = []
    for count in streams:
        load = Load(stage1, count, tokens, group_frames)
        seconds = count * tokens / TOKEN_RATE
        arms: dict[str, tuple[Callable[[], object], float | None]] = {
            "first hop": (load.first_hops, None),
            "whole": (load.whole, seconds),
            "streams": (load.streamed, seconds),
        }
        timings = measure_together(
            {name: run for name, (run, _) in arms.items()}, repeats=repeats, warm_ups=warm_ups, device=device
        )
        for name, (_, sound) in arms.items():
            rate = None if sound is None else round(1000 * sound / timings[name].p50_ms, 1)
            rows.append(row(f"{count} x {name}", timings[name], audio_s_per_s=rate, gpu_gb=used_gb(device)))
            print("  ".join(f"{column} {value}" for column, value in rows[-1].items()), flush=True)
    return rows


def used_gb(device: torch.device) -> float | None:
    """Of the device's memory, whoever uses it."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return round((total - free) / 1e9, 1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--group-frames", type=int, help="in one solve; left out, as the engine has it")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")
    options = parser.parse_args()
    device = torch.device(options.device)
    stage1 = build(device, EngineSettings(flow_precision=options.precision))
    options.group_frames = options.group_frames or GROUP_FRAMES[device.type]
    print(hardware(device), stage1.describe())
    rows = measure(stage1, options.streams, options.group_frames, options.repeats)
    if options.out:
        write_json(options.out, given(options), device, rows)


if __name__ == "__main__":
    main()
