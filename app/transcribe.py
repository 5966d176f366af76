"""Words of a recording by faster-whisper, which is optional: extra `asr`, and a model that is on this disk already.

It runs on the CPU, so that it never takes the GPU from a voice that is speaking, and is loaded by the first use.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from runtime import AudioClip, EngineUnavailable, RequestError

RATE = 16_000


class Transcriber:
    """Writes down what is said. Loads its model once; one clip at a time."""

    def __init__(self, model: str) -> None:
        self._name = model
        self._lock = threading.Lock()
        self._model: Any = None

    def transcribe(self, clip: AudioClip) -> str:
        """Raises EngineUnavailable, saying what to install, and RequestError where there are no words."""
        with self._lock:
            self._model = self._model or load(self._name)
            samples = soxr.resample(clip.samples, clip.sample_rate, RATE).astype(np.float32)
            segments, _ = self._model.transcribe(samples, beam_size=5, condition_on_previous_text=False)
            words = " ".join(segment.text.strip() for segment in segments).strip()
        if not words:
            raise RequestError("no words were understood; write them down by hand")
        return words


def load(name: str) -> Any:
    """The model `name`: a size such as `small`, or a folder. It is not fetched behind anybody's back."""
    try:
        from faster_whisper import WhisperModel
    except ImportError as missing:
        raise EngineUnavailable(
            "writing the words down needs the extra `asr`: pip install 'mynah[asr]', then start again"
        ) from missing
    try:
        return WhisperModel(name, device="cpu", compute_type="int8", local_files_only=True)
    except (OSError, ValueError, RuntimeError) as absent:
        if Path(name).name != name:
            raise EngineUnavailable(
                f"{Path(name).name} holds no transcription model; start with --transcription and a folder of "
                "faster-whisper's layout, or a size"
            ) from absent
        raise EngineUnavailable(
            f"the transcription model is not on this disk; fetch it once: hf download Systran/faster-whisper-{name}"
        ) from absent
