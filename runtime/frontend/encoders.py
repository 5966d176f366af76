"""Who turns reference audio into tokens, mel and a speaker vector, and where: one choice, made at load.

onnxruntime on the CPU is the reference. On a GPU the same nets run in torch, with weights from the same ONNX files.
Those are read by structure, not by name, so a net is trusted only when it gives what onnxruntime gives on a probe.
"""

import contextlib
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.errors import EngineUnavailable, GenerationError
from runtime.frontend import speaker, speech_tokens
from runtime.frontend.speaker import SpeakerEncoder, TorchSpeakerEncoder
from runtime.frontend.speech_tokens import SpeechTokenizer, TorchSpeechTokenizer
from runtime.settings import EngineSettings

log = logging.getLogger(__name__)
_PROBE_SECONDS = 3
_EQUAL_TOKENS = 0.95  # at a rounding edge two devices may differ
_EQUAL_VECTORS = 0.999  # cosine


class TokenEncoder(Protocol):
    identity: str

    def encode(self, samples: Tensor) -> Tensor:
        """16 kHz samples [n] -> tokens [P] int64 on the CPU. Raises GenerationError."""
        ...


class VectorEncoder(Protocol):
    identity: str

    def embed(self, samples: Tensor) -> Tensor:
        """16 kHz samples [n] -> speaker vector [E] float32 on the CPU. Raises GenerationError."""
        ...


@dataclass(frozen=True, slots=True)
class Encoders:
    tokens: TokenEncoder
    speaker: VectorEncoder
    device: torch.device  # where samples and features lie
    name: str  # for people
    stream: torch.cuda.Stream | None = None  # on a GPU

    @property
    def identity(self) -> tuple[str, str]:
        """Part of a cached reference's key: devices and libraries differ in the last digits."""
        return self.tokens.identity, self.speaker.identity

    def apart(self) -> AbstractContextManager[object]:
        """Work in here does not stand in line behind what the stages have given the GPU to do."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def build_encoders(checkpoint: Checkpoint, settings: EngineSettings, device: torch.device) -> Encoders:
    """As the settings say; `auto` is torch on a GPU whose weights could be read, else onnxruntime.

    Raises CheckpointError for files that cannot be opened, EngineUnavailable when torch was asked for in vain.
    """
    codebook, size = checkpoint.config.lm.speech_tokens, checkpoint.config.speaker_dim
    tokens = SpeechTokenizer(checkpoint.speech_tokenizer, threads=settings.onnx_threads, codebook=codebook)
    vectors = SpeakerEncoder(checkpoint.speaker_encoder, threads=settings.onnx_threads, embedding_size=size)
    reference = Encoders(tokens, vectors, torch.device("cpu"), "onnxruntime on cpu")
    if settings.front_end == "onnxruntime" or (settings.front_end == "auto" and device.type == "cpu"):
        return reference
    try:
        found = _in_torch(checkpoint, device)
        _compare(found, reference)
    except EngineUnavailable as reason:
        if settings.front_end == "torch":
            raise EngineUnavailable(f"no torch front end: {reason}; choose onnxruntime as front_end") from reason
        log.warning("references are encoded by onnxruntime: %s", reason)
        return Encoders(tokens, vectors, reference.device, f"{reference.name} (not torch: {reason})")
    return found


def _in_torch(checkpoint: Checkpoint, device: torch.device) -> Encoders:
    codebook, size = checkpoint.config.lm.speech_tokens, checkpoint.config.speaker_dim
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # process-wide, and on by default: tokens are rounded from float32
    files = checkpoint.speech_tokenizer, checkpoint.speaker_encoder
    tokenizer, encoder = speech_tokens.net_of(files[0]), speaker.net_of(files[1])
    return Encoders(
        TorchSpeechTokenizer(tokenizer, device, files[0].name, codebook),
        TorchSpeakerEncoder(encoder, device, files[1].name, size),
        device,
        f"torch on {device.type}",
        torch.cuda.Stream(device) if device.type == "cuda" else None,
    )


def _compare(found: Encoders, reference: Encoders) -> None:
    """Raises EngineUnavailable when the two do not hear the same in a probe."""
    probe = _probe()
    try:
        with found.apart():
            tokens, vector = found.tokens.encode(probe), found.speaker.embed(probe)
    except GenerationError as failed:
        raise EngineUnavailable(f"the weights that were read give no result ({failed})") from failed
    equal = float((tokens == reference.tokens.encode(probe)).float().mean())
    if equal < _EQUAL_TOKENS:
        raise EngineUnavailable(f"{found.tokens.identity} gives {equal:.0%} of onnxruntime's tokens in a probe")
    cosine = float(torch.cosine_similarity(vector, reference.speaker.embed(probe), dim=0))
    if cosine < _EQUAL_VECTORS:
        raise EngineUnavailable(f"{found.speaker.identity} gives a vector of cosine {cosine:.3f} to onnxruntime's")


def _probe() -> Tensor:
    """Something like a voice, 16 kHz: a gliding pitch with overtones that comes and goes, over breath."""
    time = torch.arange(_PROBE_SECONDS * 16_000) / 16_000
    phase = 2 * torch.pi * (140 * time + 15 * torch.sin(3 * time))
    voice = sum(torch.sin(harmonic * phase) / harmonic for harmonic in range(1, 20))
    breath = torch.randn(len(time), generator=torch.Generator().manual_seed(0))
    return 0.1 * voice * torch.sin(8 * time).clamp(min=0) + 0.01 * breath
