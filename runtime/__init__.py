"""Inference of CosyVoice3, from a request to sound. What stands here is the public surface."""

from runtime.checkpoint import Checkpoint
from runtime.engine import Engine
from runtime.errors import (
    CheckpointError,
    EngineUnavailable,
    GenerationError,
    Overloaded,
    RequestError,
    SpeechError,
)
from runtime.frontend.audio import load_clip
from runtime.hub import OFFICIAL, resolve_checkpoint
from runtime.settings import EngineSettings, Precision
from runtime.stream import SpeechStream
from runtime.types import AudioChunk, AudioClip, EndReason, Mode, SamplingParams, SpeechRequest, StreamStats

__all__ = [
    "OFFICIAL",
    "AudioChunk",
    "AudioClip",
    "Checkpoint",
    "CheckpointError",
    "EndReason",
    "Engine",
    "EngineSettings",
    "EngineUnavailable",
    "GenerationError",
    "Mode",
    "Overloaded",
    "Precision",
    "RequestError",
    "SamplingParams",
    "SpeechError",
    "SpeechRequest",
    "SpeechStream",
    "StreamStats",
    "load_clip",
    "resolve_checkpoint",
]
