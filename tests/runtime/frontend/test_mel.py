"""Log-mels against the numbers of spec 2.2, 2.4 and 2.5, and their frame counts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runtime.config import MelConfig
from runtime.frontend.audio import load_clip, resample
from runtime.frontend.mel import KaldiFbank, PromptMel, WhisperLogMel
from tests import golden

CLIP = Path(__file__).parents[2] / "audio" / "zero_shot_prompt.wav"
CONFIG = MelConfig(n_fft=1920, hop=480, window=1920, bins=80, sample_rate=24_000, f_min=0.0, f_max=None)


@pytest.fixture(scope="module")
def samples_24k() -> Tensor:
    return torch.from_numpy(load_clip(CLIP).samples[12_000:60_000])[None]


@pytest.fixture(scope="module")
def samples_16k(samples_24k: Tensor) -> Tensor:
    return resample(samples_24k, 24_000, 16_000)


def test_filter_banks_equal_the_reference() -> None:
    expected = golden.load("audio_features")  # every fourth row of each
    for module, name, tolerance in (
        (PromptMel(CONFIG), "mel24k_filterbank", 1e-7),
        (WhisperLogMel(), "whisper_filterbank128", 1e-7),
        (KaldiFbank(), "kaldi_filterbank80", 2e-5),  # Kaldi computes its own in float32
    ):
        torch.testing.assert_close(module.filters[::4], expected[name], atol=tolerance, rtol=0)


def test_prompt_mel_equals_the_reference(samples_24k: Tensor) -> None:
    expected = golden.load("audio_features")["mel24k"].transpose(1, 2)
    torch.testing.assert_close(PromptMel(CONFIG)(samples_24k), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(PromptMel(CONFIG)(samples_24k[0]), expected[0], atol=2e-4, rtol=0)


def test_whisper_log_mel_equals_the_reference(samples_16k: Tensor) -> None:
    expected = golden.load("audio_features")["whisper_logmel128"]
    torch.testing.assert_close(WhisperLogMel()(samples_16k), expected, atol=1e-4, rtol=0)


def test_kaldi_fbank_equals_the_reference(samples_16k: Tensor) -> None:
    expected = golden.load("audio_features")
    raw = KaldiFbank(remove_mean=False)(samples_16k[0])
    torch.testing.assert_close(raw[:50], expected["kaldi_fbank80"], atol=1e-3, rtol=0)
    torch.testing.assert_close(KaldiFbank()(samples_16k[0]), expected["kaldi_fbank80_cmn"], atol=1e-3, rtol=0)


def test_frame_counts_follow_the_sample_counts() -> None:
    rules = golden.meta("audio_features")
    for samples, frames in rules["mel24k_frame_counts [samples, frames]"]:
        assert PromptMel(CONFIG)(torch.randn(samples)).shape == (frames, 80)
    for samples, whisper, fbank in rules["whisper_and_fbank_frame_counts [samples, whisper, fbank]"]:
        assert WhisperLogMel()(torch.randn(1, samples)).shape == (1, 128, whisper)
        assert KaldiFbank()(torch.randn(samples)).shape == (fbank, 80)


def test_digital_silence_stays_finite() -> None:
    for module in (WhisperLogMel(), KaldiFbank(), PromptMel(CONFIG)):
        assert module(torch.zeros(16_000)).isfinite().all()


MODULES = pytest.mark.parametrize("module", [WhisperLogMel(), KaldiFbank(), PromptMel(CONFIG)])


@MODULES
def test_rows_of_a_batch_do_not_see_each_other(module: nn.Module) -> None:
    rows = torch.randn(3, 16_000) * torch.tensor([[1.0], [0.1], [0.001]])
    together = module(rows)
    for row in range(3):
        torch.testing.assert_close(together[row], module(rows[row]), atol=1e-4, rtol=1e-4)


@MODULES
def test_tables_follow_the_module_and_stay_out_of_checkpoints(module: nn.Module) -> None:
    """Trap 48: the meta device refuses a table that stayed behind on the CPU."""
    assert module.state_dict() == {}
    moved = type(module)(CONFIG).to("meta") if isinstance(module, PromptMel) else type(module)().to("meta")
    assert moved(torch.empty(2, 16_000, device="meta")).device.type == "meta"
