"""Marks between the words: exact pauses, signs that the model does not know, and a list of words with their readings.

`[pause 1.5s]` and `<break time="1.5s"/>` become silence and never reach the model. Inline pronunciations such as
`[j][ǐ]` and `[HH][AH0]` are tokens of the model and pass untouched; what merely looks like one is told.
"""

import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import RequestError

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 10.0  # seconds, of one mark
LONGEST_GAP = 60.0  # seconds, of all marks in one place
MOST_WORDS = 2000
LONGEST_WORD, LONGEST_READING = 100, 400  # characters
LARGEST_WORDS_FILE = 2**20  # bytes

_MARK = re.compile(r"\[pause\b([^\[\]]*)\]|<break\b([^<>]*)>(?:\s*</break\s*>)?", re.IGNORECASE)
_SECONDS = re.compile(
    r"""(?:[\s:=]*|\s*time\s*=\s*["'“”]?\s*)(\d*[.,]?\d+)\s*(ms|s|sec|secs|seconds?|秒)?\s*["'“”]?\s*/?\s*""",
    re.IGNORECASE,
)
_ATTRIBUTE = r"""\s+[\w:-]+\s*=\s*(?:"[^"<>]*"|'[^'<>]*')"""
_TAG = re.compile(rf"</?[A-Za-z][\w:-]*(?:{_ATTRIBUTE})*\s*/?>|\{{\s*/?(?:pause|break|silence|wait)\b[^{{}}]*\}}", re.I)
_BRACKETED = re.compile(r"\[[^\W\d_][\w' -]{0,30}\]")
_CJK = "\u3040-\u30ff\u4e00-\u9fff"  # written without spaces, so a word may begin and end anywhere
_LETTERS = re.compile(rf"[^\W{_CJK}]{{2}}")
_UNTOUCHED = re.compile(r"\[[^\[\]\s]*\]|</?[A-Za-z]+>")


@dataclass(frozen=True, slots=True)
class Passage:
    """Text that is spoken after a silence."""

    pause_before_seconds: float
    text: str


def cut_at_pauses(text: str) -> list[Passage]:
    """At least one passage; the last is empty when the text ends in a pause.

    Raises RequestError for a pause without a length or out of bounds.
    """
    passages, start, pause = [], 0, 0.0
    for mark in _MARK.finditer(text):
        passages.append(Passage(pause, text[start : mark.start()]))
        start, pause = mark.end(), _pause_seconds(mark)
    return [*passages, Passage(pause, text[start:])]


def without_pauses(text: str) -> str:
    return _MARK.sub(" ", text)


def _pause_seconds(mark: re.Match[str]) -> float:
    written = mark[1] if mark[1] is not None else mark[2]
    found = _SECONDS.fullmatch(written)
    if found is None:
        raise RequestError(f'{mark[0]} has no length that can be read; write [pause 1.5s] or <break time="1.5s"/>')
    seconds = float(found[1].replace(",", ".")) / (1000 if (found[2] or "").lower() == "ms" else 1)
    if not SHORTEST_PAUSE <= seconds <= LONGEST_PAUSE:
        raise RequestError(f"{mark[0]} is out of bounds; a pause lasts {SHORTEST_PAUSE:g} to {LONGEST_PAUSE:g} s")
    return seconds


def drop_unknown_tags(text: str, known: Collection[str]) -> str:
    """Takes out tags that the model has no token for: it would read their names aloud."""
    return _TAG.sub(lambda tag: tag[0] if tag[0] in known else " ", text)


def mark_notices(text: str, known: Collection[str]) -> list[str]:
    """What the listener should know of the marks in a text; one sentence each."""
    text = without_pauses(text)
    told = []
    if tags := _unknown(_TAG, text, known):
        told.append(f"not spoken, as the model has no such mark: {' '.join(tags)}; a pause is written [pause 1.5s]")
    if signs := _unknown(_BRACKETED, text, known):
        told.append(f"read as words, as the model has no such sound: {' '.join(signs)}")
    return told


def _unknown(pattern: re.Pattern[str], text: str, known: Collection[str]) -> list[str]:
    return list(dict.fromkeys(match[0] for match in pattern.finditer(text) if match[0] not in known))


# Words and their readings


def apply_words(text: str, words: Mapping[str, str]) -> str:
    """Puts readings in place of words, the longest first, in one pass; marks and tokens in brackets stay as they are.

    A word in small letters stands for any spelling of it, `US` only for itself. Letters next to a word make it another
    word, except where Chinese or kana touch it. Raises RequestError for a list that cannot be used.
    """
    words = {unicodedata.normalize("NFC", word.strip()): reading.strip() for word, reading in words.items()}
    if not words:
        return text
    check_words(words)
    lengths: dict[str, list[int]] = {}  # by first character; of two words that begin alike the longer one is meant
    for word in sorted(words, key=len, reverse=True):
        same = lengths.setdefault(word[0].lower(), [])
        if len(word) not in same:
            same.append(len(word))
    out: list[str] = []
    start = 0
    while start < len(text):
        part = mark[0] if (mark := _UNTOUCHED.match(text, start)) else text[start]
        reading = part
        for length in lengths.get(text[start].lower(), ()) if len(part) == 1 else ():
            found = text[start : start + length]
            if (known := words.get(found) or words.get(found.lower())) and _stands_alone(text, start, start + length):
                part, reading = found, known
                break
        out.append(reading)
        start += len(part)
    return "".join(out)


def check_words(words: Mapping[str, str]) -> None:
    """Raises RequestError for a list that cannot be used."""
    if len(words) > MOST_WORDS:
        raise RequestError(f"the word list has {len(words)} words; keep it to {MOST_WORDS}")
    for word, reading in words.items():
        if not word or not reading:
            raise RequestError(f"the word list gives {word!r} the reading {reading!r}; neither may be empty")
        if len(word) > LONGEST_WORD or len(reading) > LONGEST_READING:
            raise RequestError(
                f"the word list has a long entry, {word[:20]!r}; a word has at most {LONGEST_WORD} characters and "
                f"its reading {LONGEST_READING}"
            )
        if "<|" in reading or _MARK.search(reading):
            raise RequestError(
                f"the word list reads {word!r} as {reading!r}; a reading holds no pause or control token"
            )


def load_words(path: Path) -> dict[str, str]:
    """Reads a word list: a JSON object, or lines `word = reading`, where # begins a comment. The last entry holds."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_WORDS_FILE + 1)
        if len(content) > LARGEST_WORDS_FILE:
            raise RequestError(f"the word list {path.name} is larger than {LARGEST_WORDS_FILE >> 10} KiB; shorten it")
        text = content.decode("utf-8-sig")
    except OSError as failed:
        raise RequestError(f"the word list {path.name} cannot be read: {failed.strerror}") from failed
    except UnicodeDecodeError as failed:
        raise RequestError(f"the word list {path.name} is not UTF-8; save it as UTF-8") from failed
    words = parse_words(text)
    check_words(words)
    return words


def parse_words(text: str) -> dict[str, str]:
    """A word list from its text. Raises RequestError with the line that cannot be read."""
    if text.lstrip().startswith("{"):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as broken:
            raise RequestError(f"the word list is no JSON: {broken}") from broken
        if not all(isinstance(reading, str) for reading in entries.values()):
            raise RequestError('the word list has a reading that is no text; write {"word": "reading"}')
        return {word.strip(): reading.strip() for word, reading in entries.items()}
    words = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, sign, reading = line.partition("=")
        if not sign or not word.strip() or not reading.strip():
            raise RequestError(f"line {number} of the word list is {line.strip()[:40]!r}; write word = reading")
        words[word.strip()] = reading.strip()
    return words


def _stands_alone(text: str, start: int, end: int) -> bool:
    """True when no letter of the word touches a letter outside of it."""
    return not (start > 0 and _LETTERS.match(text, start - 1)) and not _LETTERS.match(text, end - 1)
