"""Who may have more than one core."""

import threading

import torch
from torch import nn

from runtime.cores import ONE_CORE_BYTES, fits_one_core, one_core
from runtime.stage0.torch_engine import TorchStage0
from tests.runtime.stage0.models import GREEDY, prompt, seeded_lm


def test_within_it_a_thread_has_one_core_and_others_have_theirs():
    cores, inside, beside = torch.get_num_threads(), [], []
    with one_core():
        inside.append(torch.get_num_threads())
        other = threading.Thread(target=lambda: beside.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert inside == [1] and beside == [cores] and torch.get_num_threads() == cores


def test_a_network_that_one_core_reads_in_time_fits_one():
    row = ONE_CORE_BYTES // 4 // 1024
    with torch.device("meta"):
        small, large = nn.Linear(1024, row, bias=False), nn.Linear(1024, row + 1, bias=False)
    assert not fits_one_core(small), "it is on no CPU"
    assert fits_one_core(small.to_empty(device="cpu")) and not fits_one_core(large.to_empty(device="cpu"))


def test_a_small_language_model_takes_one_core_and_gives_it_back():
    cores, seen = torch.get_num_threads(), []
    engine = TorchStage0(seeded_lm())
    score = engine._score
    engine._score = lambda: (seen.append(torch.get_num_threads()), score())[1]
    engine.add(0, prompt(), GREEDY, 0)
    engine.step(), engine.step()
    assert seen == [1] and torch.get_num_threads() == cores
