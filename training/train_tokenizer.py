"""Trains the speech tokenizer: whisper mel -> eight ternary digits per 40 ms that tell words and intonation.

    python -m training.train_tokenizer --corpus DIR --out DIR --seconds 480

The digits are rounded with a straight-through gradient and read by heads.py. After a third of the run each window is
heard twice, clean and spoiled, and both must give the same levels, away from the rounding edges.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from runtime.frontend.mel import PromptMel, WhisperLogMel
from runtime.frontend.speech_tokens import CODEBOOK, Quantizer, SpeechTokenizerConfig, SpeechTokenizerNet
from training import loop
from training.augment import add_noise, augment
from training.corpus import FRAME_16K, NEW_SPEAKERS, Corpus, Windows, sound
from training.heads import Heads, Prosody, losses
from training.shapes import MEL, TOKENIZER

WEIGHTS = {"phone": 1.0, "context": 0.5, "f0": 0.5, "voicing": 0.5, "energy": 0.3, "mel": 0.3, "same": 1.0, "edge": 0.2}
FILE = "tokenizer.safetensors"


class SpectralDepthwise(nn.Conv1d):
    """The memory's depthwise convolution through the FFT: on a GPU much faster to differentiate, the same weights."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, time = self.kernel_size[0], x.shape[-1]
        size = time + kernel - 1 + (time + kernel - 1) % 2
        taps = torch.fft.rfft(self.weight[:, 0].float().flip(-1), n=size)
        y = torch.fft.irfft(torch.fft.rfft(x.float(), n=size) * taps, n=size)
        return y[..., kernel // 2 : kernel // 2 + time]


def speed_up(net: SpeechTokenizerNet, device: torch.device) -> None:
    """Exchanges the slow convolutions of a net that trains on a GPU."""
    if device.type != "cuda":
        return
    for block in net.encoder.blocks:
        slow = block.attn.fsmn_block
        fast = SpectralDepthwise(
            slow.in_channels, slow.out_channels, slow.kernel_size[0], groups=slow.groups, bias=False
        )
        fast.weight = slow.weight
        block.attn.fsmn_block = fast


class Trainer:
    def __init__(
        self, corpus: Corpus, options: argparse.Namespace, device: torch.device, shape: SpeechTokenizerConfig
    ) -> None:
        self.corpus, self.device, self.batch_seconds = corpus, device, options.batch_seconds
        self.net = SpeechTokenizerNet(shape).to(device)
        speed_up(self.net, device)
        self.heads = Heads(corpus.phones, corpus.speakers).to(device)
        self.log_mel = WhisperLogMel(shape.mel_bins).to(device)
        self.wave16 = corpus.at_16k()
        self.mel = corpus.mel(PromptMel(MEL).to(device))
        self.prosody = Prosody(corpus, self.mel)
        self.modules = {"net": self.net, "heads": self.heads}
        self.optimizer = loop.Optimizer(self.modules, device, decay=0.02, betas=(0.9, 0.98), limit=1.0)
        self.meter = loop.Meter([*WEIGHTS], device)
        capture = loop.Capture([self.optimizer], options)
        lengths = [2 * max(1, int(25 * seconds)) for seconds in options.windows]
        self.windows = [Windows(corpus, frames) for frames in lengths]
        self.single = [capture(lambda w=w: self.step(w, twice=False)) for w in self.windows]
        self.double = [capture(lambda w=w: self.step(w, twice=True)) for w in self.windows]

    def levels(self, wave: Tensor, frames: Tensor | None = None) -> Tensor:
        """16 kHz [B, N] -> levels [B, P, 8]; `frames` [B] of 10 ms where clips differ in length."""
        feats = self.log_mel(wave)
        if frames is None:
            frames = torch.full((len(wave),), feats.shape[-1], device=wave.device)
        with loop.half(self.device):
            hidden = self.net.hidden(feats, frames)
        return self.net.quantizer.levels(hidden.float())

    def step(self, windows: Windows, twice: bool) -> None:
        rows = max(2, int(self.batch_seconds * 50 / windows.frames))
        start, speaker = windows.draw(rows // 2 if twice else rows)
        index = windows.index(start)
        wave = sound(self.wave16, index)
        if twice:
            wave, index, speaker = torch.cat([wave, wave]), torch.cat([index, index]), torch.cat([speaker, speaker])
        clean = torch.rand(len(wave), 1, device=self.device) < 0.15
        if twice:  # the first view is clean half of the time
            first = torch.arange(len(wave), device=self.device)[:, None] < len(wave) // 2
            clean = torch.where(first, torch.rand(len(wave), 1, device=self.device) < 0.5, clean)
        levels = self.levels(torch.where(clean, wave, augment(wave)))
        digits = levels + (levels.round() - levels).detach()
        with loop.half(self.device):
            outputs = self.heads(digits, speaker)
        p = self.prosody
        parts = losses(
            outputs, self.corpus.phone[index], p.f0[index], p.voiced[index], p.energy[index], self.mel[index]
        )
        if twice:
            one, other = levels.chunk(2)
            parts["same"] = (one - other).square().mean()
            parts["edge"] = (levels - levels.detach().round()).square().mean()
        self.optimizer.step(sum(WEIGHTS[name] * part for name, part in parts.items()))
        self.meter.update(parts)

    def choose(self, clock: loop.Clock):
        graphs = self.single if clock.share < 1 / 3 else self.double
        return graphs[clock.step % len(graphs)]

    @torch.no_grad()
    def measure(self, most: int = 200) -> dict[str, object]:
        """Clean held-out speech of held-out speakers: what one token tells, and how many survive 20 dB of noise."""
        rows = self.corpus.rows(NEW_SPEAKERS)[:most]
        right, scored, context, same, tokens = 0, 0, 0, 0, []
        pitch: list[tuple[Tensor, Tensor]] = []
        for group in self.corpus.batches(rows, 300):
            wave, index, valid = self.clips(group)
            levels = self.levels(wave, valid.sum(1) * 2)
            ids = Quantizer.ids(levels)
            noisy = Quantizer.ids(self.levels(add_noise(wave, 20.0, 1.0), valid.sum(1) * 2))
            per_token = valid[:, ::2]
            tokens.append(ids[per_token])
            same += int((ids == noisy)[per_token].sum())
            alone, in_context, prosody, _ = self.heads(
                levels.round(), torch.zeros(len(ids), dtype=torch.long, device=self.device)
            )
            phone = self.corpus.phone[index]
            use = valid & (phone != 255) & (phone != 0)
            right += int((alone.argmax(-1) == phone)[use].sum())
            context += int((in_context.argmax(-1) == phone)[use].sum())
            scored += int(use.sum())
            voiced = valid & self.prosody.voiced[index]
            pitch.append((prosody[:, 0][voiced].float(), self.prosody.f0[index][voiced].float()))
        every = torch.cat(tokens)
        counts = torch.bincount(every.long(), minlength=CODEBOOK).double()
        share = counts[counts > 0] / counts.sum()
        return {
            "phone_alone": round(right / max(scored, 1), 4),
            "phone_context": round(context / max(scored, 1), 4),
            "f0_correlation": round(
                float(torch.corrcoef(torch.stack([torch.cat(x) for x in zip(*pitch, strict=True)]))[0, 1]), 4
            ),
            "same_at_20_db": round(same / len(every), 4),
            "bits": round(float(-(share * share.log2()).sum()), 3),
            "codes": int((counts > 0).sum()),
            "tokens": len(every),
        }

    def clips(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Whole utterances: 16 kHz [B, N], frame indices [B, F] and which of them are real."""
        index, valid = self.corpus.grid(rows)
        return sound(self.wave16, index) * valid.repeat_interleave(FRAME_16K, 1), index, valid

    def save(self, folder: Path) -> None:
        loop.save_state(folder / "tokenizer.state", self.modules, self.optimizer)
        self.optimizer.swap()
        loop.save_weights(folder / FILE, self.net.state_dict())
        self.optimizer.swap()


def main() -> None:
    parser = loop.arguments(__doc__, seconds=480, rate=1e-3)
    parser.add_argument("--batch-seconds", type=float, default=768, help="seconds of speech in a step")
    parser.add_argument(
        "--windows", type=float, nargs="+", default=[4, 2, 8], help="window lengths in seconds, in turn"
    )
    train(parser.parse_args())


def train(options: argparse.Namespace, shape: SpeechTokenizerConfig = TOKENIZER) -> None:
    device = loop.prepare(options)
    trainer = Trainer(Corpus(options.corpus, device), options, device, shape)
    resumed = loop.load_state(options.out / "tokenizer.state", trainer.modules, trainer.optimizer)
    log = loop.Log(options.out / "tokenizer.log")
    log.write(hours=round(trainer.corpus.hours, 2), resumed=resumed, phones=trainer.corpus.phones)

    def report(clock: loop.Clock) -> None:
        trainer.optimizer.swap()
        figures = trainer.measure()
        trainer.optimizer.swap()
        log.write(step=clock.step, seconds=round(clock.seconds, 1), **trainer.meter.read(), held_out=figures)
        if not math.isfinite(trainer.meter.read()["phone"]):
            raise FloatingPointError("the loss is no number any more; resume from the last state with a lower --rate")
        trainer.save(options.out)

    loop.run(options, trainer.choose, [trainer.optimizer], report)


if __name__ == "__main__":
    main()
