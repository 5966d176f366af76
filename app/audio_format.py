"""Float samples -> bytes that files and players take: 16-bit PCM, and WAV, FLAC or MP3 around it.

Shapes: S samples, mono, float32 in [-1, 1]. PCM16 is little-endian, 2 bytes a sample, full scale 32767.
"""

import secrets
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import soundfile

from runtime import GenerationError

FULL_SCALE = 32767

FileFormat = Literal["wav", "flac", "mp3"]
FILE_FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
GENERATED = "Generated speech: made by a computer with Mynah in a cloned voice, not spoken by a person."


def to_pcm16(samples: np.ndarray) -> bytes:
    """Samples [S] -> PCM16. What passes full scale stays at full scale; it never wraps to the other sign."""
    if not np.isfinite(samples).all():
        raise GenerationError("the sound holds NaN or infinite samples; try another seed")
    scaled = np.rint(np.asarray(samples, dtype=np.float32) * FULL_SCALE)
    return np.clip(scaled, -FULL_SCALE - 1, FULL_SCALE).astype("<i2").tobytes()


def write_sound(path: Path, pcm: bytes, sample_rate: int, note: str = "") -> None:
    """Writes PCM16 as the format of the path's suffix, and into its metadata that it is generated speech."""
    subtype = "MPEG_LAYER_III" if path.suffix == ".mp3" else "PCM_16"
    with soundfile.SoundFile(path, "w", sample_rate, 1, subtype) as file:
        file.title = "Generated speech"
        file.comment = f"{GENERATED} {note}".strip()
        file.software = "Mynah"
        file.buffer_write(pcm, "int16")


@contextmanager
def wav_file(path: Path, sample_rate: int) -> Iterator[wave.Wave_write]:
    """Opens a mono PCM16 WAV for `writeframes`. It appears under its name when complete; after an error, not at all."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # same folder, so that renaming is atomic
    try:
        with wave.open(str(unfinished), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(sample_rate)
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
