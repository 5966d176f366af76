"""Names, clips and archives of voices, held to what a file system and the engine take."""

import io
import os
import unicodedata
import zipfile
import zlib
from pathlib import Path

import numpy as np
import soundfile

from runtime import AudioClip, RequestError, load_clip

LONGEST_NAME = 80  # characters
LARGEST_RECORD = 64 * 2**10  # bytes of voice.json
LARGEST_CLIP = 64 * 2**20  # bytes; 30 s of float samples at the highest rate
RECORD = "voice.json"
_NOT_IN_NAMES = ':：/\\<>"|?*'  # a colon ends the name in a script; the others are no part of file names on Windows
_RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(10))}


def check_name(name: str) -> str:
    """A name in any script, in one spelling. Raises RequestError for one that cannot be kept."""
    name = " ".join(unicodedata.normalize("NFC", name).split())
    if not name or len(name) > LONGEST_NAME:
        raise RequestError(f"the name has {len(name)} characters; give it 1 to {LONGEST_NAME}")
    for char in name:
        if char in _NOT_IN_NAMES or unicodedata.category(char)[0] == "C":
            raise RequestError(f"the name {name!r} holds {char!r}; leave it out")
    return name


def file_name(name: str, suffix: str = ".zip") -> str:
    """A name for the export of a voice that every file system takes."""
    stem = name.rstrip(". ") or "voice"
    if stem.split(".")[0].upper() in _RESERVED or stem.startswith("."):
        stem = f"voice {stem.lstrip('.')}"
    while len((stem + suffix).encode()) > 200:
        stem = stem[:-1]
    return stem + suffix


def encode_clip(clip: AudioClip) -> tuple[str, bytes]:
    """A container that gives the same samples back: FLAC of 16 or 24 bits where that is exact, else float WAV."""
    for bits in (16, 24) if clip.sample_rate <= 192_000 else ():
        scaled = clip.samples.astype(np.float64) * 2 ** (bits - 1)
        if np.array_equal(scaled, np.rint(scaled)) and -(2 ** (bits - 1)) <= scaled.min() <= scaled.max() < 2 ** (
            bits - 1
        ):
            name, subtype = "clip.flac", f"PCM_{bits}"
            break
    else:
        name, subtype = "clip.wav", "FLOAT"
    file = io.BytesIO()
    soundfile.write(file, clip.samples, clip.sample_rate, format=name[-4:].strip(".").upper(), subtype=subtype)
    assert np.array_equal(load_clip(file.getvalue(), name).samples, clip.samples)
    return name, file.getvalue()


def read_archive(path: Path) -> tuple[bytes, dict[str, bytes]]:
    """The record and the recordings of an archive. Reads no more than a voice may hold, whatever the archive says."""
    allowed = {RECORD: LARGEST_RECORD, "clip.flac": LARGEST_CLIP, "clip.wav": LARGEST_CLIP}
    found: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(read_bounded(path, LARGEST_CLIP + 2 * LARGEST_RECORD))) as archive:
            names = archive.namelist()
            methods = {entry.compress_type for entry in archive.infolist()}
            if (
                len(names) != 2
                or not set(names) <= set(allowed)
                or not methods
                <= {
                    zipfile.ZIP_STORED,
                    zipfile.ZIP_DEFLATED,
                }
            ):
                raise RequestError(f"{path.name} is no exported voice; it has to hold {RECORD} and one clip")
            for name in names:
                with archive.open(name) as part:
                    found[name] = part.read(allowed[name] + 1)
                if len(found[name]) > allowed[name]:
                    raise RequestError(f"{path.name} holds a {name} of more than {allowed[name] >> 10} KiB")
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as broken:
        raise RequestError(f"{path.name} is no zip file that can be read: {broken}") from broken
    return found.pop(RECORD, b""), found


def read_bounded(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as failed:
        raise RequestError(f"{path.name} cannot be read: {failed.strerror}") from failed
    if len(content) > limit:
        raise RequestError(f"{path.name} is larger than {limit >> 10} KiB")
    return content


def write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a rename must not reach the disk before what it names
