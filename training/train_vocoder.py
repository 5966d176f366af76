"""Trains the vocoder: HiFT from mel to samples, first by mel distance, then against discriminators.

    python -m training.train_vocoder --corpus DIR --out DIR --start hift.safetensors --start-critics critics.safetensors

The generator sees true frames beyond its crop, starts its source at a random phase, and hears its own pitch: the f0
net learns from the teacher's pitch alone, which does not pause where a sound is unvoiced. With --start the mel phase is
skipped. With --flow-mels a share of the rows hears the mel that the flow made of the tokens, as in use; what it should
sound like stays the recording.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from runtime.config import HiFTConfig
from runtime.frontend.mel import PromptMel
from runtime.stage1.f0 import F0Predictor
from runtime.stage1.hift import HiFT
from training import flow_mels, loop
from training.corpus import FRAME, NEW_SPEAKERS, Corpus, Windows, sound
from training.discriminators import Discriminators, MelDistance, adversarial_loss, discriminator_loss, feature_loss
from training.shapes import HIFT, MEL, MEL_MEAN, MEL_SPREAD

WEIGHTS = {"mel": 15.0, "f0": 1.0, "adversarial": 1.0, "features": 2.0}
FILE, CRITICS_FILE = "hift.safetensors", "critics.safetensors"


def begin_gently(hift: HiFT) -> None:
    """From scratch: pitch starts at its scale in Hz, the output quiet, residual branches small."""
    with torch.no_grad():
        hift.f0_predictor.classifier.weight.mul_(50)
        hift.f0_predictor.classifier.bias.fill_(100)
        for conv in (hift.conv_pre, hift.f0_predictor.condnet[0]):  # as if the mel came with mean 0 and spread 1
            conv.parametrizations.weight.original0.div_(MEL_SPREAD)
            conv.bias.sub_(MEL_MEAN * conv.weight.sum((1, 2)))
        hift.conv_post.parametrizations.weight.original0.mul_(0.3)
        hift.conv_post.bias[: HIFT.istft_n_fft // 2 + 1] = -3
        for name, parameter in hift.named_parameters():
            if "convs2" in name and name.endswith("original0"):
                parameter.mul_(0.1)


class Trainer:
    def __init__(self, corpus: Corpus, options: argparse.Namespace, device: torch.device, shape: HiFTConfig) -> None:
        self.corpus, self.device, self.rows, self.frames = corpus, device, options.rows, options.frames
        self.hift = HiFT(shape).to(device)
        begin_gently(self.hift)
        # the head takes its exponent and sine in float32 also where the layers run in half precision
        self.hift.conv_post.register_forward_hook(lambda module, inputs, output: output.float())
        self.critics = Discriminators(options.period_width, options.spectrum_width).to(device)
        self.critics.to(memory_format=torch.channels_last)
        self.distance = MelDistance().to(device)
        self.extract = PromptMel(MEL).to(device)
        self.mel = corpus.mel(self.extract)
        self.flow_share = options.flow_mels
        self.flow_mel = flow_mels.load(corpus, options.corpus) if self.flow_share else None
        self.lookahead = shape.lookahead_frames + 1 + F0Predictor.lookahead_frames
        self.windows = Windows(corpus, self.frames + self.lookahead)
        # norms typically 90 to 300: the limits catch accidents only
        self.optimizer = loop.Optimizer({"hift": self.hift}, device, 0.01, (0.8, 0.99), limit=200.0)
        self.opponent = loop.Optimizer({"critics": self.critics}, device, 0.01, (0.8, 0.99), limit=100.0, average=0.0)
        self.meter = loop.Meter([*WEIGHTS, "critics"], device)
        if options.compile:
            torch._dynamo.config.recompile_limit = 64  # one class, a dozen shapes
            for block in (*self.hift.resblocks, *self.hift.source_resblocks):
                block.compile(dynamic=False)

    def start_from(self, generator: Path | None, critics: Path | None) -> None:
        if generator:
            loop.start_from(self.hift, generator, self.optimizer)
        if critics:
            loop.start_from(self.critics, critics, self.opponent)

    def capture(self, options: argparse.Namespace) -> None:
        capture = loop.Capture([self.optimizer, self.opponent], options)
        self.mel_step = capture(lambda: self.step(adversarial=False))
        self.full_step = capture(lambda: self.step(adversarial=True))

    def generate(self, mel: Tensor) -> tuple[Tensor, Tensor]:
        """Mel [B, M, frames + lookahead] -> samples [B, 480 * frames] and pitch of those frames."""
        hift = self.hift
        f0 = hift.f0_predictor(mel, is_last=False)
        harmonics = hift.config.harmonics + 1
        noise = torch.rand(len(mel), f0.shape[1] * FRAME, harmonics, device=self.device)
        turn = torch.rand(len(mel), 1, device=self.device, dtype=torch.float64) / FRAME
        phase = turn * torch.arange(1, harmonics + 1, device=self.device)
        source, _ = hift.m_source(f0.detach(), noise, phase)
        with loop.half(self.device):
            samples = hift.decode(mel[..., : f0.shape[1]], source, is_last=False)
        return samples.float(), f0[:, : self.frames]

    def step(self, adversarial: bool) -> None:
        start, _ = self.windows.draw(self.rows)
        frames = self.windows.index(start)
        heard = self.mel[frames]
        if self.flow_mel is not None:
            solved = torch.rand(len(heard), 1, 1, device=self.device) < self.flow_share
            heard = torch.where(solved, self.flow_mel[frames], heard)
        mel = heard.float().transpose(1, 2)
        ends = torch.rand(len(mel), 1, 1, device=self.device) < 0.1  # behind the last frame of speech lie zeros
        mel = torch.where(ends & (torch.arange(mel.shape[-1], device=self.device) >= self.frames), 0.0, mel)
        real = sound(self.corpus.pcm, frames[:, : self.frames])
        made, f0 = self.generate(mel.contiguous())
        parts = {
            "mel": self.distance(made, real),
            "f0": (f0 - self.corpus.hz[frames[:, : self.frames]].float()).abs().mean(),
        }
        gradients: tuple[Tensor, ...] = ()
        if adversarial:
            parts |= self.duel(real, made)
            gradients = self.opponent.gradients(parts["critics"], keep_graph=True)
        self.optimizer.step(sum(weight * parts[name] for name, weight in WEIGHTS.items() if name in parts))
        if adversarial:  # only now: the generator's gradient went through the critics' weights
            self.opponent.apply(gradients)
        self.meter.update(parts)

    def duel(self, real: Tensor, made: Tensor) -> dict[str, Tensor]:
        """One pass of the critics over both: their loss, and what the generator should mend."""
        with loop.half(self.device):
            verdicts, features = self.critics(torch.cat([real, made]))
        of_real, of_made = zip(*(verdict.chunk(2) for verdict in verdicts), strict=True)
        real_features, made_features = zip(*(feature.chunk(2) for feature in features), strict=True)
        return {
            "adversarial": adversarial_loss(of_made),
            "features": feature_loss(real_features, made_features),
            "critics": discriminator_loss(of_real, of_made),
        }

    @torch.no_grad()
    def measure(self, most: int = 48) -> dict[str, float]:
        """Copy synthesis of held-out speakers: mel and pitch distance."""
        rows = self.corpus.rows(NEW_SPEAKERS)[:most]
        generator = torch.Generator(self.device).manual_seed(5)
        total = torch.zeros(4, device=self.device)
        for group in self.corpus.batches(rows, 60):
            index, valid = self.corpus.grid(group)
            waves = sound(self.corpus.pcm, index) * valid.repeat_interleave(FRAME, 1)
            mel = self.extract(waves)
            noise = torch.rand(
                1, waves.shape[1], self.hift.config.harmonics + 1, device=self.device, generator=generator
            )
            made = self.hift(mel.transpose(1, 2), noise.expand(len(mel), -1, -1))
            pitch = self.hift.f0_predictor(mel.transpose(1, 2))
            for i, row in enumerate(group):
                start, count = self.corpus.table[row, :2]
                true = self.corpus.hz[start : start + count].float()
                heard = (self.extract(made[i : i + 1, : count * FRAME])[0] - mel[i, :count]).abs().mean()
                scales = self.distance(made[i : i + 1, : count * FRAME], waves[i : i + 1, : count * FRAME])
                off = (pitch[i, :count] - true).abs()[true > 10].mean()
                voicing = ((pitch[i, :count] > 10) != (true > 10)).float().mean()
                total += torch.stack([heard, scales, off, voicing])
        return dict(zip(("mel_l1", "scales", "f0_hz", "voicing_errors"), (total / len(rows)).tolist(), strict=True))

    def save(self, folder: Path) -> None:
        loop.save_state(folder / "vocoder.state", {"hift": self.hift}, self.optimizer)
        loop.save_weights(folder / CRITICS_FILE, self.critics.state_dict())
        self.optimizer.swap()
        loop.save_weights(folder / FILE, self.hift.state_dict())
        self.optimizer.swap()


def main() -> None:
    parser = loop.arguments(__doc__, seconds=1200, rate=3e-4)
    parser.add_argument("--start", type=Path, help="a generator to go on from")
    parser.add_argument("--start-critics", type=Path, help="its discriminators")
    parser.add_argument("--mel-share", type=float, default=0.15, help="of the run without discriminators, from scratch")
    parser.add_argument(
        "--flow-mels", type=float, default=0.0, metavar="SHARE", help="of rows on mels that training.flow_mels wrote"
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--frames", type=int, default=32, help="of 20 ms in a crop")
    parser.add_argument("--period-width", type=int, default=16)
    parser.add_argument("--spectrum-width", type=int, default=16)
    parser.add_argument("--search", action="store_true", help="let cuDNN try its algorithms and keep the fastest")
    parser.add_argument(
        "--compile", action="store_true", help="compile the generator: a minute first, then twice as fast"
    )
    train(parser.parse_args())


def train(options: argparse.Namespace, shape: HiFTConfig = HIFT) -> None:
    device = loop.prepare(options)
    torch.backends.cuda.matmul.allow_tf32 = False  # filter banks and transforms stay exact
    torch.backends.cudnn.benchmark = options.search
    trainer = Trainer(Corpus(options.corpus, device), options, device, shape)
    trainer.start_from(options.start, options.start_critics)
    resumed = loop.load_state(options.out / "vocoder.state", {"hift": trainer.hift}, trainer.optimizer)
    if resumed:
        loop.start_from(trainer.critics, options.out / CRITICS_FILE, trainer.opponent)
    trainer.capture(options)
    log = loop.Log(options.out / "vocoder.log")
    log.write(hours=round(trainer.corpus.hours, 2), resumed=resumed, started=str(options.start))
    mel_share = 0.0 if resumed or options.start else options.mel_share

    def report(clock: loop.Clock) -> None:
        trainer.optimizer.swap()
        with torch.compiler.set_stance("force_eager"):  # every length would be compiled anew
            figures = {name: round(value, 4) for name, value in trainer.measure().items()}
        trainer.optimizer.swap()
        log.write(step=clock.step, seconds=round(clock.seconds, 1), **trainer.meter.read(), held_out=figures)
        trainer.save(options.out)

    def choose(clock: loop.Clock):
        return trainer.mel_step if clock.share < mel_share else trainer.full_step

    loop.run(options, choose, [trainer.optimizer, trainer.opponent], report)


if __name__ == "__main__":
    main()
