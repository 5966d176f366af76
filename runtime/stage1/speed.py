"""Speaking faster or slower: the mel's time axis is stretched before the vocoder, so the pitch stays (spec 6.1).

Shapes: M mel bins, frames at 50 Hz. Output frame i reads the input at (i + 1/2) * ratio - 1/2, between two frames.
A whole mel uses the reference's ratio, N / int(N / speed). A stream cannot know N and uses the speed itself, on one
axis from its first frame to its last: the cuts between chunks leave no trace.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True, eq=False)
class Stretch:
    """Where one stream stands on its time axis. At speed 1 mel passes through untouched."""

    speed: float
    frames_in: int = 0
    frames_out: int = 0
    kept: Tensor | None = None  # [M, k]: the latest input frames, which the next output frame may still read

    def push(self, mel: Tensor, *, is_last: bool) -> Tensor:
        """New mel [M, n] -> the output frames [M, m] that are settled by it; the last push brings all that are left."""
        if self.speed == 1.0:
            return mel
        if is_last and not self.frames_in and mel.shape[-1]:
            size = max(1, int(mel.shape[-1] / self.speed))
            return F.interpolate(mel[None], size=size, mode="linear")[0]
        known = mel if self.kept is None else torch.cat((self.kept, mel), dim=-1)
        self.frames_in += mel.shape[-1]
        offset = self.frames_in - known.shape[-1]  # absolute index of known[:, 0]

        position = self._position(torch.arange(self.frames_out, int(self.frames_in / self.speed)))
        if not is_last:
            position = position[position < self.frames_in - 1]  # the right neighbour must be there
        left = position.long()
        weight = (position - left).to(mel.device, mel.dtype)
        right = (left + 1).clamp(max=self.frames_in - 1)
        before, after = (known[:, (index - offset).to(mel.device)] for index in (left, right))

        self.frames_out += len(position)
        next_left = int(self._position(torch.tensor([self.frames_out])))
        self.kept = known[:, max(0, min(next_left, self.frames_in - 1) - offset) :].clone()
        return before * (1 - weight) + after * weight

    def _position(self, index: Tensor) -> Tensor:
        """Input position of output frames, in float64 from the absolute index: nothing adds up over a stream."""
        return ((index.double() + 0.5) * self.speed - 0.5).clamp(min=0)
