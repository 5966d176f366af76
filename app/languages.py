"""Which languages the model knows, and what to say of a text in another.

The model was trained on nine. Numbers and units are written out as words in three of them; elsewhere they stay as
digits, which the model reads as it likes.
"""

import unicodedata
from collections import Counter

AUTO = "auto"
KNOWN = {  # code -> name as its speakers write it
    "zh": "中文",
    "en": "English",
    "ja": "日本語",
    "ko": "한국어",
    "de": "Deutsch",
    "es": "Español",
    "fr": "Français",
    "it": "Italiano",
    "ru": "Русский",
}
NORMALIZED = ("zh", "en", "ja")
_SCRIPTS = {"CJK": "zh", "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "LATIN": "latin", "CYRILLIC": "ru"}
_WRITTEN_IN = {"zh": {"zh"}, "ja": {"ja", "zh"}, "ko": {"ko"}, "ru": {"ru"}}


def scripts(text: str) -> Counter[str]:
    """Letters of each script: zh, ja, ko, ru, latin, or the Unicode name of one that the model never saw."""
    names = (unicodedata.name(letter, "").split(" ")[0] for letter in text if letter.isalpha())
    return Counter(_SCRIPTS.get(name.split("-")[0], name.capitalize()) for name in names if name)


def notices(text: str, language: str) -> list[str]:
    """What a listener should know before the text is spoken in a language, chosen or told by its letters."""
    found = scripts(text)
    strange = [name for name in found if name not in _SCRIPTS.values()]
    said = [f"The model never learned {name} letters; it will guess at them." for name in strange]
    if text.strip() and not any(map(str.isalnum, text)):
        said.append("There is nothing to speak in it; write a word.")
    if signs := dict.fromkeys(sign for sign in text if unicodedata.category(sign) == "So" and sign != "°"):
        said.append(f"Not spoken: {' '.join(signs)}")
    if language == AUTO or not found or strange:
        return said
    if not any(name in _WRITTEN_IN.get(language, {"latin"}) for name in found):
        said.append(f"The text is not written in {KNOWN[language]}; it is spoken as it is written.")
    if language == "ja" and found["zh"]:
        said.append("The model reads kanji as Chinese; write them in katakana.")
    if language not in NORMALIZED and any(letter.isdigit() for letter in text):
        said.append(f"Numbers are not written out as words in {KNOWN[language]}; write them as words to be sure.")
    return said
