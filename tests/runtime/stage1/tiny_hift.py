"""The vocoder of the fixtures: official module names, real rates, small widths, seeded random weights."""

import torch
from torch import Tensor

from runtime.checkpoint import load_strict
from runtime.config import HiFTConfig, hift_config
from runtime.stage1.hift import HiFT
from tests import golden


def config() -> HiFTConfig:
    return hift_config(golden.meta("hift")["config"])


def weights() -> dict[str, Tensor]:
    return golden.load("hift_tiny")


def hift() -> HiFT:
    module = HiFT(config())
    load_strict(module, "hift", weights())
    return module


def lively_hift() -> HiFT:
    """The same with f0 that moves between silence and a high voice from frame to frame, as in sung speech."""
    module = hift()
    with torch.no_grad():
        module.f0_predictor.classifier.weight.mul_(4)
    return module


def mel(frames: int, seed: int = 0) -> Tensor:
    """[80, frames] of the size of log-mel values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(80, frames, generator=generator) * 2 - 4
