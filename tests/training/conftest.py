"""A corpus of seeded noise in the shape of speech: what every trainer reads, made in a moment."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from training.bpe import train_bpe
from training.corpus import NEW_SENTENCES, NEW_SPEAKERS, TRAIN, Recording, Utterance, write_shard

PHONES = 7
LINES = ["The cat sat on the mat.", "Birds sing in the morning.", "We walk home.", "Rain falls on the old roof."]


def make_shard(path: Path, seed: int, tests: bool) -> None:
    """Six training utterances by three speakers; with `tests` four more by known and unknown ones."""
    generator = torch.Generator().manual_seed(seed)
    plan = [(i % 3, TRAIN, i % 4) for i in range(6)]
    if tests:
        plan += [(0, NEW_SENTENCES, 0), (1, NEW_SENTENCES, 1), (3, NEW_SPEAKERS, 0), (3, NEW_SPEAKERS, 1)]
        plan += [(4, NEW_SPEAKERS, 2), (4, NEW_SPEAKERS, 3)]
    rows = []
    for speaker, split, sentence in plan:
        frames = 96 + 8 * speaker
        pitch = 100.0 + 40 * speaker
        time = torch.arange(frames * 480) / 24_000
        wave = 0.2 * torch.sin(2 * np.pi * pitch * time) + 0.02 * torch.randn(len(time), generator=generator)
        phone = torch.randint(0, PHONES, (frames // 4,), generator=generator).repeat_interleave(4).to(torch.uint8)
        hz, voiced = torch.full((frames,), pitch).half(), torch.arange(frames) % 16 < 12
        utterance = Utterance(frames, speaker, split, sentence)
        rows.append(Recording(utterance, (wave * 32767).to(torch.int16), phone, hz, voiced))
    write_shard(path, PHONES, rows)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_shard(folder / "corpus-0.safetensors", 0, tests=True)
    make_shard(folder / "corpus-1.safetensors", 1, tests=False)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in ("train.txt", "test.txt"):
        (folder / name).write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    train_bpe(LINES, folder, rows=560)
    return folder


@pytest.fixture(scope="session")
def dvectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeded weights in the shape of the d-vector model."""
    path = tmp_path_factory.mktemp("dvector") / "dvector.safetensors"
    torch.manual_seed(0)
    lstm, linear = torch.nn.LSTM(40, 256, 3, batch_first=True), torch.nn.Linear(256, 256)
    state = {f"lstm.{name}": value for name, value in lstm.state_dict().items()}
    state |= {f"linear.{name}": value for name, value in linear.state_dict().items()}
    save_file({name: value.half() for name, value in state.items()}, path)
    return path
