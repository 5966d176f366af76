"""What many tests share: a tiny seeded checkpoint on CPU, an engine on it, and a short clip of a real voice."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import AudioClip, Checkpoint, Engine, load_clip, resolve_checkpoint

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The parts are tiny: more threads cost more than they give, and results stay the same from machine to machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Checkpoint:
    """Every file of the released layout at a tiny width, made by `python -m training.seeded tests/tiny`."""
    return resolve_checkpoint(str(TESTS / "tiny"))


@pytest.fixture(scope="session")
def voice() -> AudioClip:
    """1.2 s of a real voice: 30 speech tokens."""
    clip = load_clip(TESTS / "audio" / "zero_shot_prompt.wav")
    return AudioClip(np.ascontiguousarray(clip.samples[12000:40800]), clip.sample_rate)


@pytest.fixture(scope="session")
def engine(tiny_checkpoint: Checkpoint):
    with Engine(tiny_checkpoint) as engine:
        yield engine
