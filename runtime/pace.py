"""How long a text takes to say, roughly: for plans, progress bars, and to notice speech that does not fit its text.

Counted by hand on nothing but rates of reading aloud; a voice may be a third slower or faster.
"""

import re
import unicodedata

LETTERS_PER_SECOND = 14.0
IDEOGRAPHS_PER_SECOND = 4.5
SECONDS_PER_SIGN = 0.1  # of an inline pronunciation: a phoneme, an initial or a final

_SIGN = re.compile(r"\[[^\[\]\s]+\]|</?[a-z]+>|<\|[^<>|]*\|>")


def expected_seconds(text: str, speed: float = 1.0) -> float:
    """Estimate for a text as it is spoken, figures written out."""
    text, signs = _SIGN.subn("", text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    seconds = wide / IDEOGRAPHS_PER_SECOND + (len(text) - wide) / LETTERS_PER_SECOND + signs * SECONDS_PER_SIGN
    return seconds / speed


def fits(seconds: float, expected: float) -> bool:
    """False for speech so short or long that words were probably lost or repeated."""
    return 0.5 * expected - 0.5 <= seconds <= 2 * expected + 1.0
