"""Synthetic speakers: mixtures of the teacher's style tables, some pitched and warped, and who says which sentence.

A style is 256 wide: timbre (128), then prosody (128). A warp reads the waveform at another rate (22 to 28 kHz as
24 kHz), which moves pitch and formants together; the sentence is spoken slower or faster first, so its tempo stays.
Everything follows from a seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training.teacher import FRAME, Teacher

ENGLISH = ("af_", "am_", "bf_", "bm_")  # voices that speak good English alone; others only lend their timbre
WARPS = (22, 23, 24, 25, 26, 27, 28)  # kHz read as 24
SECONDS_PER_TOKEN = 0.058


@dataclass(frozen=True, slots=True)
class Speaker:
    timbre: np.ndarray  # weights over the voices
    prosody: np.ndarray
    f0_scale: float
    warp: int
    british: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One sentence to be spoken."""

    sentence: int
    speaker: int
    speed: float
    split: int = 0  # 0 training, 1 held-out sentence of a training speaker, 2 held-out sentence of a held-out speaker


def make_speakers(names: list[str], count: int, seed: int = 1) -> list[Speaker]:
    """The pure English voices first, then half normal draws around their mean (some weights negative), half blends.

    Blends alone never leave the space between the voices; draws with spread 0.8 to 1.2 lie as far apart as the pure
    voices do and stay intelligible.
    """
    rng = np.random.default_rng(seed)
    english = [i for i, name in enumerate(names) if name.startswith(ENGLISH)]
    pools = [[i for i, name in enumerate(names) if name[1] == sex] for sex in "fm"]
    eye = np.eye(len(names), dtype=np.float32)
    made = [Speaker(eye[i], eye[i], 1.0, 24, names[i][0] == "b") for i in english]
    while len(made) < count:
        pool = pools[int(rng.integers(2))]
        if rng.random() < 0.15:
            pool = list(range(len(names)))
        if rng.random() < 0.5:
            halves, british = _draw(rng, english, len(names))
        else:
            halves, british = _blend(rng, pool, english, names)
        made.append(Speaker(*halves, float(np.exp(rng.normal(0, 0.06))), int(rng.choice(WARPS)), british))
    return made[:count]


def _draw(rng: np.random.Generator, english: list[int], voices: int) -> tuple[list[np.ndarray], bool]:
    spread = rng.uniform(0.8, 1.2)
    halves = []
    for _ in range(2):
        offset = rng.normal(0, spread / np.sqrt(len(english) - 1), len(english))
        weights = np.zeros(voices, np.float32)
        weights[english] = 1 / len(english) + offset - offset.mean()
        halves.append(weights)
    return halves, bool(rng.random() < 0.25)


def _blend(
    rng: np.random.Generator, pool: list[int], english: list[int], names: list[str]
) -> tuple[list[np.ndarray], bool]:
    picked = rng.choice(pool, min(int(rng.integers(1, 4)), len(pool)), replace=False)
    timbre = np.zeros(len(names), np.float32)
    timbre[picked] = rng.dirichlet(np.full(len(picked), 0.7))
    prosody = timbre.copy()
    if not any(i in english for i in picked) or rng.random() < 0.3:  # an English rhythm keeps the sounds English
        prosody = np.zeros(len(names), np.float32)
        prosody[int(rng.choice([i for i in pool if i in english]))] = 1
    return [timbre, prosody], float(sum(timbre[i] for i in english if names[i][0] == "b")) > 0.5


class Sentences:
    """Phoneme ids of a text in both accents, from `<name>_tokens.npz`."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as stored:
            self._ids = {key: (stored[key + "_ids"], stored[key + "_off"]) for key in ("us", "gb")}

    def __len__(self) -> int:
        return len(self._ids["us"][1]) - 1

    def phonemes(self, sentence: int, british: bool) -> np.ndarray:
        ids, offsets = self._ids["gb" if british else "us"]
        return ids[offsets[sentence] : offsets[sentence + 1]]

    def alphabet(self) -> np.ndarray:
        return np.unique(np.concatenate([ids for ids, _ in self._ids.values()]))


class Cast:
    """The teacher together with its speakers."""

    def __init__(self, folder: Path, device: torch.device, count: int, seed: int = 1) -> None:
        self.teacher = Teacher(folder, device)
        with np.load(folder / "voices.npz") as stored:
            names = [str(name) for name in stored["names"]]
            self._lengths = torch.from_numpy(stored["rows"].astype(np.int64))  # the tables depend on sentence length
            self._tables = torch.from_numpy(stored["table"].astype(np.float32))
        self.speakers = make_speakers(names, count, seed)

    def style(self, speaker: Speaker, tokens: int) -> Tensor:
        table = self._tables[:, int((self._lengths - tokens).abs().argmin())]
        timbre, prosody = torch.from_numpy(speaker.timbre), torch.from_numpy(speaker.prosody)
        return torch.cat([timbre @ table[:, :128], prosody @ table[:, 128:]])

    def speak(self, lines: list[Line], ids: list[np.ndarray], seed: int) -> "Spoken":
        """Speaks one batch, trimmed and unwarped."""
        who = [self.speakers[line.speaker] for line in lines]
        warp = torch.tensor([speaker.warp / 24 for speaker in who])
        said = self.teacher(
            ids,
            torch.stack([self.style(speaker, len(row)) for speaker, row in zip(who, ids, strict=True)]),
            torch.tensor([line.speed for line in lines]) / warp,
            torch.tensor([speaker.f0_scale for speaker in who]),
            seed,
        )
        samples, lengths, durations = trim(said.samples, said.lengths, said.durations)
        cut = said.durations[:, 0] - durations[:, 0]
        samples, lengths = unwarp(samples, lengths, [speaker.warp for speaker in who])
        return Spoken(samples, lengths, durations, said.f0, cut, warp.to(samples.device))


@dataclass(frozen=True, slots=True)
class Spoken:
    """A batch at 24 kHz; durations, f0 and cut (frames removed in front) are still in the teacher's own time."""

    samples: Tensor
    lengths: Tensor
    durations: Tensor
    f0: Tensor
    cut: Tensor
    warp: Tensor


def trim(
    samples: Tensor, lengths: Tensor, durations: Tensor, lead: int = 4, tail: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts the teacher's silences: `lead` frames stay before the first sound, `tail` after the last audible one."""
    removed = (durations[:, 0] - lead).clamp(min=0)
    durations = durations.clone()
    durations[:, 0] -= removed
    peak = F.max_pool1d(samples.abs()[:, None], FRAME)[:, 0]
    frame = torch.arange(peak.shape[1], device=samples.device)[None]
    last = torch.where(peak > 0.01 * peak.amax(1, keepdim=True), frame, 0).amax(1)
    kept = torch.minimum(lengths.to(samples.device), (last + 1 + tail) * FRAME) - removed * FRAME
    position = torch.arange(int(kept.max()), device=samples.device)[None]
    index = (position + (removed * FRAME)[:, None]).clamp(max=samples.shape[1] - 1)
    return samples.gather(1, index) * (position < kept[:, None]), kept.cpu(), durations


def unwarp(samples: Tensor, lengths: Tensor, warps: list[int]) -> tuple[Tensor, Tensor]:
    """Reads every row at its own rate: rows of one rate together."""
    out = samples.new_zeros(samples.shape[0], int(samples.shape[1] * 24 / min(WARPS)) + 8)
    new = lengths.clone()
    for rate in set(warps):
        rows = [i for i, warp in enumerate(warps) if warp == rate]
        read = samples[rows] if rate == 24 else resample(samples[rows], rate, 24)
        out[rows, : read.shape[1]] = read[:, : out.shape[1]]
        new[rows] = lengths[rows] * 24 // rate
    valid = torch.arange(out.shape[1], device=out.device)[None] < new.to(out.device)[:, None]
    return out * valid, new


def resample(x: Tensor, source: int, target: int, width: int = 16, rolloff: float = 0.94) -> Tensor:
    """[B, N] at one rate -> another: windowed sinc, polyphase by one strided convolution."""
    common = int(np.gcd(source, target))
    a, b = source // common, target // common
    base = min(a, b) * rolloff
    reach = int(np.ceil(width * a / base))
    t = torch.arange(-reach, reach + a, dtype=torch.float64)[None] / a
    t = (t - torch.arange(b, dtype=torch.float64)[:, None] / b) * base
    window = torch.where(t.abs() < width, torch.cos(t * np.pi / width / 2) ** 2, torch.zeros_like(t))
    kernel = (torch.sinc(t) * window * (base / a)).float().to(x.device)
    y = F.conv1d(F.pad(x, (reach, reach + a))[:, None], kernel[:, None], stride=a)
    return y.transpose(1, 2).flatten(1)[:, : -(-x.shape[1] * b // a)]


def plan(
    cast: Cast, train: Sentences, test: Sentences, hours: float, held_out: int, seed: int, test_sentences: int = 300
) -> list[Line]:
    """Who says what: every training sentence before any repeats, all training speakers equally often; then tests."""
    rng = np.random.default_rng(seed)
    held = held_out_speakers(len(cast.speakers), held_out)
    training = [i for i in range(len(cast.speakers)) if i not in set(held)]

    def speed() -> float:
        return float(np.clip(np.exp(rng.normal(0, 0.07)), 0.85, 1.2))

    lines: list[Line] = []
    seconds, k, order = 0.0, 0, rng.permutation(len(train))
    while seconds < hours * 3600:
        speaker = training[len(lines) % len(training)]
        sentence = int(order[k % len(train)])
        k += 1
        tokens = len(train.phonemes(sentence, cast.speakers[speaker].british))
        if 12 <= tokens <= 150:
            lines.append(Line(sentence, speaker, speed()))
            seconds += tokens * SECONDS_PER_TOKEN / lines[-1].speed
    count = min(test_sentences, len(test))
    lines += [Line(i, int(rng.choice(training)), speed(), 1) for i in range(count)]
    for speaker in held:
        lines += [Line(int(i), speaker, speed(), 2) for i in rng.choice(count, min(8, count), replace=False)]
    return lines


def held_out_speakers(count: int, held_out: int) -> list[int]:
    """The same ones in every shard and session; never a pure voice."""
    return sorted(int(i) for i in np.random.default_rng(7).permutation(np.arange(28, count))[:held_out])


def batches(lengths: np.ndarray, most: float, most_items: int = 256) -> Iterator[list[int]]:
    """Indices of similar length, so that items times the longest stays under `most`."""
    group: list[int] = []
    for i in np.argsort(lengths, kind="stable")[::-1]:
        if group and (lengths[group[0]] * (len(group) + 1) > most or len(group) >= most_items):
            yield group
            group = []
        group.append(int(i))
    if group:
        yield group
