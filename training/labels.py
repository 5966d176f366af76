"""What is known of the teacher's speech, frame by frame (50 Hz): sounding phoneme, pitch, voicing, silence.

Shapes: B utterances, T phoneme tokens with the edge pads, F frames of 20 ms, N samples at 16 kHz.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training.speakers import Spoken

STRESS, LENGTH, SPACE = (156, 157), 158, 16  # ids of the teacher's phoneme alphabet
PUNCTUATION = (0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15)
SILENCE, UNSCORED = 0, 255


class Phones:
    """Teacher alphabet -> classes: 0 is silence, the rest are sounds without stress and length marks."""

    def __init__(self, alphabet: np.ndarray) -> None:
        marks = {*STRESS, LENGTH, SPACE, *PUNCTUATION}
        self.sounds = [int(x) for x in alphabet if int(x) not in marks]
        self._classes = np.full(256, -1, np.int64)
        self._classes[list(PUNCTUATION)] = SILENCE
        self._classes[self.sounds] = np.arange(1, len(self.sounds) + 1)

    def __len__(self) -> int:
        return len(self.sounds) + 1

    def classes(self, ids: np.ndarray) -> np.ndarray:
        """Class per token, edge pads included; -2 marks a space. Marks belong to the sound they modify."""
        tokens = np.concatenate([[0], ids, [0]]).astype(np.int64)
        classes = np.where(tokens == SPACE, -2, self._classes[tokens])
        for i in range(len(tokens) - 2, -1, -1):
            if tokens[i] in STRESS:
                classes[i] = classes[i + 1]
        for i in range(1, len(tokens)):
            if tokens[i] == LENGTH:
                classes[i] = classes[i - 1]
        return np.where(classes == -1, SILENCE, classes)


def label(
    spoken: Spoken, wave16: Tensor, ids: list[np.ndarray], phones: Phones, frames: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Phoneme class [B, F] uint8, the teacher's pitch [B, F] in Hz and where it is heard, of a spoken batch."""
    device = wave16.device
    centre = (torch.arange(frames, device=device) + 0.5) * 0.02 * spoken.warp[:, None]  # in the teacher's time
    token = torch.searchsorted(spoken.durations.cumsum(1).float(), centre * 40, right=True)
    step = (centre * 80 + 2 * spoken.cut[:, None]).long().clamp(max=spoken.f0.shape[1] - 1)
    hz = spoken.f0.gather(1, step) * spoken.warp[:, None]
    classes = torch.zeros(spoken.durations.shape, dtype=torch.long)
    for row, line in zip(classes, ids, strict=True):
        values = torch.from_numpy(phones.classes(line))
        row[: len(values)] = values
    classes = classes.to(device)
    classes = torch.where(classes == -2, torch.where(spoken.durations >= 3, SILENCE, UNSCORED), classes)
    phone = classes.gather(1, token.clamp(max=classes.shape[1] - 1))
    phone = torch.where(silent(wave16, frames), SILENCE, phone)
    return phone.to(torch.uint8), torch.where(hz > 10, hz, 0.0), voiced(wave16, hz)


def silent(wave16: Tensor, frames: int, run: int = 6, floor: float = 0.02) -> Tensor:
    """Runs of at least `run` frames under `floor` of the peak: the teacher gives its pauses to the sound before."""
    peak = F.max_pool1d(wave16.abs()[:, None], 320)[:, 0, :frames]
    low = (peak < floor * peak.amax(1, keepdim=True)).float()[:, None]
    whole = F.avg_pool1d(F.pad(low, (run - 1, run - 1), value=1.0), run, 1) > 0.999
    return F.max_pool1d(whole.float(), run, 1)[:, 0] > 0


def voiced(wave16: Tensor, hz: Tensor) -> Tensor:
    """Is 25 ms of sound like the same one period earlier? The teacher's own pitch never pauses inside a sentence."""
    smooth = F.avg_pool1d(wave16[:, None], 9, 1, 4)[:, 0]  # under 1 kHz the rounded period does not matter
    window = F.pad(smooth, (520, 520)).unfold(-1, 1040, 320)[:, : hz.shape[1]]
    here = window[..., 480:880]
    period = (16000 / hz.clamp_min(45)).round().long()
    base = torch.arange(400, device=hz.device) + 480
    best = torch.full(hz.shape, -1.0, device=hz.device)
    for k in (-1, 0, 1):
        earlier = window.gather(-1, base - (period + k)[..., None])
        power = (earlier.square().sum(-1) * here.square().sum(-1)).sqrt().clamp_min(1e-6)
        best = torch.maximum(best, (earlier * here).sum(-1) / power)
    energy = here.square().mean(-1)
    return (hz > 45) & (best > 0.6) & (energy > 1e-4 * energy.amax(1, keepdim=True))
