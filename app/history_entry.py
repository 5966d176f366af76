"""One job of the history on disk: its record, its files, and the request that they make up again."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import soundfile
from pydantic import BaseModel, ConfigDict, Field

from app.audio_format import wav_file
from app.voice_files import encode_clip
from runtime import (
    EndReason,
    Mode,
    RequestError,
    SamplingParams,
    SpeechRequest,
    StreamStats,
    check_reference,
    load_clip,
)

ENTRY, WHOLE = "entry.json", "whole.wav"
RecordingFile = Literal["reference.flac", "reference.wav", "source.flac", "source.wav"]


class KeptSentence(BaseModel):
    """A finished sentence. Positions in samples from the start of the whole."""

    model_config = ConfigDict(frozen=True)

    index: int
    text: str  # as it was spoken
    written: str
    start: int
    samples: int
    file: str = Field(pattern=r"^\d{4,}(-[0-9a-f]+)?\.wav$")
    odd_length: bool = False
    seed: int | None = None  # of a sentence that was spoken again


class Entry(BaseModel):
    """One job, as it stands in entry.json."""

    version: Literal[1] = 1
    id: str
    made: datetime
    mode: str
    voice: str | None  # name of a saved voice, when one was used
    script: bool = False  # the text has a line for each of several saved voices
    settings: dict[str, Any]  # fields of the SpeechRequest, without its recordings; the seed is the one that was used
    recordings: dict[Literal["reference", "source"], RecordingFile]  # field of the request -> file
    sample_rate: int
    planned: int  # sentences
    sentences: list[KeptSentence] = Field(default_factory=list)
    samples: int = 0  # of the whole so far, pauses included
    level_lufs: float | None = None  # loudness of its sentences; what is made later is brought towards it as well
    ended: EndReason | None = None  # None while it is made, or when it broke off

    @property
    def seconds(self) -> float:
        return self.samples / self.sample_rate

    @property
    def resumable(self) -> bool:
        """True when sentences are missing. (Whether it is being made right now, `History.is_live` knows.)"""
        return len(self.sentences) < self.planned


def settings_of(request: SpeechRequest) -> dict[str, object]:
    fields = ("text", "transcript", "instruction", "language", "speed", "streaming", "normalize", "trim")
    sampling = None if request.sampling is None else asdict(request.sampling)
    return {name: getattr(request, name) for name in fields} | {"words": dict(request.words), "sampling": sampling}


def stats_of(entry: Entry, samples: int) -> StreamStats:
    """What is still known of the stream that made it, or `samples` of it."""
    sampling = entry.settings["sampling"]
    return StreamStats(
        mode=Mode(entry.mode),
        seed=entry.settings["seed"],
        sampling=SamplingParams() if sampling is None else SamplingParams(**sampling),
        sentences=entry.planned,
        sample_rate=entry.sample_rate,
        samples=samples,
    )


def sentence_of(entry: Entry, index: int) -> KeptSentence:
    for sentence in entry.sentences:
        if sentence.index == index:
            return sentence
    raise RequestError(f"this job has no finished sentence {index + 1}")


def assemble(entry: Entry, folder: Path) -> None:
    """Writes the whole from its sentences and the silence between them."""
    with wav_file(folder / WHOLE, entry.sample_rate) as file:
        for silence, sentence in _laid_out(entry):
            file.writeframes(bytes(2 * silence))
            if sentence is not None:
                file.writeframes(soundfile.read(folder / sentence.file, dtype="int16")[0].astype("<i2").tobytes())


def _laid_out(entry: Entry) -> Iterator[tuple[int, KeptSentence | None]]:
    """Silence in samples and the sentence after it; at the end silence alone."""
    position = 0
    for sentence in entry.sentences:
        yield sentence.start - position, sentence
        position = sentence.start + sentence.samples
    yield entry.samples - position, None


def write_entry(entry: Entry, folder: Path) -> None:
    unfinished = folder / f".{ENTRY}.{token_hex(4)}"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(entry.model_dump_json(indent=2))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / ENTRY)


def write_recordings(request: SpeechRequest, folder: Path) -> dict[str, str]:
    """Keeps the recordings of a request, as much of them as the engine uses."""
    recordings = {}
    for field, clip in (("reference", request.reference), ("source", request.source)):
        if clip is not None:
            name, content = encode_clip(check_reference(clip, trim=True)[0])
            recordings[field] = name.replace("clip", field)
            (folder / recordings[field]).write_bytes(content)
    return recordings


def request_of(entry: Entry, folder: Path) -> SpeechRequest:
    """The request that was made, with its recordings and the seed that was used."""
    if entry.script:
        raise RequestError("this job is a script, which has a request for each of its lines")
    try:
        clips: dict[str, Any] = {
            field: load_clip((folder / file).read_bytes(), file) for field, file in entry.recordings.items()
        }
        settings = dict(entry.settings)
        sampling = settings.pop("sampling")
        return SpeechRequest(**clips, **settings, sampling=None if sampling is None else SamplingParams(**sampling))
    except (OSError, TypeError, KeyError) as broken:
        raise RequestError(f"the settings of this job cannot be read: {broken}") from broken
