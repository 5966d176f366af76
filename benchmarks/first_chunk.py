"""How many milliseconds pass from a request to its first samples, by concurrency and padding of the prompt?

    python -m benchmarks.first_chunk --out benchmarks/results/first-chunk-h200.json

Random weights in the released shape, hot voices (each was heard before), answers of forced length. A prompt that is not
a multiple of 25 tokens makes the first chunk longer by its padding: 75 tokens have none, 87 have 13, 76 have 24. The
column `sound_ms` says how much sound the first chunk holds; `rtf` is the whole answer's time by its seconds of sound.
"""

import argparse
import time
from typing import Any

import torch

from benchmarks.load import (
    closed_loop,
    engine_flags,
    in_effect,
    listen,
    memory_gb,
    open_pipeline,
    random_checkpoint,
    settings_of,
    speech,
    voice,
)
from benchmarks.timing import hardware, percentile, write_json
from runtime.engine import resolve_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_flags(parser)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[75, 87, 76], help="tokens of the reference")
    parser.add_argument("--tokens", type=int, default=125, help="of every answer")
    parser.add_argument("--seconds", type=float, default=10, help="of each cell")
    options = parser.parse_args()
    device, checkpoint = resolve_device(options.device), random_checkpoint(options.size)
    config = checkpoint.config
    pipeline, load_seconds = open_pipeline(checkpoint, settings_of(options))
    print(hardware(device), pipeline.describe(), flush=True)
    rows: list[dict[str, Any]] = []
    with pipeline:
        for prompt in options.prompts:
            voices = [voice(config, prompt, seed) for seed in range(8)]
            for index, each in enumerate(voices):
                listen(pipeline, speech(config, each, options.tokens, index))
            for clients in options.clients if prompt == 87 else options.clients[:1]:
                some = [speech(config, voices[seed % 8], options.tokens, seed) for seed in range(4000)]
                closed_loop(pipeline, some[:clients], clients, options.seconds)  # warm-up
                began = time.perf_counter()
                heard = closed_loop(pipeline, some[clients:], clients, options.seconds)
                wall = time.perf_counter() - began
                good = [one for one in heard if one.chunks and not one.error]
                first = [1000 * one.first for one in good]
                rows.append(
                    {
                        "run": f"{clients} clients, prompt {prompt}, padding {-prompt % 25}",
                        **{f"first_p{p}_ms": round(percentile(first, p), 1) for p in (50, 95, 99)},
                        "sound_ms": round(1000 * good[0].chunks[0][1]),
                        "rtf_p50": round(percentile([(one.ended - one.asked) / one.seconds for one in good], 50), 4),
                        "audio_s_per_s": round(sum(one.seconds for one in good) / wall, 1),
                        "requests": len(heard),
                        "failed": len(heard) - len(good),
                        "gpu_gb": memory_gb(device),
                    }
                )
                print(rows[-1], flush=True)
        settings = in_effect(options, pipeline, load_seconds)
    if options.out:
        write_json(options.out, settings, device, rows)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
