"""Trains the speaker encoder: CAM++ that agrees with a d-vector model of real voices and tells synthetic ones apart.

    python -m training.train_speaker --corpus DIR --out DIR --dvectors FILE --seconds 480

Two teachers: the d-vector of the same, clean sound (its mean over all speakers taken out first, else that mean alone
would satisfy it), and from a third of the run on an angular-margin softmax over speakers that are no near twins.
Voices are stretched by up to 15 % in pitch and formants, so that they are not only the teacher's.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.frontend.mel import KaldiFbank
from runtime.frontend.speaker import CAMPPlus, CAMPPlusConfig
from training import loop
from training.augment import augment
from training.corpus import NEW_SPEAKERS, Corpus, Windows, sound
from training.dvector import DVector
from training.shapes import SPEAKER

DISTILL, MARGIN, SCALE = 5.0, 0.2, 30.0
TWINS = 0.85  # d-vectors closer than this count as one speaker
FILE = "speaker.safetensors"


class Classes(nn.Module):
    """Angular-margin softmax over those speakers that are no near twin of an earlier one."""

    label: Tensor
    mean: Tensor

    def __init__(self, size: int, label: Tensor, mean: Tensor) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(len(label), size) * 0.05)
        self.register_buffer("label", label)  # [speakers]: own class, or -100 for a twin
        self.register_buffer("mean", mean)  # of all d-vectors

    def forward(self, vector: Tensor, label: Tensor, margin: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(vector), F.normalize(self.centres)).clamp(-1 + 1e-6, 1 - 1e-6)
        at = label.clamp(min=0)[:, None]
        own = cosine.gather(1, at)
        moved = own * margin.cos() - (1 - own.square()).sqrt() * margin.sin()
        moved = torch.where(own > (math.pi - margin).cos(), moved, own - margin.sin() * margin)
        scores = SCALE * cosine.scatter(1, at, moved)
        total = F.cross_entropy(scores.masked_fill(self.label < 0, -1e4), label, ignore_index=-100, reduction="sum")
        return total / (label >= 0).sum().clamp(min=1)


class Trainer:
    def __init__(
        self, corpus: Corpus, options: argparse.Namespace, device: torch.device, shape: CAMPPlusConfig
    ) -> None:
        self.corpus, self.device, self.batch_seconds = corpus, device, options.batch_seconds
        self.wave16 = corpus.at_16k()
        self.dvector = DVector(options.dvectors).to(device)
        label, mean = self._distinct_speakers()
        self.net = CAMPPlus(shape).to(device)
        if device.type == "cuda":
            self.net.head.to(memory_format=torch.channels_last)
        self.classes = Classes(shape.embedding_size, label, mean).to(device)
        self.bridge = nn.Linear(shape.embedding_size, 256).to(device)
        self.fbank = KaldiFbank(shape.feat_dim).to(device)
        self.modules = {"net": self.net, "classes": self.classes, "bridge": self.bridge}
        # no average of weights: those of the batch norms would belong to other weights
        self.optimizer = loop.Optimizer(self.modules, device, 0.05, (0.9, 0.99), limit=5.0, average=0.0)
        self.margin = torch.zeros((), device=device)
        self.angular = torch.zeros((), device=device)  # weight of the softmax
        self.meter = loop.Meter(["distill", "angular"], device)
        capture = loop.Capture([self.optimizer], options)
        self.windows = [Windows(corpus, int(50 * seconds)) for seconds in options.windows]
        self.net.train()
        self.graphs = [capture(lambda w=w: self.step(w)) for w in self.windows]

    def _distinct_speakers(self) -> tuple[Tensor, Tensor]:
        """Class of each speaker (itself, or -100 for a twin of an earlier one) and the mean d-vector of all."""
        windows = Windows(self.corpus, 100)
        total = torch.zeros(self.corpus.speakers, 256, device=self.device)
        for _ in range(max(1, self.corpus.speakers // 10)):
            start, speaker = windows.draw(64)
            total.index_add_(0, speaker, self.dvector(sound(self.wave16, windows.index(start))))
        known = total.square().sum(1) > 0
        vectors = F.normalize(total, dim=1)
        cosine = (vectors @ vectors.T).cpu()
        label = torch.full((self.corpus.speakers,), -100)
        chosen: list[int] = []
        for speaker in known.nonzero().flatten().tolist():
            if not chosen or cosine[speaker, chosen].max() < TWINS:
                label[speaker] = speaker
                chosen.append(speaker)
        return label.to(self.device), vectors[known].mean(0)

    def target(self, clean: Tensor) -> Tensor:
        return F.normalize(self.dvector(clean) - self.classes.mean, dim=-1)

    def step(self, windows: Windows) -> None:
        rows = max(2, int(self.batch_seconds * 50 / windows.frames))
        start, speaker = windows.draw(rows)
        wave = sound(self.wave16, windows.index(start))
        wave, natural = self.stretch(wave)
        target = self.target(wave)
        fbank = self.fbank(augment(wave, noisy=0.6, snr_db=(3.0, 30.0)))
        with loop.half(self.device):
            vector = self.net(fbank)
        vector = vector.float()
        parts = {
            "distill": 1 - F.cosine_similarity(self.bridge(vector), target).mean(),
            "angular": self.classes(vector, torch.where(natural, self.classes.label[speaker], -100), self.margin),
        }
        self.optimizer.step(DISTILL * parts["distill"] + self.angular * parts["angular"])
        self.meter.update(parts)

    def stretch(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        """Reads half of the rows faster or slower; says which rows kept their voice."""
        rows, samples = wave.shape
        natural = torch.rand(rows, device=self.device) < 0.5
        factor = torch.where(natural, 1.0, torch.exp((torch.rand(rows, device=self.device) * 2 - 1) * 0.15))
        keep = int(samples / math.exp(0.15)) - 1  # all rows end inside their window
        position = torch.arange(keep, device=self.device) * factor[:, None]
        left = position.long()
        right = wave.gather(1, left + 1)
        return torch.lerp(wave.gather(1, left), right, position - left), natural

    def choose(self, clock: loop.Clock):
        self.angular.fill_(0.0 if clock.share < 1 / 3 else 0.2)
        self.margin.fill_(MARGIN * min(1.0, max(0.0, (clock.share - 1 / 3) * 3)))
        return self.graphs[clock.step % len(self.graphs)]

    @torch.no_grad()
    def measure(self) -> dict[str, object]:
        """Held-out speakers: equal error rate over all pairs, ours and the d-vectors', and how far both agree."""
        self.net.eval()
        rows = [int(row) for row in self.corpus.rows(NEW_SPEAKERS) if self.corpus.table[row, 1] >= 90]
        ours, theirs, agree = [], [], []
        for row in rows:
            start, frames = self.corpus.table[row, :2]
            wave = sound(self.wave16, torch.arange(start, start + frames, device=self.device)[None])
            ours.append(self.net(self.fbank(wave))[0])
            theirs.append(self.dvector(wave)[0])
            agree.append(F.cosine_similarity(self.bridge(ours[-1]), self.target(wave)[0], dim=0))
        self.net.train()
        who = self.corpus.table[rows, 2]
        return {
            "agreement": round(float(torch.stack(agree).mean()), 4),
            **pairs(torch.stack(ours), who),
            "dvector": pairs(torch.stack(theirs), who),
        }

    def save(self, folder: Path) -> None:
        loop.save_state(folder / "speaker.state", self.modules, self.optimizer)
        loop.save_weights(folder / FILE, self.net.state_dict())


def pairs(vectors: Tensor, who: np.ndarray) -> dict[str, float]:
    """Equal error rate and mean cosines over all pairs of utterances."""
    vectors = F.normalize(vectors.float(), dim=1).cpu()
    first, second = np.triu_indices(len(who), 1)
    cosine = (vectors @ vectors.T).numpy()[first, second]
    same = who[first] == who[second]
    order = np.argsort(cosine)
    missed = np.cumsum(same[order]) / max(1, same.sum())
    passed = 1 - np.cumsum(~same[order]) / max(1, (~same).sum())
    at = int(np.argmin(np.abs(missed - passed)))
    return {
        "equal_error": round(float(missed[at] + passed[at]) / 2, 4),
        "same": round(float(cosine[same].mean()), 3),
        "different": round(float(cosine[~same].mean()), 3),
    }


def main() -> None:
    parser = loop.arguments(__doc__, seconds=480, rate=2e-3)
    parser.add_argument("--dvectors", type=Path, required=True, help="file that training.dvector wrote")
    parser.add_argument("--batch-seconds", type=float, default=320, help="seconds of speech in a step")
    parser.add_argument(
        "--windows", type=float, nargs="+", default=[2.5, 4.5], help="window lengths in seconds, in turn"
    )
    train(parser.parse_args())


def train(options: argparse.Namespace, shape: CAMPPlusConfig = SPEAKER) -> None:
    device = loop.prepare(options)
    trainer = Trainer(Corpus(options.corpus, device), options, device, shape)
    resumed = loop.load_state(options.out / "speaker.state", trainer.modules, trainer.optimizer)
    log = loop.Log(options.out / "speaker.log")
    log.write(hours=round(trainer.corpus.hours, 2), resumed=resumed, classes=int((trainer.classes.label >= 0).sum()))

    def report(clock: loop.Clock) -> None:
        figures = trainer.measure()
        log.write(step=clock.step, seconds=round(clock.seconds, 1), **trainer.meter.read(), held_out=figures)
        trainer.save(options.out)

    loop.run(options, trainer.choose, [trainer.optimizer], report)


if __name__ == "__main__":
    main()
