"""The fixed random buffers. Trap 51: noise is indexed by sample alone and no global generator takes part."""

import hashlib

import pytest
import torch
from torch import Tensor

from runtime.errors import GenerationError
from runtime.stage1.noise import BLOCK_SAMPLES, NoiseBank
from tests import golden

CPU = torch.device("cpu")


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def test_flow_noise_is_the_official_buffer() -> None:
    noise = NoiseBank(CPU).flow_noise(15_000)
    first = golden.load("noise")["flow.rand_noise.first1000"]
    assert noise.shape == (80, 15_000)
    torch.testing.assert_close(noise.flatten()[:1000], first, atol=3e-6, rtol=0)  # exact where the CPU has AVX2


@pytest.mark.parametrize("seconds", [1, 10, 30])
def test_source_noise_drawn_by_blocks_has_the_official_hash(seconds: int) -> None:
    noise = NoiseBank(CPU).source_noise(0, seconds * 24_000)
    assert digest(noise) == golden.meta("noise")["hift.sine_noise"][f"sha256_first_{seconds}s"]


def test_source_noise_begins_with_the_official_values() -> None:
    noise = NoiseBank(CPU).source_noise(0, 112)
    assert torch.equal(noise.flatten()[:1000], golden.load("noise")["hift.sine_noise.first1000"])


def test_slices_across_blocks_equal_the_whole_in_any_order() -> None:
    whole = NoiseBank(CPU).source_noise(0, 2 * BLOCK_SAMPLES + 100)
    bank = NoiseBank(CPU)
    for start, samples in [(2 * BLOCK_SAMPLES - 7, 50), (0, 480), (BLOCK_SAMPLES - 1, 2), (BLOCK_SAMPLES, 9), (77, 0)]:
        assert torch.equal(bank.source_noise(start, samples), whole[start : start + samples])


def test_global_seed_changes_nothing_and_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(NoiseBank(CPU).source_noise(5, 100), NoiseBank(CPU).source_noise(5, 100))
    assert torch.equal(torch.rand(4), expected)


def test_frames_past_the_flow_noise_are_a_named_error() -> None:
    """Trap 44: never an index error, never a short slice."""
    with pytest.raises(GenerationError, match="15001 mel frames"):
        NoiseBank(CPU).flow_noise(15_001)
