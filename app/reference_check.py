"""Verdict on a reference clip before the engine sees it: length, levels, speech, noise, and the part to use.

Shapes: S samples at 16 kHz, W frames of 32 ms. Spans and windows are (begin, end) in seconds of the clip. Speech is
found by silero-vad's network, which its wheel ships; everything else is arithmetic on samples. Takes well under a
second for a minute of sound on one core.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal
from unicodedata import east_asian_width

import numpy as np
import onnxruntime
import soundfile
import soxr

from runtime import AudioClip

Span = tuple[float, float]
Level = Literal["good", "fair", "bad"]

RATE = 16_000  # of the networks
FRAME = 512  # samples a probability of speech stands for, 32 ms
CONTEXT = 64  # samples before the frame that the network looks at

SHORTEST, LONGEST = 0.5, 30.0  # seconds the engine takes
SHORT, LONG, BEST = 3.0, 15.0, 10.0  # seconds that clone well; what a proposal aims at
PAUSE = 0.2  # seconds without speech that a window may begin or end in
MARGIN = 0.25  # seconds of such a pause that are kept
RAGGED = 0.05  # a clip with less silence than this at its end stops in mid-word
RAGGED_LEVEL = 0.1  # of the whole; quieter ends are pauses
SILENCE_SECONDS = 0.2  # after an end in mid-word
QUIET_DB, LOUD_NOISE_DB = -20.0, 20.0  # peak under it is quiet; voice less than this above the pauses is noisy
NOISY_SCORE = 3.5  # DNSMOS background score of clean speech is above


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a clip."""

    seconds: float
    sample_rate: int
    peak_db: float  # dBFS
    clipped: int  # places where the top of the wave is cut off
    speech: tuple[Span, ...]
    noise_db: float | None  # level of the pauses, dBFS; None where there is no pause
    above_noise_db: float | None  # level of the voice over that
    window: Span  # the part to use: it begins and ends in pauses where the clip has any
    level: Level
    remarks: tuple[str, ...]  # what to know or to do, the gravest first

    @property
    def speech_seconds(self) -> float:
        return sum(end - begin for begin, end in self.speech)


class SpeechDetector:
    """silero-vad's network over a whole clip in one run. Threads may share it."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        model = _wheel("silero_vad") / "data" / "silero_vad_16k_sequence.onnx"
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    def probabilities(self, samples: np.ndarray) -> np.ndarray:
        """Probability of speech in each frame [W] of samples [S]."""
        frames = -(-len(samples) // FRAME)
        padded = np.zeros(CONTEXT + frames * FRAME, np.float32)
        padded[CONTEXT : CONTEXT + len(samples)] = samples
        windows = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + FRAME)[::FRAME]
        state = np.zeros((1, 1, 128), np.float32)
        return self._session.run(["speech_probs"], {"input": np.ascontiguousarray(windows), "h": state, "c": state})[0]


def check(clip: AudioClip, detector: SpeechDetector) -> Report:
    """Judges a clip of any length that `load_clip` accepts."""
    samples = soxr.resample(clip.samples, clip.sample_rate, RATE).astype(np.float32)
    probabilities = detector.probabilities(samples)
    speech = speech_spans(probabilities)
    noise, above = noise_levels(samples, probabilities)
    peak = float(np.abs(clip.samples).max(initial=0.0))
    clipped = clipped_places(clip.samples)
    window = propose_window(speech, clip.seconds)
    grave, mild = _remarks(clip, peak, clipped, speech, above, window)
    return Report(
        seconds=clip.seconds,
        sample_rate=clip.sample_rate,
        peak_db=_decibels(peak),
        clipped=clipped,
        speech=speech,
        noise_db=noise,
        above_noise_db=above,
        window=window,
        level="bad" if grave else "fair" if mild else "good",
        remarks=(*grave, *mild),
    )


def speech_spans(probabilities: np.ndarray) -> tuple[Span, ...]:
    """Where somebody speaks. Holes shorter than 100 ms are part of a word, bursts shorter than that are not one."""
    spans: list[list[int]] = []
    speaking = False
    for frame, probability in enumerate(probabilities):
        speaking = probability >= (0.35 if speaking else 0.5)
        if not speaking:
            continue
        if spans and frame - spans[-1][1] <= 3:
            spans[-1][1] = frame + 1
        else:
            spans.append([frame, frame + 1])
    return tuple((b * FRAME / RATE, e * FRAME / RATE) for b, e in spans if e - b > 3)


def noise_levels(samples: np.ndarray, probabilities: np.ndarray) -> tuple[float | None, float | None]:
    """Level of the pauses in dBFS and of the voice above it in dB, from frames that are surely one or the other."""
    whole = len(samples) // FRAME
    power = (samples[: whole * FRAME].reshape(whole, FRAME) ** 2).mean(axis=1)
    silent, spoken = power[probabilities[:whole] < 0.1], power[probabilities[:whole] > 0.8]
    if len(silent) < 4 or not len(spoken):
        return None, None
    noise = _decibels(float(np.sqrt(np.median(silent))))
    return noise, _decibels(float(np.sqrt(spoken.mean()))) - noise


def clipped_places(samples: np.ndarray) -> int:
    """Runs of at least three equal samples at the clip's own peak, when that peak is near full scale."""
    peak = np.abs(samples).max(initial=0.0)
    if peak < 0.95:
        return 0
    at_peak = np.concatenate([[False], np.abs(samples) >= 0.9995 * peak, [False]])
    edges = np.flatnonzero(at_peak[1:] != at_peak[:-1])
    return int((edges[1::2] - edges[::2] >= 3).sum())


def propose_window(speech: tuple[Span, ...], seconds: float) -> Span:
    """The part to clone from. Ends lie in pauses; a long clip gives the stretch whose length is nearest to 10 s."""
    if not speech:
        return 0.0, min(seconds, LONG)
    begins = [0] + [i + 1 for i, (one, two) in enumerate(pairwise(speech)) if two[0] - one[1] >= PAUSE]
    ends = [i - 1 for i in begins[1:]]
    last_is_whole = seconds - speech[-1][1] >= RAGGED
    if last_is_whole:
        ends.append(len(speech) - 1)
    stretches = _stretches(speech, begins, ends, seconds)
    if not last_is_whole and all(end - begin < SHORT for begin, end in stretches):
        ends.append(len(speech) - 1)  # a word that is cut off is better than too little
        stretches = _stretches(speech, begins, ends, seconds)
    if not stretches:  # somebody who never pauses
        begin = max(0.0, speech[0][0] - MARGIN)
        return begin, min(seconds, begin + LONG)
    whole = _with_margins(speech, begins[0], ends[-1], seconds)
    if whole in stretches:
        return whole
    return min(stretches, key=lambda window: abs(window[1] - window[0] - BEST))


def _stretches(speech: tuple[Span, ...], begins: list[int], ends: list[int], seconds: float) -> list[Span]:
    return [
        _with_margins(speech, first, last, seconds)
        for first in begins
        for last in ends
        if first <= last and speech[last][1] - speech[first][0] <= LONG
    ]


def _with_margins(speech: tuple[Span, ...], first: int, last: int, seconds: float) -> Span:
    before = speech[first - 1][1] if first else 0.0
    after = speech[last + 1][0] if last + 1 < len(speech) else seconds
    begin, end = speech[first][0], speech[last][1]
    return round(begin - min(MARGIN, (begin - before) / 2 if first else begin), 3), round(
        end + min(MARGIN, (after - end) / 2 if last + 1 < len(speech) else after - end), 3
    )


def transcript_doubt(transcript: str, speech_seconds: float) -> str | None:
    """A question where a transcript cannot be what is said in so many seconds of speech."""
    wide = sum(east_asian_width(letter) in "WF" for letter in transcript if letter.isalnum())
    narrow = sum(letter.isalnum() for letter in transcript) - wide
    usual = wide / 4.5 + narrow / 12.0  # seconds, at an ordinary pace
    if usual > 2.2 * speech_seconds + 0.5:
        return f"The words of the recording are too many for {speech_seconds:.1f} s of speech."
    if usual < speech_seconds / 4 - 0.5:
        return f"The words of the recording are too few for {speech_seconds:.1f} s of speech."
    return None


def ends_in_pauses(speech: tuple[Span, ...], window: Span) -> bool:
    """Whether neither edge of a window cuts into speech; 30 ms of doubt, one frame, are allowed."""
    return not any(begin + 0.03 < edge < end - 0.03 for begin, end in speech for edge in window)


def cut(clip: AudioClip, window: Span | None) -> AudioClip:
    """The part of a clip inside a window; None is all of it."""
    if window is None:
        return clip
    begin, end = (round(max(0.0, edge) * clip.sample_rate) for edge in window)
    return AudioClip(np.ascontiguousarray(clip.samples[begin:end]), clip.sample_rate)


def close_end(clip: AudioClip) -> AudioClip:
    """A clip that stops in mid-word gets a moment of silence, or what is spoken would begin with the rest of the word.

    Measured with the demo voice on three recordings cut in a word: eleven of twelve outputs began in full voice within
    10 ms; with the silence all begin 50 ms later or more.
    """
    tail = clip.samples[-round(RAGGED * clip.sample_rate) :]
    if not len(tail) or _rms(tail) < RAGGED_LEVEL * _rms(clip.samples):
        return clip
    silence = np.zeros(round(SILENCE_SECONDS * clip.sample_rate), np.float32)
    return AudioClip(np.concatenate([clip.samples, silence]), clip.sample_rate)


def _remarks(
    clip: AudioClip, peak: float, clipped: int, speech: tuple[Span, ...], above: float | None, window: Span
) -> tuple[list[str], list[str]]:
    """What makes the clip unusable, and what merely makes it worse."""
    grave, mild = [], []
    length = window[1] - window[0]
    spoken = sum(max(0.0, min(e, window[1]) - max(b, window[0])) for b, e in speech)
    if clip.seconds < SHORTEST:
        grave.append(f"It is {clip.seconds:.2f} s long; give {SHORTEST} s or more, best 3 to 15 s.")
    elif peak < 1e-3:
        grave.append("It is silent; check the microphone and record again.")
    elif not speech:
        grave.append("No speech was found in it; give a recording of somebody speaking.")
    elif length < SHORT:
        mild.append("It is short; 3 to 15 s of speech give a closer voice.")
    if clip.seconds > LONGEST:
        mild.append("It is longer than 30 s; only the lit part is used.")
    if speech and spoken < 0.5 * length:
        mild.append(f"Only {100 * spoken / length:.0f} % of the lit part is speech.")
    if clipped:
        mild.append(f"It is clipped in {clipped} places; record more softly.")
    if peak >= 1e-3 and _decibels(peak) < QUIET_DB:
        mild.append(f"It is quiet ({_decibels(peak):.0f} dB at its loudest); speak closer to the microphone.")
    if above is not None and above < LOUD_NOISE_DB:
        mild.append(f"There is noise: the voice is only {above:.0f} dB above its pauses.")
    if clip.sample_rate < RATE:
        mild.append(f"It is sampled at {clip.sample_rate / 1000:g} kHz; the voice will sound dull.")
    ragged = bool(speech) and clip.seconds - speech[-1][1] < RAGGED
    if not ends_in_pauses(speech, window) or (ragged and window[1] > clip.seconds - RAGGED):
        mild.append("There is no pause to end in; the last word may be cut off.")
    elif ragged:
        mild.append("It ends in mid-word; the lit part ends in the pause before.")
    return grave, mild


# Refinements: they may take longer and are told afterwards.


def channels_differ(path: Path) -> bool:
    """Whether a stereo file has another voice on each side. Looks into what libsndfile opens, else says no."""
    try:
        samples, _ = soundfile.read(path, frames=30 * 48_000, dtype="float32", always_2d=True)
    except soundfile.SoundFileError:
        return False
    if samples.shape[1] != 2 or not samples.std(axis=0).all():
        return False
    return bool(abs(np.corrcoef(samples.T)[0, 1]) < 0.3)


def background_score(clip: AudioClip) -> float | None:
    """DNSMOS background quality, 1 to 5, of the first 9 s; None without the extra `quality`, which has its network."""
    if find_spec("speechmos") is None:
        return None
    length = 144_160  # samples the network takes, 9.01 s; a shorter clip is repeated, as its authors do
    samples = soxr.resample(clip.samples, clip.sample_rate, RATE).astype(np.float32)
    if not len(samples):
        return None
    model = _wheel("speechmos") / "dnsmos_models" / "sig_bak_ovr.onnx"
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    raw = float(session.run(None, {"input_1": np.resize(samples, (1, length)).clip(-1, 1)})[0][0][1])
    return -0.13166888 * raw**2 + 1.60915514 * raw - 0.39604546  # the authors' fit from the network to opinion scores


def _wheel(name: str) -> Path:
    """Folder of an installed package, which is not imported: these want more than their networks do."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _rms(samples: np.ndarray) -> float:
    return float(np.sqrt((samples.astype(np.float64) ** 2).mean()))


def _decibels(level: float) -> float:
    return float(20 * np.log10(max(level, 1e-6)))
