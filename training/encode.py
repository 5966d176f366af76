"""Corpus -> what stage 0 and the flow are trained on: speech tokens, and a speaker vector per utterance.

    python -m training.encode --corpus DIR --tokenizer FILE --speaker FILE

Each utterance is encoded by itself, as a reference clip is. A second set of tokens comes from lightly spoiled sound:
real prompts are noisy, and their tokens differ. Written beside the corpus as `encoded.safetensors`.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.frontend.audio import resample
from runtime.frontend.mel import KaldiFbank, WhisperLogMel
from runtime.frontend.speaker import CAMPPlus, CAMPPlusConfig
from runtime.frontend.speech_tokens import SpeechTokenizerConfig, SpeechTokenizerNet
from training.augment import add_noise, uniform
from training.corpus import FRAME, FRAME_16K, Corpus, sound
from training.shapes import SPEAKER, TOKENIZER

FILE = "encoded.safetensors"
SPEAKER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens on the corpus grid: token i covers frames 2i and 2i + 1."""

    tokens: Tensor  # [F / 2] int64
    noisy: Tensor  # [F / 2] int64
    speakers: Tensor  # [U, E]

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "Encoded":
        stored = load_file(folder / FILE)
        tokens, noisy = (stored[name].long().to(device) for name in ("tokens", "noisy"))
        return cls(tokens, noisy, stored["speakers"].float().to(device))


def load_net(net: torch.nn.Module, path: Path, device: torch.device) -> torch.nn.Module:
    """Fills a net from exported half-precision weights."""
    weights = load_file(path)
    net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in weights.items()})
    return net.to(device).eval().requires_grad_(False)


@torch.no_grad()
def encode(corpus: Corpus, tokenizer: SpeechTokenizerNet, speaker: CAMPPlus) -> Encoded:
    device = corpus.device
    log_mel, fbank = WhisperLogMel().to(device), KaldiFbank().to(device)
    tokens = torch.zeros(len(corpus.phone) // 2, dtype=torch.int16, device=device)
    noisy = torch.zeros_like(tokens)
    speakers = torch.zeros(len(corpus), speaker.config.embedding_size, device=device)
    clip = int(SPEAKER_SECONDS * 50)
    for group in corpus.batches(np.arange(len(corpus)), 600):
        index, valid = corpus.grid(group)
        samples = sound(corpus.pcm, index) * valid.repeat_interleave(FRAME, 1)
        wave, frames = resample(samples, 24_000, 16_000), valid.sum(1)
        spoiled = add_noise(wave, uniform(len(wave), 15, 35, device), uniform(len(wave), 0, 2, device))
        for source, target in ((wave, tokens), (spoiled * valid.repeat_interleave(FRAME_16K, 1), noisy)):
            ids = tokenizer(log_mel(source), frames * 2).to(torch.int16)
            target[index[:, ::2][valid[:, ::2]] // 2] = ids[valid[:, ::2]]
        # the first seconds speak for the utterance; a shorter one is repeated
        at = torch.arange(clip * FRAME_16K, device=device) % (frames[:, None] * FRAME_16K)
        speakers[group] = speaker(fbank(wave.gather(1, at))).float()
    return Encoded(tokens, noisy, speakers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.safetensors")
    parser.add_argument("--speaker", type=Path, required=True, help="speaker.safetensors")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    write(options)


def write(
    options: argparse.Namespace, tokenizer: SpeechTokenizerConfig = TOKENIZER, speaker: CAMPPlusConfig = SPEAKER
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device(options.device)
    corpus = Corpus(options.corpus, device)
    torch.manual_seed(0)
    encoded = encode(
        corpus,
        load_net(SpeechTokenizerNet(tokenizer), options.tokenizer, device),
        load_net(CAMPPlus(speaker), options.speaker, device),
    )
    tensors = {"tokens": encoded.tokens, "noisy": encoded.noisy, "speakers": encoded.speakers.half()}
    save_file({name: value.cpu() for name, value in tensors.items()}, options.corpus / FILE)
    same = (encoded.tokens == encoded.noisy).float().mean()
    print(
        f"{len(encoded.tokens)} tokens, {encoded.tokens.unique().numel()} different; {same:.3f} survive noise",
        flush=True,
    )


if __name__ == "__main__":
    main()
