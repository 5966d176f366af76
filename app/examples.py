"""Voices to try without a recording: a folder of wav files, each with a json of its name, transcript and licence."""

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "voices"


@dataclass(frozen=True, slots=True)
class Example:
    """A voice that may be cloned by anybody."""

    name: str
    transcript: str
    licence: str
    sound: Path


def load_examples(folder: Path = FOLDER) -> list[Example]:
    """Every `x.json` beside its `x.wav`, by file name. An absent folder has none; a broken entry is our own mistake."""
    examples = []
    for card in sorted(folder.glob("*.json")):
        fields = json.loads(card.read_text(encoding="utf-8"))
        sound = card.with_suffix(".wav")
        if not sound.is_file():
            raise FileNotFoundError(f"{card.name} describes {sound.name}, which is not there")
        examples.append(Example(fields["name"], fields["transcript"], fields["licence"], sound))
    return examples
