"""Pitch of a mel: frames in, f0 in Hz out (spec 5.1).

Shapes: mel [B, 80, T] -> f0 [B, T], one value per frame of 20 ms. The net sees 3 frames to the right. It computes
in the precision of its own weights: float64 when speaking, because small differences of f0 grow in the phase
of the source (spec 9.31), float32 when training.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from runtime.config import F0Config
from runtime.stage1.causal import CausalConv1d, normed

_KERNELS = (3, 3, 3, 3)  # of the causal layers; the first layer alone looks to the right


class F0Predictor(nn.Module):
    """Five convolutions and a linear layer."""

    lookahead_frames = 3  # to the right
    context_frames = sum(kernel - 1 for kernel in _KERNELS)  # to the left

    def __init__(self, config: F0Config) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            normed(nn.Conv1d(config.mel_bins, config.channels, self.lookahead_frames + 1)),
            nn.ELU(),
        ]
        for kernel in _KERNELS:
            layers += [normed(CausalConv1d(config.channels, config.channels, kernel)), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(config.channels, 1)

    def forward(self, mel: Tensor, *, is_last: bool = True) -> Tensor:
        """f0 [B, T] in the precision of `mel`; [B, T - 3] unless `is_last`: then more mel follows, unknown yet."""
        x = mel.to(self.classifier.weight.dtype)
        if is_last:
            x = F.pad(x, (0, self.lookahead_frames))
        f0: Tensor = self.classifier(self.condnet(x).transpose(1, 2)).squeeze(-1).abs()
        return f0.to(mel.dtype)
