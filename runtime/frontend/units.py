"""Units, currency and signs that wetext 0.1.8 misreads, rewritten so that it or inflect reads them well.

A table per language, applied in order to a run of text before wetext sees it. An entry stands here only because
wetext gets it wrong: it fails on `5€`, reads `3 m` as minutes and `$1,234` as `thousand ...`, and leaves `<3` alone.
"""

import re
from collections.abc import Callable

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]

# name: (one, many, hundredth, hundredths); yen and won have no hundredth.
_CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "¥": ("yen", "yen", "", ""),
    "₩": ("won", "won", "", ""),
    "₹": ("rupee", "rupees", "paisa", "paise"),
}
_SCALES = {"k": "thousand", "m": "million", "bn": "billion", "b": "billion"}
_ENGLISH_UNITS = {
    "mmHg": "millimeter(s) of mercury",
    "m": "meter(s)",
    "m/s": "meter(s) per second",
    "L": "liter(s)",
    "l": "liter(s)",
    "mL": "milliliter(s)",
    "dL": "deciliter(s)",
    "mg/dL": "milligram(s) per deciliter",
    "mmol/L": "millimole(s) per liter",
    "kHz": "kilohertz",
    "dB": "decibel(s)",
    "kB": "kilobyte(s)",
    "Mbit/s": "megabit(s) per second",
    "kWh": "kilowatt hour(s)",
    "kPa": "kilopascal(s)",
    "hPa": "hectopascal(s)",
}
_CHINESE_UNITS = {
    "mmHg": "毫米汞柱",
    "l": "升",
    "mL": "毫升",
    "dL": "分升",
    "g/L": "克每升",
    "mg/dL": "毫克每分升",
    "mmol/L": "毫摩尔每升",
    "mA": "毫安",
    "Hz": "赫兹",
    "kHz": "千赫兹",
    "MHz": "兆赫兹",
    "GHz": "吉赫兹",
    "dB": "分贝",
    "Pa": "帕",
    "kPa": "千帕",
    "hPa": "百帕",
}
_ENGLISH_SIGNS = {
    "<": "less than",
    ">": "greater than",
    "≤": "at most",
    "≥": "at least",
    "±": "plus or minus",
    "≈": "about",
    "≠": "not equal to",
    "×": "times",
    "÷": "divided by",
}
_CHINESE_SIGNS = {"<": "小于", ">": "大于", "≤": "小于等于", "≥": "大于等于", "≈": "约等于", "≠": "不等于", "*": "乘"}
_DECADES = "hundreds tens twenties thirties forties fifties sixties seventies eighties nineties"
_NUMBER = r"\d+(?:,\d+)*(?:\.\d+)?"


def _unit_pattern(units: dict[str, str]) -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in sorted(units, key=len, reverse=True))
    return re.compile(rf"(?<![A-Za-z\d])({_NUMBER})\s?({names})(?![A-Za-z\d/²³])")


def _sign_pattern(signs: dict[str, str]) -> re.Pattern[str]:
    return re.compile(rf"\s*(?<![-=])([{re.escape(''.join(signs))}])\s*(?=\d)")


def _english_unit(match: re.Match[str]) -> str:
    return f"{match[1]} {_ENGLISH_UNITS[match[2]].replace('(s)', '' if match[1] == '1' else 's')}"


def _money(match: re.Match[str]) -> str:
    one, many, hundredth, hundredths = _CURRENCIES[match[1]]
    whole, fraction, scale = match[2], match[3] or "", match[4]
    if scale:
        return f"{whole}{fraction.rstrip('.0')} {_SCALES.get(scale.lower(), scale)} {many}"
    amount = f"{whole} {one if whole == '1' else many}"
    if not hundredth or len(fraction) not in (0, 3):
        return f"{whole}{fraction} {many}"
    if fraction in ("", ".00"):
        return amount
    cents = int(fraction[1:])
    small = f"{cents} {hundredth if cents == 1 else hundredths}"
    return small if whole == "0" else f"{amount} and {small}"


def _decade(match: re.Match[str]) -> str:
    century, decade = match[1], _DECADES.split()[int(match[2])]
    return f"{century[0]} thousands" if match[1] + match[2] in ("100", "200") else f"{century} {decade}"


_ANY_MONEY = "[" + "".join(_CURRENCIES) + "]"
_SUFFIXED_MONEY: Rule = (re.compile(rf"(?<!\d)({_NUMBER})\s?({_ANY_MONEY})(?!\s?\d)"), r"\2\1")
_DOTTED = re.compile(r"(?<![\d.])(\d+)\.(\d+)\.(\d+)(?!\.?\d)")  # version numbers; longer ones are addresses

ENGLISH: tuple[Rule, ...] = (
    _SUFFIXED_MONEY,
    (re.compile(rf"({_ANY_MONEY})({_NUMBER})\s?[-–]\s?\1?(?=\d)"), r"\2 to \1"),
    (
        re.compile(
            rf"({_ANY_MONEY})\s?(\d+(?:,\d+)*)(\.\d+)?(?:\s?([kKmMbB]|bn|thousand|million|billion|trillion)\b)?"
        ),
        _money,
    ),
    (_unit_pattern(_ENGLISH_UNITS), _english_unit),
    (_sign_pattern(_ENGLISH_SIGNS), lambda match: f" {_ENGLISH_SIGNS[match[1]]} "),
    (re.compile(r"\b(1\d|20)(\d)0s\b"), _decade),
    (re.compile(r"(?<=\d)\s?[–~]\s?(?=\d)"), " to "),
    (re.compile(r"(?<=\d)²"), " squared"),
    (re.compile(r"(?<=\d)³"), " cubed"),
    (re.compile(r"(?<![\w+])\+(?=\d)"), "plus "),
    (re.compile(r"\bNo\. ?(?=\d)|(?<!\w)#(?=\d)"), "number "),
    (_DOTTED, r"\1 point \2 point \3"),
    (re.compile(r"\b24/7\b"), "24 7"),
    # wetext reads 1000 as `ten hundred`, and 1,234 without its `one` unless a unit follows.
    # ENGLISH_AFTER drops a second one.
    (re.compile(r"(?<![\d.,/:-])10(\d\d)(?![\d,/:-]*\d)(?!\w)"), r"1,0\1"),
    (re.compile(r"(?<![\d.,])(?=1,\d{3}(?!\d|,\d))"), "one "),
)

ENGLISH_AFTER: tuple[Rule, ...] = (
    (re.compile(r"\bone one thousand"), "one thousand"),
    (re.compile("²"), " squared"),
    (re.compile("³"), " cubed"),
)

CHINESE: tuple[Rule, ...] = (
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    _SUFFIXED_MONEY,
    (re.compile(r"(?<![\d.])(\d[\d.]*)\s?[-–~]\s?(\d[\d.]*)\s?%"), r"\1%到\2%"),
    (re.compile(r"(?<![\d.])(\d[\d.]*)\s?‰"), r"千分之\1"),
    (re.compile(r"(?<=\d)\s+(?=%)"), ""),
    (_unit_pattern(_CHINESE_UNITS), lambda match: match[1] + _CHINESE_UNITS[match[2]]),
    (_sign_pattern(_CHINESE_SIGNS), lambda match: _CHINESE_SIGNS[match[1]]),
    (re.compile(r"(?<=\d)–(?=\d)"), "~"),
    (re.compile(r"([A-Za-z]\d*)-(?=\d)"), r"\1 "),  # F-16 holds no minus
    (_DOTTED, r"\1点\2点\3"),
)
CHINESE_AFTER: tuple[Rule, ...] = ((re.compile("²"), "平方"), (re.compile("³"), "立方"))


def apply(rules: tuple[Rule, ...], text: str) -> str:
    """Rewrites a run of one language by its table."""
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text
