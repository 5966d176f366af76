"""Which part of a text, as it was written, became which sentence, as it is spoken: for people, no model reads it."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise

_TOKEN = re.compile(r"\[[^\[\]\s]+\]|[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")
_NARROW = str.maketrans("。！？；：，、．", ".!?;:,,.")
_CONTEXT = 12  # words of the next sentence, which show where this one ends
_MARGIN = 24  # words that a sentence may be shorter as spoken than as written, beyond half of them


def written_parts(written: str, spoken: Sequence[str]) -> list[str]:
    """A part of `written` for each sentence, blanks at its ends left out. Together they hold every sign of it."""
    tokens = list(_TOKEN.finditer(written))
    words = [_plain(token[0]) for token in tokens]
    said = [[_plain(word) for word in _TOKEN.findall(sentence)] for sentence in spoken]
    parts, start, first = [], 0, 0
    for sentence, following in pairwise(said):
        window = words[first : first + 2 * len(sentence) + _CONTEXT + _MARGIN]
        first += _border(window, sentence, following[:_CONTEXT])
        end = tokens[first].start() if first < len(tokens) else len(written)
        parts.append(written[start:end].strip())
        start = end
    return [*parts, written[start:].strip()]


def _border(window: Sequence[str], sentence: Sequence[str], following: Sequence[str]) -> int:
    """How many words of the window belong to the sentence: up to its last match, or to the first of the next one."""
    if window[: len(sentence)] == sentence:
        return len(sentence)
    matcher = SequenceMatcher(None, window, [*sentence, *following], autojunk=False)
    for block in matcher.get_matching_blocks():
        if block.b + block.size >= len(sentence):
            return block.a + max(0, len(sentence) - block.b)
    return len(window)


def _plain(word: str) -> str:
    return word.lower().translate(_NARROW)
