"""What is each technique of stage 1 worth? Everything, and then one thing left out at a time.

    python -m benchmarks.ablation --device cuda --out benchmarks/results/ablation-h200.json

Load and weights are those of `stage1.py`; all arms lie on the device at once and take turns (A B B A). With the plain
modules, which solve one stream after the other, only one stream is tried: 64 would take half a minute.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.stage1 import TOKENS, Load, build
from benchmarks.stages import TOKEN_RATE
from benchmarks.timing import Timing, given, hardware, measure_together, write_json
from runtime.chunking import HopPlan
from runtime.engine import GROUP_FRAMES
from runtime.settings import EngineSettings
from runtime.stage1.decoder import Stage1


@dataclass(frozen=True, slots=True)
class Arm:
    """What is left out: by settings, in the vocoder, or in how the load is grouped and cut."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    plain_vocoder: bool = False
    group_frames: int | None = None
    hops: HopPlan = "throughput"
    for_one: bool = False  # too slow for many


ARMS = {
    "everything": Arm(),
    "no graphs": Arm({"flow_graph_bytes": 0, "vocoder_graph_bytes": 0}),
    "no fused kernels in the flow": Arm({"estimator": "packed"}),
    "flow in float32": Arm({"flow_precision": "float32"}),
    "no keys and values of prompts": Arm({"voice_kv_bytes": 0}),
    "streams one by one": Arm(group_frames=1),
    "growing hops": Arm(hops="latency"),
    "growing hops, none of their keys and values": Arm({"stream_kv_bytes": 0}, hops="latency"),
    "plain vocoder": Arm(plain_vocoder=True),
    "plain modules": Arm({"estimator": "torch"}, plain_vocoder=True, for_one=True),
}


def build_all(device: torch.device) -> dict[str, Stage1]:
    """What the arms speak with. Those that differ in their load alone share one."""
    built: dict[object, Stage1] = {}
    stages = {}
    for name, arm in ARMS.items():
        key = (*arm.settings.items(), arm.plain_vocoder)
        if key not in built:
            settings = EngineSettings(**{"device": device.type, **arm.settings})
            built[key] = build(device, settings, plain_vocoder=arm.plain_vocoder)
        stages[name] = built[key]
    return stages


def ablate(
    stages: Mapping[str, Stage1],
    *,
    streams: int,
    repeats: int,
    group_frames: int,
    tokens: int = TOKENS,
    warm_ups: int = 2,
    device: torch.device,
) -> list[dict[str, Any]]:
    """One row for each arm: ms to first hops, and seconds of sound per second of whole answers and of streams."""
    arms = {name: arm for name, arm in ARMS.items() if streams == 1 or not arm.for_one}
    loads = {
        name: Load(stages[name], streams, tokens, arm.group_frames or group_frames, arm.hops)
        for name, arm in arms.items()
    }
    timings: dict[str, dict[str, Timing]] = {}
    for question in ("first_hops", "whole", "streamed"):
        runs = {name: getattr(load, question) for name, load in loads.items()}
        timings[question] = measure_together(runs, repeats=repeats, warm_ups=warm_ups, device=device)
    seconds = streams * tokens / TOKEN_RATE
    rows = []
    for name in arms:
        first, whole, streamed = (timings[question][name].p50_ms for question in timings)
        rows.append(
            {
                "run": f"{streams} x, {name}",
                "first_hop_ms": round(first, 1),
                "whole_ms": round(whole, 1),
                "whole_audio_s_per_s": round(1000 * seconds / whole, 1),
                "streams_audio_s_per_s": round(1000 * seconds / streamed, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(hardware(device), flush=True)
    stages, limit = build_all(device), GROUP_FRAMES[device.type]
    rows: list[dict[str, Any]] = []
    for streams in options.streams:
        rows += ablate(stages, streams=streams, repeats=options.repeats, group_frames=limit, device=device)
    if options.out:
        write_json(options.out, given(options), device, rows)


if __name__ == "__main__":
    main()
