"""How many seconds of sound does a second make, by concurrency, streamed and whole, closed and open loop?

    python -m benchmarks.throughput --out benchmarks/results/throughput-h200.json

Random weights in the released shape, eight hot voices of 87 tokens, a seeded list of answers: log-normal around 5 s,
every twentieth of 20 to 30 s, lengths forced. In the closed loop each client asks again when it has heard everything;
in the open one requests come at random times at a given rate. An underrun is a moment at which a listener's sound ran
out, who began to play at the first chunk (`underruns_0`) or 400 ms after it (`underruns_400`). `compiled` and
`captured` count the kernels and graphs that were made after the engine was ready, up to the end of the row.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.late_work import counted
from benchmarks.load import (
    Heard,
    closed_loop,
    engine_flags,
    in_effect,
    listen,
    memory_gb,
    mixed_tokens,
    open_loop,
    open_pipeline,
    random_checkpoint,
    settings_of,
    speech,
    voice,
)
from benchmarks.timing import hardware, percentile, write_json
from runtime.engine import resolve_device


def figures(heard: Sequence[Heard], wall: float) -> dict[str, Any]:
    good = [one for one in heard if one.chunks and not one.error]
    if not good:
        return {"requests": len(heard), "failed": len(heard), "error": heard[0].error if heard else "none was served"}
    first = [1000 * one.first for one in good]
    gaps = [1000 * (b[0] - a[0]) for one in good for a, b in zip(one.chunks, one.chunks[1:], strict=False)]
    return {
        "audio_s_per_s": round(sum(one.seconds for one in good) / wall, 1),
        "requests_per_s": round(len(good) / wall, 2),
        "mean_audio_s": round(sum(one.seconds for one in good) / len(good), 2),
        **{f"first_p{p}_ms": round(percentile(first, p), 1) for p in (50, 95, 99)},
        "between_chunks_p99_ms": round(percentile(gaps, 99), 1) if gaps else None,
        **{f"underruns_{round(1000 * b)}": sum(one.underruns(b) for one in good) for b in (0.0, 0.4)},
        "requests": len(heard),
        "failed": len(heard) - len(good),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_flags(parser)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second of the open loop")
    parser.add_argument("--delivery", nargs="+", choices=("streamed", "whole"), default=["streamed", "whole"])
    parser.add_argument("--prompt", type=int, default=87, help="tokens of the reference")
    parser.add_argument("--seconds", type=float, default=20, help="of each cell")
    options = parser.parse_args()
    device, checkpoint = resolve_device(options.device), random_checkpoint(options.size)
    config = checkpoint.config
    pipeline, load_seconds = open_pipeline(checkpoint, settings_of(options))
    print(hardware(device), pipeline.describe(), flush=True)
    voices = [voice(config, options.prompt, seed) for seed in range(8)]
    rows: list[dict[str, Any]] = []
    with pipeline, counted() as late:
        for index, each in enumerate(voices):
            listen(pipeline, speech(config, each, 125, index))
        for delivery in options.delivery:
            some = [
                speech(config, voices[seed % 8], tokens, seed, streaming=delivery == "streamed")
                for seed, tokens in enumerate(mixed_tokens(4000, 0))
            ]
            for clients in options.clients:
                closed_loop(pipeline, some[-2 * clients :], clients, options.seconds)  # warm-up
                began = time.perf_counter()
                heard = closed_loop(pipeline, some, clients, options.seconds)
                rows.append({"run": f"{delivery}, {clients} clients"} | figures(heard, time.perf_counter() - began))
                rows[-1] |= {"gpu_gb": memory_gb(device), "compiled": late.compilations, "captured": late.captures}
                print(rows[-1], flush=True)
            for rate in options.rates:
                began = time.perf_counter()
                heard = open_loop(pipeline, some, rate, options.seconds)
                rows.append({"run": f"{delivery}, {rate:g} a second"} | figures(heard, time.perf_counter() - began))
                rows[-1] |= {"gpu_gb": memory_gb(device), "compiled": late.compilations, "captured": late.captures}
                print(rows[-1], flush=True)
        settings = in_effect(options, pipeline, load_seconds)
    if options.out:
        write_json(options.out, settings, device, rows)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
