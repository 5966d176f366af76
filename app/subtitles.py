"""Sentences and their times -> srt or vtt."""

import html
from collections.abc import Iterable
from typing import Literal

import pysubs2

_MEANT_OTHERWISE = str.maketrans({"{": "(", "}": ")", "\\": "/"})  # pysubs2 takes them for markup
SubtitleFormat = Literal["srt", "vtt"]


def subtitles(sentences: Iterable[tuple[float, float, str]], kind: SubtitleFormat) -> str:
    """One line for each (start, end, text), times in seconds; a sentence without words has none."""
    file = pysubs2.SSAFile()
    for start, end, text in sentences:
        if text.strip():
            event = pysubs2.SSAEvent(start=round(1000 * start), end=round(1000 * end))
            text = text.translate(_MEANT_OTHERWISE)
            event.plaintext = html.escape(text, quote=False) if kind == "vtt" else text
            file.append(event)
    return file.to_string(kind)
