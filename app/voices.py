"""Named voices on disk: add, find, change, export, import, remove.

A voice is a folder with a random name, so that no name of a voice ever becomes a path:

    <id>/voice.json   name, description, transcript, consent, dates, checksums
    <id>/clip.flac    the recording, sample for sample as the engine gets it (clip.wav where FLAC cannot hold it)

Every change becomes visible by one rename. A kill leaves the old voice or the new one; what it leaves half done begins
with a dot, is never listed and goes with the next change. One lock file serves all processes that share the folder.
"""

import hashlib
import logging
import shutil
import unicodedata
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from secrets import token_hex
from typing import Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.voice_files import (
    LARGEST_CLIP,
    LARGEST_RECORD,
    LONGEST_NAME,
    RECORD,
    check_name,
    encode_clip,
    read_archive,
    read_bounded,
    write_durably,
)
from runtime import AudioClip, RequestError, check_reference, load_clip

log = logging.getLogger(__name__)


class Consent(BaseModel):
    """Who agreed to being cloned, in the words of the one who saved the voice."""

    model_config = ConfigDict(frozen=True)

    statement: str = Field(min_length=1, max_length=1000)
    at: datetime


class Voice(BaseModel):
    """What is known of a voice, as it stands in voice.json."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    description: str = Field(default="", max_length=2000)
    transcript: str = Field(default="", max_length=4000)  # the words of the recording
    consent: Consent
    created: datetime
    saved: datetime  # when this record was written; of two with one name the later holds
    seconds: float
    clip: Literal["clip.flac", "clip.wav"]
    clip_sha256: str
    source_sha256: str  # of the file that was added


class VoiceLibrary:
    """The voices in one folder, which is made with the first voice. Threads and processes may share it."""

    def __init__(self, folder: Path, most_voices: int = 500) -> None:
        self.folder = folder
        self._most_voices = most_voices

    # Looking

    def voices(self) -> list[Voice]:
        """All of them by name. A folder that holds no whole voice is left out."""
        return sorted((voice for voice, _ in self._kept().values()), key=lambda voice: voice.name.casefold())

    def find(self, name: str) -> Voice:
        """Raises RequestError for a name that is not here."""
        return self._find(name)[0]

    def clip(self, name: str) -> AudioClip:
        """The recording, with the very samples that were added. Raises RequestError when it is damaged or gone."""
        voice, folder = self._find(name)
        try:
            content = (folder / voice.clip).read_bytes()
        except OSError as gone:
            raise RequestError(f"the recording of {voice.name!r} cannot be read: {gone.strerror}") from gone
        if _sha256(content) != voice.clip_sha256:
            raise RequestError(f"the recording of {voice.name!r} is damaged; add or import the voice again")
        return load_clip(content, voice.clip)

    # Changing

    def add(
        self,
        name: str,
        recording: Path | bytes,
        *,
        consent: str,
        transcript: str = "",
        description: str = "",
        trim: bool = False,
        replace: bool = False,
    ) -> Voice:
        """Saves a voice. `consent` says who agreed; `trim` keeps the first 30 s of a longer recording.

        Raises RequestError for a name that is taken (unless `replace`) and for anything the engine would refuse.
        """
        name = check_name(name)
        if not consent.strip():
            raise RequestError('say whose voice it is and that they agreed, as in "my own voice"')
        content = recording if isinstance(recording, bytes) else read_bounded(recording, LARGEST_CLIP * 4)
        label = "the recording" if isinstance(recording, bytes) else recording.name
        clip, _ = check_reference(load_clip(content, label), trim=trim)
        now = datetime.now(UTC)
        fields = {
            "name": name,
            "description": description.strip(),
            "transcript": transcript.strip(),
            "consent": {"statement": consent.strip(), "at": now},
            "created": now,
            "source_sha256": _sha256(content),
        }
        return self._save(fields, clip, replace=replace)

    def change(self, name: str, *, transcript: str | None = None, description: str | None = None) -> Voice:
        """Corrects the words of a recording or the description of a voice; None leaves it as it is."""
        given = {"transcript": transcript, "description": description}
        return self._rewrite(name, {field: text.strip() for field, text in given.items() if text is not None})

    def rename(self, name: str, new_name: str) -> Voice:
        return self._rewrite(name, {"name": check_name(new_name)})

    def remove(self, name: str) -> None:
        with self._changing():
            _, folder = self._find(name)
            self._discard(folder)

    # Carrying

    def export(self, name: str, path: Path) -> None:
        """Writes a voice as one zip file, which appears when complete."""
        voice, folder = self._find(name)
        unfinished = path.with_name(f".{path.name}.{token_hex(4)}.part")
        try:
            with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
                for part in (RECORD, voice.clip):
                    archive.write(folder / part, part)
            unfinished.replace(path)
        except OSError as failed:
            raise RequestError(f"{path.name} cannot be written: {failed.strerror}") from failed
        finally:
            unfinished.unlink(missing_ok=True)

    def import_(self, archive: Path, name: str | None = None, *, replace: bool = False) -> Voice:
        """Takes in a voice that `export` wrote, under another name if one is given. Nothing is unpacked by its path.

        Raises RequestError for an archive that is anything else, or whose recording is not the one it was made with.
        """
        record, content = read_archive(archive)
        try:
            voice = Voice.model_validate_json(record)
        except ValidationError as wrong:
            raise RequestError(f"{archive.name} holds no voice: {_first_error(wrong)}") from wrong
        if _sha256(content.get(voice.clip, b"")) != voice.clip_sha256:
            raise RequestError(f"{archive.name} is damaged: its recording is not the one it was made with")
        clip, _ = check_reference(load_clip(content[voice.clip], voice.clip), trim=False)
        fields = voice.model_dump(exclude={"clip", "clip_sha256", "seconds"})
        return self._save(fields | {"name": check_name(name or voice.name)}, clip, replace=replace)

    # On disk

    def _on_disk(self) -> list[tuple[Voice, Path]]:
        """Whole voices and their folders, the latest last."""
        found = []
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            try:
                found.append((Voice.model_validate_json(read_bounded(folder / RECORD, LARGEST_RECORD)), folder))
            except (RequestError, ValidationError) as broken:
                log.warning("%s holds no voice: %s", folder, broken)
        return sorted(found, key=lambda each: each[0].saved)

    def _kept(self) -> dict[str, tuple[Voice, Path]]:
        return {_fold(voice.name): (voice, folder) for voice, folder in self._on_disk()}

    def _find(self, name: str) -> tuple[Voice, Path]:
        kept = self._kept()
        if found := kept.get(_fold(name)):
            return found
        near = get_close_matches(_fold(name), kept, n=1)
        hint = f"; did you mean {kept[near[0]][0].name!r}?" if near else "; `voices list` shows those that are"
        raise RequestError(f"no voice is called {name!r}{hint}")

    def _save(self, fields: dict[str, object], clip: AudioClip, *, replace: bool) -> Voice:
        container, encoded = encode_clip(clip)
        try:
            voice = Voice.model_validate(
                fields
                | {"clip": container, "clip_sha256": _sha256(encoded), "seconds": clip.seconds}
                | {"saved": datetime.now(UTC)}
            )
        except ValidationError as wrong:
            raise RequestError(f"the voice cannot be saved: {_first_error(wrong)}") from wrong
        with self._changing():
            kept = self._kept()
            former = kept.get(_fold(voice.name))
            if former and not replace:
                raise RequestError(f"a voice is called {former[0].name!r} already; choose another name or replace it")
            if not former and len(kept) >= self._most_voices:
                raise RequestError(f"{len(kept)} voices are kept, the limit; remove one first")
            unfinished = self.folder / f".new-{token_hex(8)}"
            unfinished.mkdir()
            write_durably(unfinished / container, encoded)
            write_durably(unfinished / RECORD, voice.model_dump_json(indent=2).encode())
            unfinished.rename(self.folder / token_hex(8))
            if former:
                self._discard(former[1])
        return voice

    def _rewrite(self, name: str, changes: dict[str, str]) -> Voice:
        with self._changing():
            kept = self._kept()
            voice, folder = self._find(name)
            other = kept.get(_fold(changes.get("name", name)))
            if other and other[1] != folder:
                raise RequestError(f"a voice is called {other[0].name!r} already; choose another name")
            try:
                changed = Voice.model_validate(voice.model_dump() | changes | {"saved": datetime.now(UTC)})
            except ValidationError as wrong:
                raise RequestError(f"the voice cannot be changed: {_first_error(wrong)}") from wrong
            unfinished = folder / f".{RECORD}.{token_hex(4)}"
            write_durably(unfinished, changed.model_dump_json(indent=2).encode())
            unfinished.replace(folder / RECORD)
        return changed

    def _discard(self, folder: Path) -> None:
        gone = folder.rename(self.folder / f".gone-{token_hex(8)}")
        shutil.rmtree(gone, ignore_errors=True)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One change at a time; what a killed one has left behind goes first."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock"):
                for left in [*self.folder.glob(".new-*"), *self.folder.glob(".gone-*")]:
                    shutil.rmtree(left, ignore_errors=True)
                for left in self.folder.glob(f"*/.{RECORD}.*"):
                    left.unlink(missing_ok=True)
                kept = [folder for _, folder in self._kept().values()]
                for _, folder in self._on_disk():
                    if folder not in kept:
                        self._discard(folder)  # was being replaced
                yield
        except OSError as failed:
            raise RequestError(f"the voices cannot be changed: {failed.strerror}") from failed


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", " ".join(name.split()).casefold())


def _first_error(wrong: ValidationError) -> str:
    error = wrong.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}".lstrip(": ")
