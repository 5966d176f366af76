"""Teacher speech with labels: written by data.py shard by shard, held whole on the training device.

Everything lies on a grid of 20 ms frames, an utterance starts and ends on a token (40 ms), and the utterances of one
speaker follow each other, so that a window of any length can be cut from a speaker's stream without padding.
Shapes: F frames in all, U utterances, N = 480 F samples at 24 kHz (320 F at 16 kHz).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runtime.frontend.audio import resample

FRAME = 480  # samples at 24 kHz
FRAME_16K = 320
TRAIN, NEW_SENTENCES, NEW_SPEAKERS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Utterance:
    """One row of the table: where it lies and what it is."""

    start: int  # frame
    frames: int
    speaker: int
    split: int
    sentence: int


class Corpus:
    """All shards of a folder on one device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        shards = [load_file(path) for path in sorted(folder.glob("corpus-*.safetensors"))]
        if not shards:
            raise FileNotFoundError(f"no corpus-*.safetensors in {folder}; run training.data first")
        base = np.cumsum([0, *(len(shard["phone"]) for shard in shards)])
        tables = [shard["utterances"].numpy().astype(np.int64) for shard in shards]
        for table, start in zip(tables, base, strict=False):
            table[:, 0] += start
        self.device = device
        self.table = np.concatenate(tables)  # [U, 5]: the fields of Utterance
        self.phones = int(shards[0]["phones"])
        self.pcm = torch.cat([shard["pcm"].to(device) for shard in shards])
        self.phone = torch.cat([shard["phone"].to(device) for shard in shards])
        self.hz = torch.cat([shard["hz"].to(device) for shard in shards])
        train = self.rows(TRAIN)
        edges = np.flatnonzero(np.diff(self.table[train, 2])) + 1
        groups = np.split(train, edges)
        self.streams = np.array(
            [(self.table[g[0], 0], self.table[g[-1], 0] + self.table[g[-1], 1], self.table[g[0], 2]) for g in groups]
        )
        self.speakers = int(self.table[:, 2].max()) + 1

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> Utterance:
        return Utterance(*map(int, self.table[row]))

    def rows(self, split: int) -> np.ndarray:
        return np.flatnonzero(self.table[:, 3] == split)

    @property
    def hours(self) -> float:
        return len(self.phone) / 50 / 3600

    def samples(self, row: int) -> Tensor:
        """One utterance [480 n] in [-1, 1] at 24 kHz."""
        start, frames = self.table[row, :2]
        return self.pcm[start * FRAME : (start + frames) * FRAME].float() / 32768

    def padded(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Several utterances as [B, N] at 24 kHz, zeros behind each end, and their frames [B]."""
        waves = [self.samples(row) for row in rows]
        frames = torch.tensor([len(wave) // FRAME for wave in waves], device=self.device)
        return nn.utils.rnn.pad_sequence(waves, batch_first=True), frames

    def batches(self, rows: np.ndarray, seconds: float) -> Iterator[list[int]]:
        """Rows of similar length, together at most `seconds` with padding."""
        group: list[int] = []
        for row in rows[np.argsort(-self.table[rows, 1], kind="stable")]:
            if group and self.table[group[0], 1] * (len(group) + 1) > seconds * 50:
                yield group
                group = []
            group.append(int(row))
        if group:
            yield group

    @torch.no_grad()
    def at_16k(self) -> Tensor:
        """The whole corpus at 16 kHz, int16 [320 F], each utterance resampled by itself."""
        out = torch.empty(len(self.phone) * FRAME_16K, dtype=torch.int16, device=self.device)
        for group in self.batches(np.arange(len(self)), 600):
            waves, _ = self.padded(group)
            waves = (resample(waves, 24_000, 16_000).clamp(-1, 1) * 32767).round().to(torch.int16)
            for row, wave in zip(group, waves, strict=True):
                start, frames = self.table[row, :2]
                out[start * FRAME_16K : (start + frames) * FRAME_16K] = wave[: frames * FRAME_16K]
        return out

    @torch.no_grad()
    def mel(self, extract: nn.Module) -> Tensor:
        """The whole corpus as half-precision log-mel [F, M]."""
        parts: dict[int, Tensor] = {}
        for group in self.batches(np.arange(len(self)), 600):
            waves, _ = self.padded(group)
            for row, mel in zip(group, extract(waves), strict=True):
                parts[row] = mel[: self.table[row, 1]].half()
        return torch.cat([parts[row] for row in range(len(self))])


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

    def index(self, start: Tensor, unit: int = 1) -> Tensor:
        """Indices [count, frames * unit] into an array with `unit` values per frame."""
        return (start * unit)[:, None] + torch.arange(self.frames * unit, device=start.device)


def write_shard(path: Path, phones: int, rows: list[tuple[Utterance, Tensor, Tensor, Tensor]]) -> None:
    """Stores utterances with their pcm int16, phoneme classes and pitch, speaker after speaker."""
    rows = sorted(rows, key=lambda row: (row[0].split, row[0].speaker))
    table, start = [], 0
    for utterance, *_ in rows:
        table.append((start, utterance.frames, utterance.speaker, utterance.split, utterance.sentence))
        start += utterance.frames
    save_file(
        {
            "pcm": torch.cat([row[1] for row in rows]),
            "phone": torch.cat([row[2] for row in rows]),
            "hz": torch.cat([row[3] for row in rows]),
            "utterances": torch.tensor(table, dtype=torch.int32),
            "phones": torch.tensor(phones),
        },
        path,
    )
