"""Trains the flow: speech tokens, a speaker vector and the start of the mel -> the rest of the mel.

    python -m training.train_flow --corpus DIR --out DIR --seconds 900

Flow matching with the runtime's cosine times: between noise x0 and mel x1 the velocity x1 - x0 is predicted. Windows
are cut from a speaker's stream, so a row is prompt and speech in one, as in use; a random part at its start is given
as prompt mel. Half of the steps use the chunk mask, so that one model streams and solves whole sentences.

With --phones a net beside it learns the phonemes of true mels, and the mel that a velocity points to has to be read
by it as well: a mean square alone leaves sounds between those that the tokens allow.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from runtime.config import FlowConfig
from runtime.frontend.mel import PromptMel
from runtime.stage1.conditioning import Flow
from runtime.stage1.solver import solve
from training import loop
from training.corpus import NEW_SPEAKERS, Corpus, Windows
from training.encode import Encoded
from training.heads import MelReader
from training.shapes import FLOW, MEL, MEL_MEAN

FILE = "flow.safetensors"


def begin_flow(flow: Flow) -> None:
    """Gates at zero, so that a block begins as the identity, and the mean of a mel as first answer."""
    with torch.no_grad():
        for block in flow.estimator.transformer_blocks:
            nn.init.zeros_(block.attn_norm.linear.weight)
            nn.init.zeros_(block.attn_norm.linear.bias)
        nn.init.zeros_(flow.estimator.norm_out.linear.weight)
        nn.init.zeros_(flow.estimator.norm_out.linear.bias)
        nn.init.zeros_(flow.estimator.proj_out.weight)
        nn.init.constant_(flow.estimator.proj_out.bias, MEL_MEAN)


class Trainer:
    def __init__(
        self, corpus: Corpus, encoded: Encoded, options: argparse.Namespace, device: torch.device, shape: FlowConfig
    ) -> None:
        self.corpus, self.encoded, self.device = corpus, encoded, device
        self.batch_seconds, self.drop, self.noisy = options.batch_seconds, options.drop, options.noisy
        self.flow = Flow(shape).to(device)
        begin_flow(self.flow)
        self.mel = corpus.mel(PromptMel(MEL).to(device))
        self.optimizer = loop.Optimizer({"flow": self.flow}, device, 0.01, (0.9, 0.98), limit=1.0, average=0.9995)
        self.clarity = options.phones
        self.reader = MelReader(corpus.phones).to(device)
        self.reading = loop.Optimizer({"reader": self.reader}, device, 0.01, (0.9, 0.98), limit=1.0, average=0.0)
        self.meter = loop.Meter(["velocity", "phones", "reader"], device)
        frames = [2 * max(3, int(25 * seconds)) for seconds in options.windows]
        self.windows = [Windows(corpus, count) for count in frames]
        # utterances of each speaker lie together in each stream: a speaker's vector comes from any of them
        rows = torch.from_numpy(corpus.table).to(device)
        self.row_of_frame = torch.repeat_interleave(torch.arange(len(corpus), device=device), rows[:, 1])
        self.streams = torch.from_numpy(corpus.streams).to(device)
        if options.compile:
            torch._dynamo.config.recompile_limit = 64
            for block in self.flow.estimator.transformer_blocks:
                block.compile(dynamic=False)

    def capture(self, options: argparse.Namespace) -> None:
        capture = loop.Capture([self.optimizer, self.reading], options)
        self.steps = [
            capture(lambda w=w, c=chunked: self.step(w, c)) for w in self.windows for chunked in (False, True)
        ]

    def batch(self, windows: Windows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, P], speaker vectors [B, E], mel [B, M, F] and phonemes [B, F] of random windows."""
        rows = max(2, int(self.batch_seconds * 50 / windows.frames))
        start, _ = windows.draw(rows)
        index = windows.index(start)
        token = index[:, ::2] // 2
        noisy = torch.rand(rows, 1, device=self.device) < self.noisy
        tokens = torch.where(noisy, self.encoded.noisy[token], self.encoded.tokens[token])
        stream = torch.searchsorted(self.streams[:, 0].contiguous(), start, right=True) - 1
        first, last = self.streams[stream, 0], self.streams[stream, 1]
        other = (
            (first + (last - first) * torch.rand(rows, device=self.device)).long().clamp(max=len(self.row_of_frame) - 1)
        )
        mel = self.mel[index].float().transpose(1, 2)
        return tokens, self.encoded.speakers[self.row_of_frame[other]], mel, self.corpus.phone[index]

    def step(self, windows: Windows, chunked: bool) -> None:
        tokens, voice, mel, phone = self.batch(windows)
        rows, frames = len(mel), mel.shape[-1]
        keep = (torch.rand(rows, device=self.device) >= self.drop).float()[:, None, None]
        prompted = torch.rand(rows, device=self.device) < 0.8
        given = torch.rand(rows, device=self.device) * 0.75 * frames * prompted
        known = (torch.arange(frames, device=self.device) < given[:, None])[:, None]
        time = 1 - torch.cos(torch.rand(rows, device=self.device) * (0.5 * math.pi))
        noise = torch.randn_like(mel)
        at = time[:, None, None]
        with loop.half(self.device):
            mu = self.flow.mu(tokens, is_last=True) * keep
            speaker = self.flow.speaker(voice) * keep[:, 0]
            velocity = self.flow.estimator(
                torch.lerp(noise, mel, at), None, mu, time, speaker, mel * known * keep, chunked=chunked
            )
        wrong = (velocity.float() - (mel - noise)).square().mean(1, keepdim=True)
        weight = 1 - 0.9 * known.float()  # the prompt is only cut off: it matters little
        parts = {"velocity": (wrong * weight).sum() / weight.sum()}
        if self.clarity:
            made = torch.lerp(noise, mel, at) + (1 - at) * velocity.float()
            parts |= self.read(mel, made, phone, (at * keep * ~known)[:, 0])
        self.optimizer.step(parts["velocity"] + self.clarity * parts.get("phones", 0.0))
        if self.clarity:  # only now: the flow's gradient went through the reader's weights
            self.reading.step(parts["reader"])
        self.meter.update(parts)

    def read(self, mel: Tensor, made: Tensor, phone: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """How wrong the reader has true mels [B, M, F], a little noisy, and those `made`, by weights [B, F]."""
        noisy = mel + 0.5 * torch.rand(len(mel), 1, 1, device=self.device) * torch.randn_like(mel)
        with loop.half(self.device):
            true, unclear = self.reader.loss(noisy, phone).mean(), self.reader.loss(made, phone)
        # a reader that cannot read yet has no say
        trust = true.detach().neg().exp()
        return {"reader": true, "phones": trust * (unclear * weight).sum() / weight.sum().clamp_min(1)}

    def choose(self, clock: loop.Clock):
        return self.steps[clock.step % len(self.steps)]

    @torch.no_grad()
    def measure(self, most: int = 64) -> dict[str, float]:
        """Held-out speakers, the first two fifths of an utterance given: mel distance of the solved rest."""
        rows = self.corpus.rows(NEW_SPEAKERS)[:most]
        generator = torch.Generator(self.device).manual_seed(5)
        result = {}
        for name, chunked in (("whole", False), ("chunked", True)):
            total = count = 0.0
            for group in self.corpus.batches(rows, 120):
                frames = int(self.corpus.table[group, 1].min())
                start = torch.from_numpy(self.corpus.table[group, 0]).to(self.device)
                index = start[:, None] + torch.arange(frames, device=self.device)
                mel = self.mel[index].float().transpose(1, 2)
                given = frames * 2 // 5
                cond = torch.where(torch.arange(frames, device=self.device) < given, mel, 0.0)
                noise = torch.randn(mel.shape, device=self.device, generator=generator)
                solved = solve(
                    self.flow.estimator,
                    noise,
                    self.flow.mu(self.encoded.tokens[index[:, ::2] // 2], is_last=True),
                    self.flow.speaker(self.encoded.speakers[group]),
                    cond,
                    steps=self.flow.config.euler_steps,
                    rate=self.flow.config.guidance_rate,
                    chunked=chunked,
                )
                total += float((solved - mel)[..., given:].abs().mean(1).sum())
                count += len(group) * (frames - given)
            result[f"mel_l1_{name}"] = round(total / count, 4)
        return result

    def save(self, folder: Path) -> None:
        loop.save_state(folder / "flow.state", {"flow": self.flow}, self.optimizer)
        self.optimizer.swap()
        loop.save_weights(folder / FILE, self.flow.state_dict())
        self.optimizer.swap()


def main() -> None:
    parser = loop.arguments(__doc__, seconds=900, rate=1e-3)
    parser.add_argument("--start", type=Path, help="a flow to go on from")
    parser.add_argument("--batch-seconds", type=float, default=1000, help="seconds of speech in a step")
    parser.add_argument(
        "--windows", type=float, nargs="+", default=[4, 8, 16], help="window lengths in seconds, in turn"
    )
    parser.add_argument("--drop", type=float, default=0.2, help="share of rows without any conditioning, for guidance")
    parser.add_argument("--noisy", type=float, default=0.25, help="share of rows whose tokens come from spoiled sound")
    parser.add_argument(
        "--phones", type=float, default=0.0, metavar="WEIGHT", help="of the phonemes that the mel must tell"
    )
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    train(parser.parse_args())


def train(options: argparse.Namespace, shape: FlowConfig = FLOW) -> None:
    device = loop.prepare(options)
    corpus = Corpus(options.corpus, device)
    trainer = Trainer(corpus, Encoded.load(options.corpus, device), options, device, shape)
    if options.start:
        loop.start_from(trainer.flow, options.start, trainer.optimizer, "flow")
    resumed = loop.load_state(options.out / "flow.state", {"flow": trainer.flow}, trainer.optimizer)
    trainer.capture(options)
    log = loop.Log(options.out / "flow.log")
    log.write(hours=round(corpus.hours, 2), resumed=resumed, started=str(options.start))

    def report(clock: loop.Clock) -> None:
        trainer.optimizer.swap()
        with torch.compiler.set_stance("force_eager"):  # every length would be compiled anew
            figures = trainer.measure()
        trainer.optimizer.swap()
        log.write(step=clock.step, seconds=round(clock.seconds, 1), **trainer.meter.read(), held_out=figures)
        trainer.save(options.out)

    loop.run(options, trainer.choose, [trainer.optimizer, trainer.reading], report)


if __name__ == "__main__":
    main()
