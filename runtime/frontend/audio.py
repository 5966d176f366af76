"""Reference audio: bytes of any usual format -> checked mono samples -> samples at the rate a model wants.

Shapes: S samples, float32 in [-1, 1]. Libraries decode; the content decides how, never the file's name. Every bound
is checked here, before a model sees the clip. Messages name a file by its base name: the server's paths stay unsaid.
"""

import io
import math
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

import av
import numpy as np
import soundfile
import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.errors import RequestError
from runtime.types import AudioClip

SHORTEST_SECONDS = 0.5
LONGEST_SECONDS = 30.0  # the speech tokenizer takes no more (spec 2.1)
LONGEST_FILE_SECONDS = 600.0
LARGEST_FILE_BYTES = 256 * 2**20
LOWEST_RATE = 8_000  # spec 2.1 refuses below 16 kHz; telephone recordings are let in with a warning
FULL_RATE = 16_000
HIGHEST_RATE = 384_000
SILENT_PEAK = 1e-3  # -60 dBFS
SCALED_PEAK = 8.0  # above it the samples were never scaled to [-1, 1]; decoded mp3 overshoots by far less

_BLOCK_FRAMES = 1 << 18
# FFmpeg also knows playlists, which open other files and addresses: only containers that hold sound themselves.
_CONTAINERS = "aac,ac3,aiff,amr,asf,au,avi,caf,flac,flv,matroska,webm,mov,mp4,m4a,mp3,mpeg,mpegts,ogg,w64,wav"

_Blocks = Iterator[tuple[np.ndarray, int]]  # ([n, channels] float32, sample rate)


def load_clip(source: Path | bytes | BinaryIO, name: str | None = None) -> AudioClip:
    """Decodes a file, its bytes or an open stream, and averages the channels.

    Raises RequestError, naming the file by `name` or its own base name, when there is no usable sound in it.
    """
    if name is None:
        name = str(source) if isinstance(source, Path) else "the audio"
    label = PureWindowsPath(name).name or "the audio"
    content = _read(source, label)
    if not content:
        raise RequestError(f"{label} is empty (0 bytes); choose a recording")
    try:
        samples, rate = _mix_down(_soundfile_blocks(content), label)
    except soundfile.SoundFileError:
        try:
            samples, rate = _mix_down(_av_blocks(content), label)
        except (av.FFmpegError, ValueError) as unreadable:
            raise RequestError(
                f"{label} cannot be decoded: it is damaged or no recording; give wav, mp3, flac, ogg, m4a, webm or aiff"
            ) from unreadable
    if not len(samples):
        raise RequestError(f"{label} holds no sound; choose a recording")
    if not np.isfinite(samples).all():
        raise RequestError(f"{label} holds samples that are NaN or infinite; export it again")
    return AudioClip(samples, rate)


def _read(source: Path | bytes | BinaryIO, label: str) -> bytes:
    if isinstance(source, bytes):
        content = source
    elif isinstance(source, Path):
        try:
            with source.open("rb") as file:
                content = file.read(LARGEST_FILE_BYTES + 1)
        except OSError as failed:
            raise RequestError(f"{label} cannot be read: {failed.strerror}") from failed
    else:
        content = source.read(LARGEST_FILE_BYTES + 1)
    if len(content) > LARGEST_FILE_BYTES:
        raise RequestError(f"{label} is larger than {LARGEST_FILE_BYTES >> 20} MiB; cut out the part with the voice")
    return content


def _soundfile_blocks(content: bytes) -> _Blocks:
    with soundfile.SoundFile(io.BytesIO(content)) as sound:
        while len(block := sound.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
            yield block, sound.samplerate


def _av_blocks(content: bytes) -> _Blocks:
    options = {"format_whitelist": _CONTAINERS}
    with av.open(io.BytesIO(content), "r", options=options, metadata_errors="ignore") as container:
        if not container.streams.audio:
            return
        planar = av.AudioResampler(format="fltp")  # changes the sample format only
        for frame in container.decode(audio=0):
            for block in planar.resample(frame):
                yield block.to_ndarray().T, block.sample_rate


def _mix_down(blocks: _Blocks, label: str) -> tuple[np.ndarray, int]:
    """Averages channels block by block, so that memory stays bounded whatever the file unpacks to."""
    mono: list[np.ndarray] = []
    total, rate = 0, 0
    for block, rate in blocks:
        mono.append(block.mean(axis=1, dtype=np.float32))
        total += len(block)
        if total > LONGEST_FILE_SECONDS * min(rate, HIGHEST_RATE):
            raise RequestError(
                f"{label} is longer than {LONGEST_FILE_SECONDS / 60:.0f} minutes; cut out the part with the voice"
            )
    return np.concatenate(mono) if mono else np.empty(0, np.float32), rate


def check_reference(clip: AudioClip, *, trim: bool, name: str = "reference") -> tuple[AudioClip, list[str]]:
    """Holds a clip to the model's bounds. Returns an own copy, cut to 30 s if `trim`, and warnings for the listener.

    Raises RequestError with the fact, the limit and the way out. `name` names the clip in the messages.
    """
    samples, rate, warnings = clip.samples, clip.sample_rate, []
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
        raise RequestError(
            f"{name} is an array {list(samples.shape)} of {samples.dtype}; give mono float samples [S] in [-1, 1]"
        )
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise RequestError(
            f"{name} has a sample rate of {rate} Hz; give {LOWEST_RATE} to {HIGHEST_RATE} Hz, best 24000 or more"
        )
    if not len(samples):
        raise RequestError(f"{name} is empty; give {SHORTEST_SECONDS} s of speech or more")
    if clip.seconds < SHORTEST_SECONDS:
        raise RequestError(f"{name} is {clip.seconds:.2f} s long; give {SHORTEST_SECONDS} s of speech or more")
    if clip.seconds > LONGEST_SECONDS:
        if not trim:
            raise RequestError(
                f"{name} is {clip.seconds:.2f} s long; cut it to {LONGEST_SECONDS:.0f} s or less, "
                f"or ask for trim to use its first {LONGEST_SECONDS:.0f} s"
            )
        warnings.append(f"{name} is {clip.seconds:.1f} s long; its first {LONGEST_SECONDS:.0f} s are used")
    # The copy is ours: the caller may write into its array while the request runs.
    samples = np.array(samples[: int(LONGEST_SECONDS * rate)], dtype=np.float32)
    peak = float(np.abs(samples).max())
    if not math.isfinite(peak):
        raise RequestError(f"{name} holds samples that are NaN or infinite; export it again")
    if peak < SILENT_PEAK:
        raise RequestError(f"{name} is silent (its peak is under -60 dBFS); give a recording with a voice in it")
    if peak > SCALED_PEAK:
        raise RequestError(f"{name} peaks at {peak:.0f} times full scale; scale its samples to [-1, 1]")
    if rate < FULL_RATE:
        warnings.append(
            f"{name} has a sample rate of {rate} Hz; the voice will sound dull, {FULL_RATE} Hz or more keeps its detail"
        )
    return AudioClip(samples, rate), warnings


def resample(samples: Tensor, orig: int, new: int) -> Tensor:
    """Windowed-sinc resampling of [.., S] from `orig` to `new` Hz -> [.., ceil(S * new / orig)] (spec 2.1).

    Every `new / gcd` outputs the filter phases repeat, one stride of `orig / gcd` inputs further. Only the taps under
    the window are kept, so that rates without a common divisor need no more memory than friendly ones.
    """
    divisor = math.gcd(orig, new)
    o, n = orig // divisor, new // divisor
    if o == n:
        return samples
    first, taps = _sinc_taps(o, n)
    width = -int(first.min())
    index = (first + width).to(samples.device)
    taps = taps.to(samples)
    padded = F.pad(samples, (width, width + o + 1))
    blocks = padded.unfold(-1, width + o + width + 1, o)  # [.., S // o + 1, inputs under one round of phases]
    out = taps[0] * blocks[..., index]
    for k in range(1, len(taps)):
        out += taps[k] * blocks[..., index + k]
    return out.flatten(-2)[..., : -(-n * samples.shape[-1] // o)]


def _sinc_taps(o: int, n: int, lobes: int = 6, rolloff: float = 0.99) -> tuple[Tensor, Tensor]:
    """Filter of each phase: its first input relative to the round's start [n], and its taps [K, n] float32."""
    base = rolloff * min(o, n)
    centre = torch.arange(n, dtype=torch.float64) * o / n
    first = torch.ceil(centre - lobes * o / base)
    inputs = first + torch.arange(int(2 * lobes * o / base) + 1, dtype=torch.float64)[:, None]
    tau = (base / o * (inputs - centre)).clamp(-lobes, lobes)
    taps = base / o * torch.sinc(tau) * torch.cos(math.pi * tau / (2 * lobes)) ** 2
    return first.long(), taps.float()
