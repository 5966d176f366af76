"""Recordings to judge a checkpoint by: the teacher speaks held-out sentences as held-out speakers, into WAV files.

    python -m training.prompts --teacher DIR --text DIR --out DIR

`out/voices` has one prompt a speaker, a sentence of 4 to 6 s from the end of the held-out text; `out/sources` says its
first sentences by the same speakers in turn, as `benchmarks.quality --sources` wants them. The words lie beside each
as a text file. On two CPU cores it takes two minutes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch

from training.corpus import NEW_SPEAKERS
from training.speakers import Cast, Line, Sentences, held_out_speakers
from training.teacher import SAMPLE_RATE

LETTERS = range(45, 76)  # of a prompt: 4 to 6 s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True, help="folder with the teacher's weights and phoneme ids")
    parser.add_argument("--text", type=Path, required=True, help="folder with test.txt, one sentence a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sources", type=int, default=40, help="how many sentences are said to be said again")
    options = parser.parse_args()
    texts = (options.text / "test.txt").read_text(encoding="utf-8").splitlines()
    cast = Cast(options.teacher, torch.device("cpu"), 1000)
    sentences = Sentences(options.teacher / "test_tokens.npz")
    speakers = held_out_speakers(1000, 40)[::2]
    fitting = [i for i in reversed(range(len(texts))) if len(texts[i]) in LETTERS]
    record(cast, sentences, texts, fitting[: len(speakers)], speakers, options.out / "voices")
    record(cast, sentences, texts, range(options.sources), speakers, options.out / "sources")


def record(
    cast: Cast, sentences: Sentences, texts: Sequence[str], which: Sequence[int], speakers: Sequence[int], out: Path
) -> None:
    """Sentence `which[i]` by the i-th speaker, around and around, as `iii-sssss.wav` and `.txt`."""
    out.mkdir(parents=True, exist_ok=True)
    for place, sentence in enumerate(which):
        speaker = int(speakers[place % len(speakers)])
        ids = sentences.phonemes(sentence, cast.speakers[speaker].british)
        spoken = cast.speak([Line(sentence, speaker, 1.0, NEW_SPEAKERS)], [ids], seed=place)
        samples = spoken.samples[0, : int(spoken.lengths[0])].numpy()
        path = out / f"{place:03d}-{sentence:03d}.wav"
        soundfile.write(path, np.clip(samples, -1, 1), SAMPLE_RATE, "PCM_16")
        path.with_suffix(".txt").write_text(texts[sentence], encoding="utf-8")


if __name__ == "__main__":
    main()
