"""Written to spoken: numbers, units and signs as words, each script run in its own language.

wetext reads numbers, in Chinese, English and Japanese; inflect spells what it leaves over in English. Both take up to
two seconds to import, so they are loaded with the first text that has something to read, and one lock serves all.
"""

import re
import threading
import unicodedata
from itertools import groupby
from typing import Any

from runtime.frontend import units

# Where a text is cut for wetext: at sentence ends, since one odd word spoils all of what it is given; at quotes and
# backslashes, which it escapes; at private characters, which stand for control tokens.
_CUT = re.compile(r'((?<=[.?!])\s+(?=[A-Z])|[。？！]+|["\\\n\ue000-\uf8ff]+)')
_LONG = 200  # characters; wetext's time grows faster than the text
_PART = re.compile(
    rf".{{1,{_LONG}}}(?<=[,;:，；：、])(?!\d)|.{{1,{_LONG}}}(?=\s)|.{{1,{_LONG}}}(?<!\d)(?!\d)|.{{1,{_LONG}}}",
    re.DOTALL,
)
LANGUAGES = ("auto", "zh", "en", "ja", "ko", "de", "es", "fr", "it", "ru")  # those of the model
_TO_READ = re.compile(r"[\d@&²³]")
_ENGLISH_WORD = re.compile(r"\b(?:I|a|[A-Za-z][a-z]{2,})\b")
_CODE = re.compile(r"(?<![\d.,])\d{10,}(?![\d.,]*\d)")  # an amount of that size is written with commas
_LETTER_MEETS_DIGIT = re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])")
_HAN_DIGITS = str.maketrans("0123456789", "零一二三四五六七八九")


def is_han(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"


def is_kana(char: str) -> bool:
    return "\u3040" <= char <= "\u30ff" or "\uff66" <= char <= "\uff9d"


def script(char: str) -> str:
    """Script of a letter: zh, ja (kana), latin or other. Digits and signs have none."""
    if is_han(char) or char == "々":
        return "zh"
    if is_kana(char):
        return "ja"
    if not char.isalpha() or char in "µμΩ":
        return ""
    return "latin" if unicodedata.name(char, "").startswith(("LATIN", "MODIFIER")) else "other"


def language_runs(line: str, chosen: str = "auto") -> list[tuple[str, str]]:
    """Cuts a line into (language, run): zh, ja, en, or "" for what is not to be read. The runs add up to the line.

    Kana make the whole line Japanese. Latin text inside Chinese is English from three words on, or where its words
    outnumber the Chinese characters; anything shorter (`705A`, `5 ml`) is read by the language around it.
    A chosen language decides where letters do not: on a line of figures, for Latin letters of any language but English,
    and between Chinese and Japanese where a line has no kana.
    """
    if not any(map(script, line)) or (chosen == "ja" and any(map(is_han, line))):
        return [(chosen if chosen in ("zh", "ja") else _latin_language(line, chosen), line)]
    stretches = [(name, "".join(chars)) for name, chars in groupby(line, lambda char: script(char) or "latin")]
    if any(name == "ja" for name, _ in stretches):
        return [("ja", line)]
    if len(stretches) == 1 and stretches[0][0] == "latin":
        return [(_latin_language(line, chosen), line)]
    mostly_english = len(_ENGLISH_WORD.findall(line)) > sum(map(is_han, line))
    runs: list[tuple[str, str]] = []
    around = next(("zh" if name == "zh" else "" for name, _ in stretches if name != "latin"), "")
    for name, text in stretches:
        if name != "latin":
            language = around = "zh" if name == "zh" else ""
        else:
            words = len(_ENGLISH_WORD.findall(text))
            language = _latin_language(text, chosen) if words >= 3 or (words and mostly_english) else around
        runs.append((language, text))
    return [(language, "".join(text for _, text in same)) for language, same in groupby(runs, lambda run: run[0])]


def _latin_language(text: str, chosen: str) -> str:
    """English, unless two letters carry marks: then numbers stay figures rather than turn into English words."""
    if chosen in ("en", "ko", "de", "es", "fr", "it", "ru"):
        return "en" if chosen == "en" else ""
    marked = sum(char.isalpha() and not char.isascii() and script(char) == "latin" for char in text)
    return "" if marked >= 2 else "en"


class Reader:
    """Owns the normalisers. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._normalizers: dict[str, Any] = {}
        self._inflect: Any = None

    def read(self, line: str, chosen: str = "auto") -> str:
        """Writes a line out as words, run by run. Letters of any alphabet survive."""
        line = _plain_digits(line)
        if not _TO_READ.search(line):
            return line
        return "".join(self._read_run(language, text) for language, text in language_runs(line, chosen))

    def _read_run(self, language: str, text: str) -> str:
        if language == "en":
            text = units.apply(units.ENGLISH, text)
            text = _CODE.sub(lambda match: " ".join(self._words(digit) for digit in match[0]), text)
            text = _LETTER_MEETS_DIGIT.sub(" ", units.apply(units.ENGLISH_AFTER, self.wetext("en", text)))
            return self.spell_digits(text)
        if language == "zh":
            text = units.apply(units.CHINESE, text)
            text = _CODE.sub(lambda match: match[0] if len(match[0]) == 11 else match[0].translate(_HAN_DIGITS), text)
            return units.apply(units.CHINESE_AFTER, self.wetext("zh", text))
        return self.wetext(language, text) if language else text

    def wetext(self, language: str, text: str) -> str:
        """wetext where there is something to read. What it cannot take stays as it is."""
        pieces = (
            part for piece in _CUT.split(text) for part in (_PART.findall(piece) if len(piece) > _LONG else [piece])
        )
        return "".join(self._wetext_piece(language, piece) for piece in pieces)

    def _wetext_piece(self, language: str, piece: str) -> str:
        if not _TO_READ.search(piece):
            return piece
        bare = piece.strip()
        start = piece.index(bare)
        read = self._normalize(language, bare)
        if _letters(read) < _letters(bare) or not read:
            words = re.split(r"(\s+)", bare)
            read = "".join(self._wetext_piece(language, word) for word in words) if len(words) > 1 else bare
        return piece[:start] + read + piece[start + len(bare) :]

    def _normalize(self, language: str, text: str) -> str:
        with self._lock:
            if language not in self._normalizers:
                from wetext import Normalizer  # loads 30 rule files

                self._normalizers[language] = Normalizer(lang=language, remove_erhua=False)
            try:
                return str(self._normalizers[language].normalize(text))
            except AssertionError:  # its way to say that the rules have no path through the text
                return ""

    def spell_digits(self, text: str) -> str:
        """Every run of digits as English words (spec 2.8)."""
        return re.sub(r"\d+", lambda match: self._words(match[0]), text)

    def _words(self, number: str) -> str:
        with self._lock:
            if self._inflect is None:
                import inflect  # takes over a second

                self._inflect = inflect.engine()
            return str(self._inflect.number_to_words(number))


def _letters(text: str) -> int:
    """Reading adds letters; fewer than before means that wetext dropped words, as it may without a word of warning."""
    return sum(map(str.isalpha, text))


def _plain_digits(line: str) -> str:
    """`½` -> `1/2`, `①` -> `1`, `₂` -> `2`, `№` -> `No.`; raised figures keep their meaning."""

    def plain(char: str) -> str:
        if unicodedata.category(char) != "No" or unicodedata.decomposition(char).startswith("<super>"):
            return char
        return unicodedata.normalize("NFKC", char).replace("\u2044", "/")

    line = line.replace("№", "No. ").replace(
        "\u00b5", "\u03bc"
    )  # wetext knows the Greek letter, keyboards the micro sign
    line = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", line)
    return "".join(map(plain, line))
