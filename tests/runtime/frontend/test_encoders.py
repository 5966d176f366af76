"""Which encoder of references runs: the torch nets held to onnxruntime, on a CPU."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime import AudioClip, Checkpoint, EngineSettings, SpeechRequest, resolve_checkpoint
from runtime.errors import EngineUnavailable
from runtime.frontend import speech_tokens
from runtime.frontend.audio import resample
from runtime.frontend.encoders import build_encoders
from runtime.frontend.prepare import Frontend
from runtime.frontend.speech_tokens import SpeechTokenizerNet

CPU = torch.device("cpu")
TORCH = EngineSettings(front_end="torch")


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_torch_hears_what_onnxruntime_hears(name: str, tiny_checkpoint: Checkpoint, voice: AudioClip) -> None:
    checkpoint = resolve_checkpoint("demo") if name == "demo" else tiny_checkpoint
    samples = resample(torch.from_numpy(voice.samples), voice.sample_rate, 16_000)
    ours, theirs = build_encoders(checkpoint, TORCH, CPU), build_encoders(checkpoint, EngineSettings(), CPU)
    assert (ours.name, theirs.name) == ("torch on cpu", "onnxruntime on cpu")
    assert torch.equal(ours.tokens.encode(samples), theirs.tokens.encode(samples))
    torch.testing.assert_close(ours.speaker.embed(samples), theirs.speaker.embed(samples), atol=1e-4, rtol=1e-4)


def test_prepared_references_of_two_providers_have_two_keys(tiny_checkpoint: Checkpoint, voice: AudioClip) -> None:
    """Trap 71."""
    prepared = [
        Frontend(tiny_checkpoint, settings, CPU).prepare(SpeechRequest(reference=voice, text="Hello.")).reference
        for settings in (TORCH, EngineSettings(front_end="onnxruntime"))
    ]
    assert prepared[0].key != prepared[1].key
    assert torch.equal(prepared[0].speech_tokens, prepared[1].speech_tokens)
    assert all(part.device == CPU for part in (prepared[0].speech_tokens, prepared[0].mel, prepared[0].speaker))


def test_the_choice_is_told(tiny_checkpoint: Checkpoint) -> None:
    assert Frontend(tiny_checkpoint, TORCH, CPU).describe() == {"front end": "torch on cpu"}
    assert Frontend(tiny_checkpoint, EngineSettings(), CPU).describe() == {"front end": "onnxruntime on cpu"}


def test_weights_that_do_not_give_the_tokens_are_not_trusted(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = speech_tokens.net_of(tiny_checkpoint.speech_tokenizer).config
    monkeypatch.setattr(speech_tokens, "net_of", lambda path: SpeechTokenizerNet(config).requires_grad_(False))
    with pytest.raises(EngineUnavailable, match="of onnxruntime's tokens in a probe; choose onnxruntime as front_end"):
        build_encoders(tiny_checkpoint, TORCH, CPU)


def test_auto_stays_with_onnxruntime_and_says_why(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> SpeechTokenizerNet:
        raise EngineUnavailable("the file has no layer for encoder.conv1")

    monkeypatch.setattr(speech_tokens, "net_of", refuse)
    with caplog.at_level(logging.WARNING):
        found = build_encoders(tiny_checkpoint, EngineSettings(), torch.device("meta"))  # any but the CPU
    assert found.name == "onnxruntime on cpu (not torch: the file has no layer for encoder.conv1)"
    assert found.tokens.identity.endswith("@CPUExecutionProvider")
    assert len(caplog.records) == 1


def test_an_unknown_front_end_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="front_end"):
        replace(EngineSettings(), front_end="tape")


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_a_gpu_hears_what_onnxruntime_hears(name: str, tiny_checkpoint: Checkpoint, voice: AudioClip) -> None:
    checkpoint = resolve_checkpoint("demo") if name == "demo" else tiny_checkpoint
    request = SpeechRequest(reference=voice, text="Hello.")
    frontend = Frontend(checkpoint, EngineSettings(), torch.device("cuda"))
    assert frontend.describe() == {"front end": "torch on cuda"}
    ours = frontend.prepare(request).reference
    theirs = Frontend(checkpoint, EngineSettings(), CPU).prepare(request).reference
    assert (ours.speech_tokens == theirs.speech_tokens).float().mean() >= 0.95  # rounding edges
    torch.testing.assert_close(ours.mel, theirs.mel, atol=1e-3, rtol=0)
    assert torch.cosine_similarity(ours.speaker, theirs.speaker, dim=0) > 0.999
    assert ours.key != theirs.key and ours.mel.device == CPU
