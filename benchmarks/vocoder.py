"""What does the vocoder cost on a GPU, by number of streams, and what an unseen reference?

    python -m benchmarks.vocoder --device cuda --out benchmarks/results/vocoder-h200.json

Weights of the released sizes are random: speed and numbers are shown, never the quality of speech. `first hop` is 76
mel frames of new streams (41 tokens after a prompt of 87), of which 68 sound; `hop` is 100 more frames in the middle of
streams; `whole` is 5 s at once. `plain` decodes one stream after another with the modules as they are loaded, f0 in
float64. The reference is 10 s at 24 kHz, from samples on the CPU to tokens, mel and speaker vector on the CPU.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import given, hardware, measure_together, row, write_json
from runtime.config import F0Config, HiFTConfig, MelConfig
from runtime.frontend.audio import resample
from runtime.frontend.mel import PromptMel
from runtime.frontend.speaker import CAMPPlus, TorchSpeakerEncoder
from runtime.frontend.speech_tokens import SpeechTokenizerNet, TorchSpeechTokenizer
from runtime.stage1.hift import HiFT
from runtime.stage1.hift_packed import Window
from runtime.stage1.noise import NoiseBank
from runtime.stage1.vocoder import MelChunk, PlainHiFT, Vocoder, build_vocoder

RELEASED = HiFTConfig(
    80, 512, 8, 24_000, 0.1, 0.003, 10.0, (8, 5, 3), (16, 11, 7), 16, 4, (3, 7, 11), ((1, 3, 5),) * 3, (7, 7, 11),
    ((1, 3, 5),) * 3, 0.1, 0.99, 4, F0Config(80, 512),
)  # fmt: skip
MEL = MelConfig(1920, 480, 1920, 80, 24_000, 0, None)
FIRST_HOP, HOP, WHOLE = 76, 100, 250  # frames


def random_hift(device: torch.device) -> HiFT:
    """Seeded weights under which every layer moves and the pitch is that of a voice."""
    torch.manual_seed(0)
    hift = HiFT(RELEASED)
    with torch.no_grad():
        for name, weight in hift.named_parameters():
            if name.endswith("original0"):  # the norm of each output channel
                weight.fill_(1.0 if "f0" in name or "resblocks" not in name else 0.5)
            if name.endswith("alpha"):
                weight.uniform_(0.5, 2.0)
        nn.init.constant_(hift.f0_predictor.classifier.bias, 140.0)
        hift.f0_predictor.classifier.weight.mul_(100)
    return hift.to(device).eval().requires_grad_(False)


def random_mel(frames: int, seed: int, device: torch.device) -> Tensor:
    return (torch.randn(80, frames, generator=torch.Generator().manual_seed(seed)) * 2 - 4).to(device)


def decibels(samples: Tensor, truth: Tensor) -> float:
    return float(10 * torch.log10(truth.square().mean() / (samples - truth).square().mean()))


@torch.inference_mode()
def deviations(vocoder: Vocoder, plain: PlainHiFT, device: torch.device) -> dict[str, float]:
    """Of the packed form: samples from the same mel and source, and pitch."""
    mel = random_mel(WHOLE, 99, device)
    source = torch.rand(WHOLE * 480, generator=torch.Generator().manual_seed(1)).to(device) - 0.5
    window = Window(mel, source, is_last=True)
    (ours,), (theirs,) = vocoder._runner.samples([window]), plain.samples([window])
    (f0,), (f0_truth,) = vocoder._runner.pitch([mel], [True]), plain.pitch([mel], [True])
    return {
        "snr_db": round(decibels(ours, theirs), 1),
        "f0_deviation_hz": float(f"{(f0 - f0_truth).abs().max():.1e}"),
        "voicing_differs": int(((f0 > 10) != (f0_truth > 10)).sum()),
    }


def arm(vocoder: Vocoder, mels: Sequence[Tensor], *, begun: Tensor | None, is_last: bool) -> Callable[[], object]:
    """A call for streams that are new, or have had the frames `begun`."""

    def run() -> object:
        return vocoder.decode_together([MelChunk(state, mel, is_last) for state, mel in zip(states, mels, strict=True)])

    def run_anew() -> object:
        nonlocal states
        states = [vocoder.open() for _ in mels]
        return run()

    states = [vocoder.open() for _ in mels]
    if begun is None:
        return run_anew
    vocoder.decode_together([MelChunk(state, begun, is_last=False) for state in states])
    return run


def vocoder_rows(device: torch.device, streams: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    hift, noise = random_hift(device), NoiseBank(device)
    noise.source_noise(0, 120 * 24_000)  # drawn on the CPU, 10 s at a time, when somebody first gets that far
    packed, plain_net = build_vocoder(hift, noise, graph_bytes=2 * 2**30), PlainHiFT(hift)
    plain = Vocoder(hift, noise, plain_net)
    apart = deviations(packed, plain_net, device)
    rows = []
    for count in streams:
        begun = random_mel(FIRST_HOP, 0, device)
        hops, wholes, firsts = (
            [random_mel(frames, seed, device) for seed in range(count)] for frames in (HOP, WHOLE, FIRST_HOP)
        )
        arms = {
            "first hop": (arm(packed, firsts, begun=None, is_last=False), FIRST_HOP - packed.delay_frames),
            "hop": (arm(packed, hops, begun=begun, is_last=False), HOP),
            "whole": (arm(packed, wholes, begun=None, is_last=True), WHOLE),
        }
        if count == 1:
            arms |= {
                "first hop, plain": (arm(plain, firsts, begun=None, is_last=False), FIRST_HOP - plain.delay_frames),
                "whole, plain": (arm(plain, wholes, begun=None, is_last=True), WHOLE),
            }
        calls = {name: call for name, (call, _) in arms.items()}
        for name, timing in measure_together(calls, repeats=repeats, warm_ups=3, device=device).items():
            seconds = count * arms[name][1] / 50
            per_second = {"ms_per_audio_s": round(timing.p50_ms / seconds, 3)}
            rows.append(row(name, timing, streams=count, **per_second, **({} if "plain" in name else apart)))
    print(packed.describe())
    return rows


@torch.inference_mode()
def reference_rows(device: torch.device, seconds: int, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    tokenizer = TorchSpeechTokenizer(SpeechTokenizerNet().requires_grad_(False), device, "random")
    speaker = TorchSpeakerEncoder(CAMPPlus().requires_grad_(False), device, "random")
    prompt_mel = PromptMel(MEL).to(device)
    samples = torch.randn(seconds * 24_000) * 0.1

    def encode() -> object:
        there = samples.to(device)
        samples_16k = resample(there, 24_000, 16_000)
        return tokenizer.encode(samples_16k), prompt_mel(there).cpu(), speaker.embed(samples_16k)

    timings = measure_together({f"reference of {seconds} s": encode}, repeats=repeats, warm_ups=3, device=device)
    return [row(name, timing) for name, timing in timings.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--reference-seconds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON with settings and hardware")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cudnn.allow_tf32 = False  # as the engine sets it
    print(hardware(device))
    rows = vocoder_rows(device, options.streams, options.repeats)
    rows += reference_rows(device, options.reference_seconds, options.repeats)
    for one in rows:
        print("  ".join(f"{name} {value}" for name, value in one.items()))
    if options.out:
        write_json(options.out, given(options), device, rows)


if __name__ == "__main__":
    main()
