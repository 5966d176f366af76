"""Whether more than one person speaks in a recording: the speaker vectors of its parts are compared with each other.

Measured with the demo's encoder at 1.6 s: the least alike parts of 11 recordings of one person have a cosine of .28 to
.73; of 55 pairs of such recordings joined end to end 52 lie under .2. Voices that speak at the same time are no parts
and stay unnoticed (.38 for two channels mixed down).
"""

from collections.abc import Callable, Sequence

import numpy as np
import soxr

from app.reference_check import RATE, Span
from runtime import AudioClip

PART_SECONDS = 1.6  # of speech, pauses left out; shorter parts differ within one voice as well
LONGEST_SECONDS = 30.0
UNLIKE = 0.2  # cosine

Embed = Callable[[AudioClip], np.ndarray]  # the engine's speaker vector of a clip


def several_voices(clip: AudioClip, speech: Sequence[Span], embed: Embed) -> bool:
    """True when two parts of the speech are hardly by one person; False as well where there is too little of it."""
    samples = soxr.resample(clip.samples, clip.sample_rate, RATE).astype(np.float32)
    spoken = np.concatenate([samples[:0], *(samples[int(b * RATE) : int(e * RATE)] for b, e in speech)])
    spoken, size = spoken[: int(LONGEST_SECONDS * RATE)], int(PART_SECONDS * RATE)
    parts = [spoken[at : at + size] for at in range(0, len(spoken) - size + 1, size // 2)]
    if len(parts) < 2:
        return False
    vectors = np.stack([embed(AudioClip(part, RATE)) for part in parts])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return bool((vectors @ vectors.T).min() < UNLIKE)
