"""Voices to try without a recording: a folder of wav files, each with its words in a text file of the same name."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "voices"


@dataclass(frozen=True, slots=True)
class Example:
    """A voice that may be cloned by anybody (assets/voices/README.md)."""

    name: str
    transcript: str
    sound: Path


def load_examples(folder: Path = FOLDER) -> list[Example]:
    """Every `x.wav` with its `x.txt`, by file name. An absent folder has none; a wav alone is our own mistake."""
    return [
        Example(sound.stem.capitalize(), sound.with_suffix(".txt").read_text(encoding="utf-8").strip(), sound)
        for sound in sorted(folder.glob("*.wav"))
    ]
