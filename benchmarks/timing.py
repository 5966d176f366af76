"""Warm-up, device sync, percentiles, and where it was measured. One file, one question; this one is asked by all."""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one run. `cpu_ms` counts the time its threads were on a core, whatever else the machine did."""

    p50_ms: float
    p99_ms: float
    best_ms: float
    cpu_ms: float  # median
    repeats: int


def measure_together(
    arms: Mapping[str, Callable[[], object]], *, repeats: int, warm_ups: int = 1, device: torch.device
) -> dict[str, Timing]:
    """Times several runs in alternation, there and back (A B B A), so that drift of the machine meets all of them."""
    walls: dict[str, list[float]] = {name: [] for name in arms}
    cpus: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(-warm_ups, repeats):
        for name in arms if turn % 2 == 0 else reversed(list(arms)):
            synchronize(device)
            wall, cpu = time.perf_counter(), time.process_time()
            arms[name]()
            synchronize(device)
            if turn >= 0:
                walls[name].append(1000 * (time.perf_counter() - wall))
                cpus[name].append(1000 * (time.process_time() - cpu))
    return {
        name: Timing(percentile(walls[name], 50), percentile(walls[name], 99), min(walls[name]), cpu, repeats)
        for name in arms
        for cpu in (statistics.median(cpus[name]),)
    }


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank: a value that was measured."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hardware(device: torch.device) -> dict[str, Any]:
    """What a figure is worth nothing without."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1_min": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of a run, as its results tell them."""
    return {name: value for name, value in vars(options).items() if name != "out"}


def write_json(path: Path, settings: Mapping[str, Any], device: torch.device, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "hardware": hardware(device), "rows": rows}, indent=2) + "\n")


def row(name: str, timing: Timing, **columns: Any) -> dict[str, Any]:
    rounded = {key: round(value, 1) for key, value in asdict(timing).items()}
    return {"run": name, **rounded, **columns}
