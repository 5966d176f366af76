"""Teacher speech with labels: written by data.py shard by shard, held whole on the training device.

Everything lies on a grid of 20 ms frames, an utterance starts and ends on a token (40 ms), and the utterances of one
speaker follow each other, so that a window of any length can be cut from a speaker's stream without padding.
Shapes: F frames, in all or of a window, U utterances, B rows, N = 480 F samples at 24 kHz (320 F at 16 kHz).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from runtime.frontend.audio import resample

FRAME = 480  # samples at 24 kHz
FRAME_16K = 320
TRAIN, NEW_SENTENCES, NEW_SPEAKERS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Utterance:
    """One row of a corpus's table, which has the first frame in front."""

    frames: int
    speaker: int
    split: int
    sentence: int


class Corpus:
    """All shards of a folder on one device; `sound=False` leaves the samples on the disk."""

    def __init__(self, folder: Path, device: torch.device, sound: bool = True) -> None:
        paths = sorted(folder.glob("corpus-*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"no corpus-*.safetensors in {folder}; run training.data first")

        def read(name: str) -> list[Tensor]:
            parts = []
            for path in paths:
                with safe_open(path, "pt") as shard:
                    parts.append(shard.get_tensor(name).to(device))
            return parts

        phones = read("phone")
        base = np.cumsum([0, *map(len, phones)])
        tables = [table.cpu().numpy().astype(np.int64) for table in read("utterances")]
        for table, start in zip(tables, base, strict=False):
            table[:, 0] += start
        self.device = device
        self.table = np.concatenate(tables)  # [U, 5]: first frame, then the fields of Utterance
        if not {TRAIN, NEW_SPEAKERS} <= set(self.table[:, 3].tolist()):
            raise ValueError(
                f"{folder} lacks training or held-out utterances; the held-out ones lie in the first shard"
            )
        self.phones = int(read("phones")[0])
        self.phone = torch.cat(phones)
        self.hz, self.voiced = torch.cat(read("hz")), torch.cat(read("voiced"))
        self.pcm = torch.cat(read("pcm")).view(-1, FRAME) if sound else torch.empty(0, FRAME, dtype=torch.int16)
        self.speakers = int(self.table[:, 2].max()) + 1
        self.streams = self._streams(base)

    def _streams(self, base: np.ndarray) -> np.ndarray:
        """Runs of training utterances by one speaker inside one shard: [streams, (first frame, end, speaker)]."""
        train = self.rows(TRAIN)
        shard = np.searchsorted(base, self.table[train, 0], side="right")
        edges = np.flatnonzero(np.diff(self.table[train, 2]) | np.diff(shard)) + 1
        groups = np.split(train, edges)
        runs = [(self.table[g[0], 0], self.table[g[-1], :2].sum(), self.table[g[0], 2]) for g in groups if len(g)]
        return np.array(runs, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, split: int) -> np.ndarray:
        return np.flatnonzero(self.table[:, 3] == split)

    @property
    def hours(self) -> float:
        return len(self.phone) / 50 / 3600

    def grid(self, rows: list[int], lead: np.ndarray | int = 0) -> tuple[Tensor, Tensor]:
        """Frame indices [B, F] of whole utterances and which of them are real; `lead` [U] frames come before each."""
        spans = self.table[:, :2] + np.stack([-lead, lead], -1)
        start, frames = torch.from_numpy(spans[rows].T.copy()).to(self.device)
        position = torch.arange(int(frames.max()), device=self.device)
        return (start[:, None] + position).clamp(max=len(self.phone) - 1), position < frames[:, None]

    def batches(self, rows: np.ndarray, seconds: float, lead: np.ndarray | int = 0) -> Iterator[list[int]]:
        """Rows of similar length, together at most `seconds` with padding; `lead` [U] frames come before each."""
        frames = self.table[:, 1] + lead
        group: list[int] = []
        for row in rows[np.argsort(-frames[rows], kind="stable")]:
            if group and frames[group[0]] * (len(group) + 1) > seconds * 50:
                yield group
                group = []
            group.append(int(row))
        if group:
            yield group

    @torch.no_grad()
    def at_16k(self) -> Tensor:
        """The whole corpus at 16 kHz, int16 [F, 320], each utterance resampled by itself."""
        out = torch.empty(len(self.phone), FRAME_16K, dtype=torch.int16, device=self.device)
        for group in self.batches(np.arange(len(self)), 600):
            index, valid = self.grid(group)
            wave = resample(sound(self.pcm, index) * valid.repeat_interleave(FRAME, 1), 24_000, 16_000)
            wave = (wave.clamp(-1, 1) * 32767).round().to(torch.int16)
            out[index[valid]] = wave.unflatten(1, (-1, FRAME_16K))[valid]
        return out

    @torch.no_grad()
    def mel(self, extract: nn.Module) -> Tensor:
        """The whole corpus as half-precision log-mel [F, M]."""
        out: Tensor | None = None
        for group in self.batches(np.arange(len(self)), 600):
            index, valid = self.grid(group)
            mel = extract(sound(self.pcm, index) * valid.repeat_interleave(FRAME, 1))
            if out is None:
                out = torch.empty(len(self.phone), mel.shape[-1], dtype=torch.half, device=self.device)
            out[index[valid]] = mel[valid].half()
        assert out is not None
        return out


def sound(pcm: Tensor, index: Tensor) -> Tensor:
    """Frames [B, F] of pcm [.., samples per frame] -> samples [B, N] in [-1, 1]."""
    return pcm[index].flatten(1).float() / 32768


class Windows:
    """Random windows of the training speakers' streams, drawn on the device so that a captured step can draw them."""

    def __init__(self, corpus: Corpus, frames: int) -> None:
        streams = torch.from_numpy(corpus.streams)
        room = (streams[:, 1] - streams[:, 0] - frames).clamp(min=0) // 2 + 1  # starts, each on a token
        self.frames = frames
        self.total = int(room.sum())
        self._first = streams[:, 0].to(corpus.device)
        self._speaker = streams[:, 2].to(corpus.device)
        self._upto = room.cumsum(0).to(corpus.device)
        self._limit = len(corpus.phone) - frames

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """First frames and speakers [count]."""
        pick = (torch.rand(count, device=self._upto.device, dtype=torch.float64) * self.total).long()
        stream = torch.searchsorted(self._upto, pick, right=True)
        before = torch.where(stream > 0, self._upto[(stream - 1).clamp(min=0)], 0)
        start = self._first[stream] + 2 * (pick - before)
        return start.clamp(max=self._limit), self._speaker[stream]

    def index(self, start: Tensor) -> Tensor:
        """Frame indices [count, frames]."""
        return start[:, None] + torch.arange(self.frames, device=start.device)


@dataclass(frozen=True, slots=True)
class Recording:
    """One utterance with its labels, on the CPU, before it has a place in a shard."""

    utterance: Utterance
    pcm: Tensor  # int16 [480 F]
    phone: Tensor  # uint8 [F]
    hz: Tensor  # half [F], the teacher's pitch
    voiced: Tensor  # bool [F], where it is heard


def write_shard(path: Path, phones: int, recordings: list[Recording]) -> None:
    """Stores recordings, speaker after speaker."""
    recordings = sorted(recordings, key=lambda row: (row.utterance.split, row.utterance.speaker))
    table, start = [], 0
    for utterance in (row.utterance for row in recordings):
        table.append((start, utterance.frames, utterance.speaker, utterance.split, utterance.sentence))
        start += utterance.frames
    partial = path.with_suffix(".partial")  # a reader of the folder never sees half a shard
    save_file(
        {
            **{
                name: torch.cat([getattr(row, name) for row in recordings]) for name in ("pcm", "phone", "hz", "voiced")
            },
            "utterances": torch.tensor(table, dtype=torch.int32),
            "phones": torch.tensor(phones),
        },
        partial,
    )
    partial.replace(path)
