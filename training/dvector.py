"""The model of real voices that the speaker encoder learns from: Resemblyzer's d-vectors, batched on the device.

Shapes: B clips of one length, N samples at 16 kHz, 256 dimensions of unit length. The weights come from the package
Resemblyzer (Apache-2.0), as its own file or as the smaller one that `python -m training.dvector FILE` writes.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.frontend.mel import slaney_filters

PARTIAL = 160  # frames of 10 ms that the net hears at once
HOP = 80


class DVector(nn.Module):
    window: Tensor
    filters: Tensor

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        self.load_state_dict({name: value.float() for name, value in load_file(path).items()})
        self.register_buffer("window", torch.hann_window(400), persistent=False)
        self.register_buffer("filters", slaney_filters(16_000, 400, 40, 0.0, 8000.0), persistent=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, wave: Tensor) -> Tensor:
        """[B, N], N of 1.6 s or more -> [B, 256]: the mean over half-overlapping parts."""
        wave = wave * (10**-1.5 / wave.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6))  # -30 dBFS
        spectrum = torch.stft(wave, 400, 160, window=self.window, pad_mode="constant", return_complex=True)
        mel = (self.filters @ (spectrum.real.square() + spectrum.imag.square())).transpose(1, 2)
        parts = mel.unfold(1, PARTIAL, HOP).transpose(2, 3)  # [B, parts, 160, 40]
        state = self.lstm(parts.flatten(0, 1).contiguous())[1][0][-1]
        parts = F.normalize(self.linear(state).relu(), dim=-1).unflatten(0, parts.shape[:2])
        return F.normalize(parts.mean(1), dim=-1)


def main(path: Path) -> None:
    """Writes the package's weights in half precision: 2.9 MB, needs no package where it is read."""
    import resemblyzer

    state = torch.load(Path(resemblyzer.__file__).parent / "pretrained.pt", map_location="cpu", weights_only=True)
    kept = {k: v.half() for k, v in state["model_state"].items() if k.startswith(("lstm.", "linear."))}
    save_file(kept, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
