"""Pinyin as people write it, `[hao3]` or `[hǎo]`, into the model's initial and final, `[h][ǎo]` (spec 2.9)."""

import re
import unicodedata
from collections.abc import Collection

_SYLLABLE = re.compile(r"\[(?:([A-Za-züÜ]{1,6})([0-5])|([^\W\d_]{1,6}))\]")
_INITIALS = ("zh", "ch", "sh", *"bpmfdtnlgkhjqxrzcsyw", "")
_MARKS = {"1": "\u0304", "2": "\u0301", "3": "\u030c", "4": "\u0300"}  # combining; 0 and 5 are the neutral tone
_TONES = {mark: tone for tone, mark in _MARKS.items()}


def spell_pinyin(text: str, known: Collection[str]) -> str:
    """Takes syllables in brackets apart. One without a tone, or that is none, stays as it is: `[he]` may be a word."""

    def spelled(match: re.Match[str]) -> str:
        if match[0] in known:
            return match[0]
        base, tone = (match[1].lower(), match[2]) if match[1] else _without_tone(match[3].lower())
        return _tokens(base.replace("v", "ü"), tone, known) or match[0]

    return _SYLLABLE.sub(spelled, text)


def _tokens(syllable: str, tone: str, known: Collection[str]) -> str | None:
    for initial in _INITIALS if tone else ():
        final = _marked(syllable.removeprefix(initial), tone)
        for spelling in (final, final.replace("ü", "v")):  # [l][vè]
            tokens = [f"[{part}]" for part in (initial, spelling) if part]
            if syllable.startswith(initial) and spelling and all(token in known for token in tokens):
                return "".join(tokens)
    return None


def _marked(final: str, tone: str) -> str:
    """The tone stands on a, e or o, in this order, else on the last vowel."""
    vowels = [i for letter in "aeo" for i, char in enumerate(final) if char == letter]
    vowels += [i for i in reversed(range(len(final))) if final[i] in "iuü"]
    if not vowels:
        return final
    at = vowels[0]
    return unicodedata.normalize("NFC", final[: at + 1] + _MARKS.get(tone, "") + final[at + 1 :])


def _without_tone(syllable: str) -> tuple[str, str]:
    """A syllable with its tone mark -> the bare one and its tone, "" where there is no mark."""
    parts = unicodedata.normalize("NFD", syllable)
    tone = next((_TONES[part] for part in parts if part in _TONES), "")
    return unicodedata.normalize("NFC", "".join(part for part in parts if part not in _TONES)), tone
