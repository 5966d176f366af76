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
from runtime.frontend.audio import check_reference, load_clip
from runtime.frontend.markup import load_words, parse_words
from runtime.frontend.reading import LANGUAGES
from runtime.hub import OFFICIAL, resolve_checkpoint
from runtime.levelling import loudness
from runtime.pace import expected_seconds
from runtime.settings import EngineSettings, Precision
from runtime.stream import SpeechStream
from runtime.types import (
    AudioChunk,
    AudioClip,
    EndReason,
    Mode,
    PlannedSentence,
    SamplingParams,
    SpeechPlan,
    SpeechRequest,
    SpokenSentence,
    StreamStats,
)

__all__ = [
    "LANGUAGES",
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
    "PlannedSentence",
    "Precision",
    "RequestError",
    "SamplingParams",
    "SpeechError",
    "SpeechPlan",
    "SpeechRequest",
    "SpeechStream",
    "SpokenSentence",
    "StreamStats",
    "check_reference",
    "expected_seconds",
    "load_clip",
    "load_words",
    "loudness",
    "parse_words",
    "resolve_checkpoint",
]
