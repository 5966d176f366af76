"""Normalised text to sentences of a length that the model speaks well (spec 2.8).

A unit is what lies between two stops; sentences are units packed together. The caller says how a length is counted:
characters where there is Chinese, else text tokens.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable

Length = Callable[[str], int]

FULL_LENGTH = 80  # a sentence is closed before it passes this ...
MIN_LENGTH = 60  # ... unless it would be no longer than this
REST_LENGTH = 20  # a rest shorter than this is spoken with the sentence before it
HARD_LENGTH = 160  # intended only: where no stop comes, a cut comes here

_CHINESE_STOPS = "。？！；：、.?!;"
_OTHER_STOPS = ".?!;:"

# Ours: wide stops in any text, and narrow ones except inside of 3.14, 12:30 or example.com.
_WIDE = "。？！；：、…।؟۔"
_NARROW = ".?!;:"
_CLOSERS = "\"”’')）」』】\\]"
_UNIT = re.compile(rf".*?(?:(?:[{_WIDE}]|[{_NARROW}](?![A-Za-z0-9]))++[{_CLOSERS}]*+|$)", re.DOTALL)
_CLOSED = re.compile(rf"[{_WIDE}{_NARROW}][{_CLOSERS}]*$")
_TITLE = re.compile(r"(?:^|\s)(?:Mr|Mrs|Ms|Dr|Prof|St|vs|[A-Z])\.$")
_FINER_STOPS = (re.compile(r"[,，،]\s*(?!\d)"), re.compile(r"\s+"))


def official_units(text: str, chinese: bool) -> list[str]:
    """The reference's cut after each stop. A stop right after a cut is dropped, a quote after a stop joins it."""
    stops = _CHINESE_STOPS if chinese else _OTHER_STOPS
    if text[-1] not in stops:
        text += "。" if chinese else "."
    units: list[str] = []
    start = 0
    for i, char in enumerate(text):
        if char not in stops:
            continue
        if i > start:
            units.append(text[start : i + 1])
        start = i + 1
        if units and text[start : start + 1] in ('"', "”"):
            units[-1] += text[start]
            start += 1
    return units


def intended_units(text: str, length: Length) -> list[str]:
    """Our cut: no character is dropped, titles stay with their names, nothing is longer than HARD_LENGTH."""
    units: list[str] = []
    for unit in filter(None, _UNIT.findall(text)):
        if units and _TITLE.search(units[-1]):
            units[-1] += unit
        else:
            units.append(unit)
    return [part for unit in units for part in _shorten(unit, length)]


def close_line(line: str, chinese: bool) -> str:
    """Ends a line with a stop, in place of a comma."""
    line = re.sub(r"[，,、\s]+$", "", line)
    return line if _CLOSED.search(line) else line + ("。" if chinese else ".")


def pack(units: Iterable[str], length: Length, hard_length: int | None = None) -> list[str]:
    """Joins units to sentences, greedily; no unit is cut."""
    sentences: list[str] = []
    current = ""
    for unit in units:
        joined = length(current + unit) if current else 0
        if joined > FULL_LENGTH and (length(current) > MIN_LENGTH or (hard_length and joined > hard_length)):
            sentences.append(current)
            current = ""
        current += unit
    if current and sentences and length(current) < REST_LENGTH:
        sentences[-1] += current
    elif current:
        sentences.append(current)
    return sentences


def is_only_punctuation(text: str) -> bool:
    """True when every character is a punctuation mark or a symbol; also when there is none."""
    return all(unicodedata.category(char)[0] in "PS" for char in text)


def _shorten(unit: str, length: Length) -> list[str]:
    """Halves a unit that is too long, near its middle: at a comma, else at a space, else between any two characters."""
    if len(unit) < 2 or length(unit) <= HARD_LENGTH:
        return [unit]
    middle, margin = len(unit) // 2, len(unit) // 4
    for stops in _FINER_STOPS:
        ends = [match.end() for match in stops.finditer(unit, middle - margin, middle + margin)]
        if ends:
            cut = min(ends, key=lambda end: abs(end - middle))
            break
    else:
        cut = middle
        while cut < len(unit) - 1 and unicodedata.category(unit[cut]).startswith("M"):
            cut += 1  # a mark stays with its letter
    return _shorten(unit[:cut], length) + _shorten(unit[cut:], length)
