"""Text to sentences that are spoken one by one: cleaned, written out as words, cut (spec 2.8).

Two ways through. `official` is the reference to the letter. `intended` is ours: each script run is read in its own
language, a line break ends a sentence, control tokens pass untouched, no letter is lost and no sentence is endless.
Both are cut at pauses first, and both take a word list (`markup.py`).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from runtime.errors import RequestError
from runtime.frontend.alignment import written_parts
from runtime.frontend.markup import (
    LONGEST_GAP,
    apply_words,
    cut_at_pauses,
    drop_unknown_tags,
    mark_notices,
    without_pauses,
)
from runtime.frontend.pinyin import spell_pinyin
from runtime.frontend.reading import Reader, is_han, is_kana
from runtime.frontend.splitting import (
    HARD_LENGTH,
    Length,
    close_line,
    intended_units,
    is_only_punctuation,
    official_units,
    pack,
)
from runtime.frontend.tokenizer import END_OF_PROMPT, SPECIAL_TOKENS

Fidelity = Literal["intended", "official"]

_FIRST_SHIELD = 0xE000  # private characters, which stand for control tokens on their way through
_CONTROL_TOKEN = re.compile(r"<\|[^<>|]*\|>")
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F) if chr(code) not in "！（），．：；？"} | {
    0x3000: " ",
    ord("￥"): "¥",
    ord("￡"): "£",
}
# Controls, direction marks, soft hyphens and emoji selectors; joiners are letters of some scripts, but not elsewhere.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\u20e3\ufe00-\ufe0f\ufeff]"
    r"|(?<!\w)[\u200c\u200d]"
)
_WIDE_CHAR = "[\u3000-\u30ff\u4e00-\u9fff\uff00-\uffef]"
_WIDE_BLANK = re.compile(rf"(?<={_WIDE_CHAR})\s+|\s+(?={_WIDE_CHAR})")
_DOTS = re.compile(r"\.{4,}")
_WIDE_DOTS = re.compile(r"[.。]{3,}")
_KNOWN_SCRIPTS = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "LATIN", "CYRILLIC", "MODIFIER")
_LOOSE_DOT = re.compile(r"(?<![A-Za-z0-9])\.|\.(?![A-Za-z0-9])")


@dataclass(frozen=True, slots=True)
class Piece:
    """One sentence as it is spoken, and the silence that was asked for around it."""

    text: str
    written: str  # the part of the text that it came from
    pause_before_seconds: float = 0.0
    pause_after_seconds: float = 0.0  # the last piece only


class TextFrontend:
    """Text handling of one checkpoint. Holds the normalisers, which load on first use; threads may share it."""

    def __init__(self, count_tokens: Length, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
        self._count_tokens = count_tokens
        self._reader = Reader()
        self._shields = {token: chr(_FIRST_SHIELD + i) for i, token in enumerate(special_tokens)}
        self._tokens = {shield: token for token, shield in self._shields.items()}
        self._any_token = re.compile("|".join(map(re.escape, special_tokens)))

    def pieces(
        self,
        text: str,
        fidelity: Fidelity = "intended",
        normalize: bool = True,
        words: Mapping[str, str] | None = None,
        split: bool = True,
        language: str = "auto",
    ) -> list[Piece]:
        """What to speak, piece by piece; without `split` a text is cut and changed only where marks and words say so.

        Raises RequestError when nothing in the text can be spoken.
        """
        pieces: list[Piece] = []
        gap = 0.0
        for passage in cut_at_pauses(text if fidelity == "official" else _clean(text, drop=())):
            gap += passage.pause_before_seconds
            if gap > LONGEST_GAP:
                raise RequestError(f"the pauses in one place add up to more than {LONGEST_GAP:.0f} s; shorten them")
            written = apply_words(passage.text, words or {})
            if not split:
                texts = [written]
            elif fidelity == "official":
                texts = self.official_pieces(written, fst=normalize)
            else:
                texts = self._intended_pieces(written, normalize, language)
            if any(map(_is_speakable, texts)):
                parts = written_parts(passage.text, texts)
                pieces.append(Piece(texts[0], parts[0], pause_before_seconds=gap))
                pieces += map(Piece, texts[1:], parts[1:])
                gap = 0.0
        if not pieces:
            shown = repr(text if len(text) <= 20 else text[:20] + "…")
            raise RequestError(f"there is nothing to speak in {shown}; give a text with words")
        pieces[-1] = replace(pieces[-1], pause_after_seconds=gap)
        return pieces

    def sentences(self, text: str, fidelity: Fidelity = "intended", normalize: bool = True) -> list[str]:
        """The texts of `pieces`."""
        return [piece.text for piece in self.pieces(text, fidelity, normalize)]

    def transcript(
        self,
        text: str,
        fidelity: Fidelity = "intended",
        normalize: bool = True,
        words: Mapping[str, str] | None = None,
    ) -> str:
        """The words of a reference clip in the spelling of the sentences, in one piece; "" when there are none."""
        if fidelity == "official":
            return self.normalize(text, fst=normalize)
        text = apply_words(without_pauses(_clean(text)), words or {})
        return self._unshield(" ".join(self._lines(text, normalize)))

    def official_pieces(self, text: str, *, fst: bool) -> list[str]:
        """The reference's whole way: normalised and split, except where it leaves a text as it is."""
        return [text] if _is_raw(text) else self.split(self.normalize(text, fst=fst))

    def normalize(self, text: str, *, fst: bool) -> str:
        """The reference's normalisation, with or without its FST back end."""
        if _is_raw(text):
            return text
        text = text.strip()
        fst = fst and re.search(r"\d", text) is not None
        if not _has_han(text):
            return self._reader.spell_digits(self._reader.wetext("en", text) if fst else text)
        text = self._reader.wetext("zh", text) if fst else text
        text = _drop_blanks(text.replace("\n", ""))
        text = text.replace("²", "平方").replace("³", "立方").replace(".", "。").replace(" - ", "，")
        text = re.sub("[（）【】`]", "", text).replace("——", " ")
        return re.sub("[，,、]+$", "。", text)

    def split(self, text: str) -> list[str]:
        """The reference's cut of a normalised text into sentences."""
        if not text:
            return []
        chinese = _has_han(text)
        sentences = pack(official_units(text, chinese), len if chinese else self._count_tokens)
        return [sentence for sentence in sentences if not is_only_punctuation(sentence)]

    def _intended_pieces(self, text: str, normalize: bool, language: str) -> list[str]:
        pieces: list[str] = []
        for chinese, lines in groupby(self._lines(text, normalize, language), _has_han):
            length = len if chinese else self._count_shielded
            whole = ("" if chinese else " ").join(close_line(line, chinese) for line in lines)
            pieces += pack(intended_units(whole, length), length, HARD_LENGTH)
        return [self._unshield(piece.strip()) for piece in pieces if _is_speakable(piece)]

    def _lines(self, text: str, normalize: bool, language: str = "auto") -> list[str]:
        """Cleaned and read lines, control tokens shielded. Lines without a word, such as `***`, are left out."""
        text = spell_pinyin(drop_unknown_tags(_clean(text), self._shields), self._shields)
        text = self._any_token.sub(lambda match: self._shields[match[0]], strip_marker(text))
        lines = (" ".join(line.split()) for line in text.splitlines())
        lines = (self._reader.read(line, language) if normalize else line for line in lines)
        return [line for line in map(_tidy, lines) if _is_speakable(line)]

    def _count_shielded(self, text: str) -> int:
        return self._count_tokens(self._unshield(text))

    def _unshield(self, text: str) -> str:
        return "".join(self._tokens.get(char, char) for char in text)


def strip_marker(text: str) -> str:
    """Removes a pasted prefix up to its end-of-prompt marker: prefix and marker are added by the front end.

    Raises RequestError for a second marker and for any other `<|...|>` token.
    """
    before, marker, after = text.partition(END_OF_PROMPT)
    rest = after if marker else before
    if stray := _CONTROL_TOKEN.search(rest if marker else text):
        again = " more than once" if stray[0] == END_OF_PROMPT else ""
        raise RequestError(f"the text contains {stray[0]}{again}; remove it, Mynah adds the control tokens it needs")
    return rest


def notices(
    text: str,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    fidelity: Fidelity = "intended",
    language: str = "auto",
) -> list[str]:
    """What the listener should know before hearing the text; one sentence each."""
    text = spell_pinyin(_clean(text, drop=()), special_tokens)
    told = [] if fidelity == "official" else mark_notices(text, special_tokens)
    if scripts := _unknown_scripts(text):
        told.append(f"the model does not know this writing and will misread it: {', '.join(scripts)}")
    if skipped := unreadable(text):
        told.append(f"not spoken, as there is no reading for them: {' '.join(skipped)}")
    if (language == "ja" or any(map(is_kana, text))) and _has_han(text):
        told.append("the model reads kanji as Chinese; write Japanese in katakana")
    return told


def unreadable(text: str) -> list[str]:
    """Emoji and other symbols without a reading, each once, in order of appearance."""
    return list(dict.fromkeys(filter(_is_unreadable, text)))


def _is_unreadable(char: str) -> bool:
    symbol = unicodedata.category(char) in ("So", "Cn", "Co", "Cs") or "←" <= char <= "⇿" or "🏻" <= char <= "🏿"
    # ℃ and № stand for letters, ° is read by wetext.
    return symbol and char != "°" and not any(map(str.isalnum, unicodedata.normalize("NFKC", char)))


def _clean(text: str, drop: Iterable[str] | None = None) -> str:
    """One spelling of each character, without those that nobody sees or can read; marks are looked for afterwards."""
    dropped = unreadable(text) if drop is None else drop
    return unicodedata.normalize("NFC", _without(dropped, text)).translate(_FULL_WIDTH)


def _unknown_scripts(text: str) -> list[str]:
    """Scripts that no language of the model is written in; a letter or two may be a formula."""
    names = (unicodedata.name(char, "").split(" ")[0] for char in text if char.isalpha())
    return [name.capitalize() for name, count in Counter(names).items() if count > 2 and name not in _KNOWN_SCRIPTS]


def _without(dropped: Iterable[str], text: str) -> str:
    return _INVISIBLE.sub("", text.translate(dict.fromkeys(map(ord, dropped), " ")))


def _is_speakable(text: str) -> bool:
    """A control token counts: [laughter] alone is a sound."""
    return any(char.isalnum() or unicodedata.category(char) == "Co" for char in text)


def _is_raw(text: str) -> bool:
    """True for what the reference passes on as it is: nothing, or anything that holds a control token."""
    return not text or ("<|" in text and "|>" in text)


def _has_han(text: str) -> bool:
    return any(map(is_han, text))


def _drop_blanks(text: str) -> str:
    """The reference's rule: a space stays only between two ASCII characters that are no spaces."""

    def stays(i: int) -> bool:
        around = text[i - 1 : i] + text[i + 1 : i + 2]
        return len(around) == 2 and around.isascii() and " " not in around

    return "".join(char for i, char in enumerate(text) if char != " " or stays(i))


def _tidy(line: str) -> str:
    """Blanks and signs of one line as the model knows them. Spaces stay between words of any alphabet."""
    line = _DOTS.sub("...", " ".join(line.replace("`", "").split()))
    if not _has_han(line):
        return line
    line = _WIDE_DOTS.sub("……", _WIDE_BLANK.sub("", line.replace(" - ", "，")))
    return re.sub("[（）【】]", "", _LOOSE_DOT.sub("。", line)).replace("——", " ")
