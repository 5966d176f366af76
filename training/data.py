"""Makes the corpus: the teacher speaks the text as many synthetic speakers, with labels, into one shard per process.

    python -m training.data --teacher DIR --text DIR --out DIR --hours 20 --shard 0/2

Everything follows from the seed and the shard, so a corpus is made again rather than kept: 40 hours take three minutes
on two H200.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from runtime.frontend.audio import resample
from training.corpus import FRAME, FRAME_16K, Recording, Utterance, write_shard
from training.labels import Phones, label
from training.speakers import Cast, Line, Sentences, batches, plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True, help="folder with the teacher's weights and phoneme ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=40, help="of all shards together")
    parser.add_argument("--shard", default="0/1", help="which of how many")
    parser.add_argument("--speakers", type=int, default=1000)
    parser.add_argument("--held-out", type=int, default=40, help="speakers kept for tests")
    parser.add_argument("--test-sentences", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further batch is begun")
    parser.add_argument("--frames", type=int, default=24_000, help="duration frames (25 ms) per batch")
    parser.add_argument("--threads", type=int, default=6, help="of the CPU; processes on one host must not crowd it")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    synthesise(options)


def synthesise(options: argparse.Namespace) -> None:
    """Speaks this shard's share of the plan and writes it."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    began = time.monotonic()
    shard, shards = map(int, options.shard.split("/"))
    cast = Cast(options.teacher, torch.device(options.device), options.speakers)
    train, test = (Sentences(options.teacher / f"{name}_tokens.npz") for name in ("train", "test"))
    phones = Phones(train.alphabet())
    lines = plan(cast, train, test, options.hours, options.held_out, options.seed, options.test_sentences)
    lines = share(lines, shard, shards)
    ids = [
        (train if line.split == 0 else test).phonemes(line.sentence, cast.speakers[line.speaker].british)
        for line in lines
    ]
    expected = np.array([len(row) * 2.9 / line.speed + 20 for row, line in zip(ids, lines, strict=True)])
    order = list(batches(expected, options.frames))
    # tests first, the rest in random order: a budget then cuts at random, not the short sentences
    tests = {i for i, line in enumerate(lines) if line.split}
    random = np.random.default_rng(3).permutation(len(order))
    groups = sorted((order[i] for i in random), key=lambda group: not tests.intersection(group))
    recordings: list[Recording] = []
    for number, group in enumerate(groups):
        if time.monotonic() - began > options.budget:
            break
        recordings += speak(
            cast, [lines[i] for i in group], [ids[i] for i in group], phones, options.seed * 100_003 + number
        )
    seconds = sum(row.utterance.frames for row in recordings) / 50
    spent = time.monotonic() - began
    path = options.out / f"corpus-{shard}.safetensors"
    write_shard(path, len(phones), recordings)
    voiced = torch.cat([row.voiced for row in recordings]).float().mean()
    print(
        f"{path.name}: {len(recordings)} of {len(lines)} utterances, {seconds / 3600:.2f} h in {spent:.0f} s "
        f"({seconds / spent:.0f} times real time), voiced {voiced:.3f}, written after {time.monotonic() - began:.0f} s",
        flush=True,
    )


def share(lines: list[Line], shard: int, shards: int) -> list[Line]:
    """A run of the training lines, so that every shard has every speaker; the tests lie in the first shard."""
    training = [line for line in lines if line.split == 0]
    tests = [line for line in lines if line.split] if shard == 0 else []
    return training[len(training) * shard // shards : len(training) * (shard + 1) // shards] + tests


def speak(cast: Cast, lines: list[Line], ids: list[np.ndarray], phones: Phones, seed: int) -> list[Recording]:
    """One batch, on the grid of 20 ms frames and whole tokens, with its labels; results lie on the CPU."""
    spoken = cast.speak(lines, ids, seed)
    tokens = -(-spoken.lengths // (2 * FRAME))  # the last one filled up with silence
    frames = 2 * int(tokens.max())
    wave = F.pad(spoken.samples, (0, max(0, frames * FRAME - spoken.samples.shape[1])))[:, : frames * FRAME]
    wave16 = resample(wave, 24_000, 16_000)[:, : frames * FRAME_16K]
    phone, hz, voiced = (values.cpu() for values in label(spoken, wave16, ids, phones, frames))
    pcm = (wave.clamp(-1, 1) * 32767).round().to(torch.int16).cpu()
    return [
        Recording(
            Utterance(count, line.speaker, line.split, line.sentence),
            pcm[i, : count * FRAME].clone(),
            phone[i, :count].clone(),
            hz[i, :count].half(),
            voiced[i, :count].clone(),
        )
        for i, (line, count) in enumerate(zip(lines, (2 * tokens).tolist(), strict=True))
    ]


if __name__ == "__main__":
    main()
