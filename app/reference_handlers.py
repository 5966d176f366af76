"""The functions behind the place for a voice: verdict at upload, sound of a video, examples, words of a recording.

`judge` gives what reference.js shows. The same value comes back with each click, with the window that was chosen.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from app.audio_format import to_pcm16
from app.examples import Example
from app.reference_check import (
    NOISY_SCORE,
    Report,
    Span,
    SpeechDetector,
    background_score,
    channels_differ,
    check,
    cut,
)
from app.speaker_check import Embed, several_voices
from app.transcribe import Transcriber
from runtime import AudioClip, EngineUnavailable, RequestError, SpeechError, load_clip

BARS = 320  # of the drawn waveform
HEADLINES = {
    "good": "A good recording.",
    "fair": "Usable, and could be better.",
    "bad": "Not usable as it is.",
}

Shown = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What was chosen of a recording: a window in seconds, and the words that were written for another one."""

    window: Span | None = None
    stale_words: str | None = None

    @classmethod
    def of(cls, shown: Shown | None) -> "Part":
        """Reads what the page sends back; scripts may leave it out."""
        if not isinstance(shown, dict) or "window" not in shown:
            return cls()
        try:
            begin, end = (float(edge) for edge in shown["window"])
        except (TypeError, ValueError):
            raise RequestError("the part of the recording has no begin and end in seconds") from None
        return cls((begin, end), shown.get("stale_words") or None)


class ReferenceHandlers:
    """Holds the speech detector, the transcriber and the examples. Gradio calls its methods from many threads."""

    def __init__(self, transcriber: Transcriber, examples: list[Example], embed: Embed | None = None) -> None:
        """`embed` gives the speaker vector of a clip, where the weights are trained."""
        self._detector = SpeechDetector()
        self._transcriber = transcriber
        self._embed = embed
        self.examples = examples

    def judge(self, path: str | None) -> Iterator[Shown | None]:
        """The verdict at once, then what takes longer. A broken file is told here and not after the click."""
        if path is None:
            yield None
            return
        try:
            clip = load_clip(Path(path))
        except RequestError as error:
            yield {"key": secrets.token_hex(4), "level": "bad", "headline": str(error), "remarks": []}
            return
        report = check(clip, self._detector)
        shown = _shown(clip, report)
        yield shown
        if refined := self._refinements(clip, Path(path), report):
            level = "fair" if report.level == "good" else report.level
            yield shown | {
                "level": level,
                "headline": HEADLINES[level],
                "remarks": [*report.remarks, *refined],
            }

    def _refinements(self, clip: AudioClip, path: Path, report: Report) -> list[str]:
        said = []
        if channels_differ(path):
            said.append("Its two channels hold different voices; keep one of them.")
        elif self._embed is not None and several_voices(clip, report.speech, self._embed):
            said.append("Several people seem to speak in it; light a part with one of them.")
        score = background_score(clip)
        if score is not None and score < NOISY_SCORE:
            said.append(f"Its background is rated {score:.1f} of 5; a quieter room gives a clearer voice.")
        return said

    def speech_seconds(self, clip: AudioClip) -> float:
        return check(clip, self._detector).speech_seconds

    def transcribe(self, path: str | None, shown: Shown | None) -> str:
        """Words of the part that is used. Says what to do where it cannot."""
        if path is None:
            raise gr.Error("add a voice first", title="No recording", print_exception=False)
        try:
            return self._transcriber.transcribe(cut(load_clip(Path(path)), Part.of(shown).window))
        except SpeechError as error:
            title = "Not installed" if isinstance(error, EngineUnavailable) else "No words"
            raise gr.Error(str(error), title=title, print_exception=False) from error

    def example(self, index: int) -> tuple[tuple[int, np.ndarray], str, bool]:
        """Recording and words of an example voice, and that it may be cloned."""
        chosen = self.examples[index]
        return import_recording(str(chosen.sound)), chosen.transcript, True


def import_recording(path: str) -> tuple[int, np.ndarray]:
    """Sound of a file that the browser does not take for audio, such as webm or mp4, as samples for gr.Audio."""
    try:
        clip = load_clip(Path(path))
    except RequestError as error:
        raise gr.Error(str(error), title="Not a recording", print_exception=False) from error
    return clip.sample_rate, np.frombuffer(to_pcm16(clip.samples), "<i2")


def _shown(clip: AudioClip, report: Report) -> Shown:
    facts = [f"{report.seconds:.1f} s", f"{report.sample_rate / 1000:g} kHz", f"speech {report.speech_seconds:.1f} s"]
    facts.append(f"peak {round(report.peak_db)} dB")
    if report.above_noise_db is not None:
        facts.append(f"voice {report.above_noise_db:.0f} dB above the pauses")
    shown = {
        "key": secrets.token_hex(4),
        "level": report.level,
        "headline": HEADLINES[report.level],
        "facts": " · ".join(facts),
        "remarks": list(report.remarks),
    }
    if not len(clip.samples):
        return shown
    return shown | {
        "seconds": report.seconds,
        "window": list(report.window),
        "proposed": list(report.window),
        "speech": [list(span) for span in report.speech],
        "peaks": [round(float(np.abs(part).max(initial=0.0)), 4) for part in np.array_split(clip.samples, BARS)],
    }
