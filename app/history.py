"""What was made, kept and found again: one folder per job.

    <id>/entry.json         the settings, what was said when, and how it ended
    <id>/0000.wav ...       each finished sentence, written when it is done
    <id>/whole.wav          all of it with its pauses, once the job has ended
    <id>/reference.flac     the recording that was used, source.flac likewise (wav where FLAC cannot hold it)

How a page or command uses it:

    with engine.stream(request) as stream, history.begin(request, stream.stats, voice="Ada") as keeping:
        for chunk in stream:
            keeping.take(chunk)

A file appears when it is whole, the entry names it afterwards, so a kill costs the sentence being made and no other.
A job that broke off goes on with `keeping = history.resume(id)` and `engine.stream(keeping.request)`. What is kept is
bounded by count and bytes; the oldest goes first, one that is being made never.
"""

import logging
import shutil
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from types import TracebackType

import numpy as np
from pydantic import ValidationError

from app.audio_format import to_pcm16, wav_file
from app.history_entry import (
    ENTRY,
    WHOLE,
    Entry,
    KeptSentence,
    assemble,
    request_of,
    sentence_of,
    settings_of,
    write_entry,
    write_recordings,
)
from app.subtitles import SubtitleFormat, subtitles
from runtime import (
    AudioChunk,
    AudioClip,
    EndReason,
    RequestError,
    SpeechRequest,
    StreamStats,
)

log = logging.getLogger(__name__)

LEFT_SECONDS = 3600  # after which what begins with a dot is nobody's work any more


class History:
    """The jobs kept in one folder, which is made with the first. Threads may share it."""

    def __init__(self, folder: Path, most_entries: int = 200, most_bytes: int = 2 * 2**30) -> None:
        self.folder = folder
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._lock = threading.RLock()
        self._live: set[str] = set()

    # Looking

    def entries(self) -> list[Entry]:
        """The newest first. A folder that holds no entry is left out."""
        return [entry for entry, _ in self._on_disk()]

    def find(self, id: str) -> Entry:
        """Raises RequestError for one that is not (or no longer) here."""
        return self._find(id)[0]

    def is_live(self, id: str) -> bool:
        return id in self._live

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    def whole(self, id: str) -> Path:
        """One lossless file of everything that is finished; for a job that broke off it is put together now."""
        with self._lock:
            entry, folder = self._find(id)
            if not entry.sentences:
                raise RequestError("no sentence of this job was finished")
            if id in self._live or not (folder / WHOLE).is_file():
                assemble(entry, folder)
            return folder / WHOLE

    def sentence(self, id: str, index: int) -> Path:
        """One finished sentence as a WAV file."""
        entry, folder = self._find(id)
        return folder / sentence_of(entry, index).file

    def request(self, id: str) -> SpeechRequest:
        """The request that was made, its recordings and the seed that was used included."""
        return request_of(*self._find(id))

    def subtitles(self, id: str, kind: SubtitleFormat) -> str:
        """Text of an srt or vtt file with a line for each finished sentence."""
        entry = self.find(id)
        rate = entry.sample_rate
        return subtitles([(s.start / rate, (s.start + s.samples) / rate, s.written) for s in entry.sentences], kind)

    # Making

    def begin(
        self, request: SpeechRequest, stats: StreamStats, voice: str | None = None, script: str | None = None
    ) -> "Keeping":
        """Opens an entry for a stream that was just made. Leaving the block without its last chunk ends it as it is.

        Of a script the text is kept and the settings of its first request; its voices are saved ones.
        Raises RequestError when nothing can be written.
        """
        try:
            return self._begin(request, stats, voice, script)
        except OSError as failed:
            raise RequestError(f"the history cannot be written ({failed.strerror}); free some space") from failed

    def _begin(self, request: SpeechRequest, stats: StreamStats, voice: str | None, script: str | None) -> "Keeping":
        id = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{token_hex(4)}"
        unfinished = self.folder / f".new-{id}"
        unfinished.mkdir(parents=True)
        recordings = write_recordings(request, unfinished) if script is None else {}
        spoken = {} if script is None else {"text": script, "transcript": None}
        entry = Entry.model_validate(
            {
                "id": id,
                "made": datetime.now(UTC),
                "mode": stats.mode.value,
                "voice": voice,
                "script": script is not None,
                "settings": settings_of(request) | {"seed": stats.seed} | spoken,
                "recordings": recordings,
                "sample_rate": stats.sample_rate,
                "planned": stats.sentences,
            }
        )
        write_entry(entry, unfinished)
        with self._lock:
            unfinished.rename(self.folder / id)
            self._live.add(id)
            self._prune()
        return Keeping(self, entry, self.folder / id, request, stats)

    def resume(self, id: str) -> "Keeping":
        """Goes on with a job that broke off: stream `keeping.request`, then `keeping.hear(stream.stats)`, then take.

        A script has no single request; `script.remaining` has its lines.
        """
        with self._lock:
            entry, folder = self._find(id)
            if id in self._live or not entry.resumable:
                raise RequestError("this job is being made or complete; there is nothing to go on with")
            done = len(entry.sentences)
            request = (
                None if entry.script else replace(self.request(id), first_sentence=done, level_lufs=entry.level_lufs)
            )
            (folder / WHOLE).unlink(missing_ok=True)
            self._live.add(id)
        return Keeping(self, entry, folder, request, None)

    def replace_sentence(self, id: str, index: int, clip: AudioClip, seed: int, odd_length: bool = False) -> Entry:
        """Puts a sentence that was spoken again in place of the kept one; what follows moves."""
        with self._lock:
            if id in self._live:
                raise RequestError("this job is being made; wait until it has ended")
            entry, folder = self._find(id)
            former = sentence_of(entry, index)
            pcm = to_pcm16(clip.samples)
            new = former.model_copy(
                update={
                    "samples": len(clip.samples),
                    "file": f"{index:04}-{token_hex(4)}.wav",  # the old file holds until the entry names the new one
                    "odd_length": odd_length,
                    "seed": seed,
                }
            )
            moved = len(clip.samples) - former.samples
            entry.sentences = [
                new if s is former else s.model_copy(update={"start": s.start + moved * (s.start > former.start)})
                for s in entry.sentences
            ]
            entry.samples += moved
            (folder / WHOLE).unlink(missing_ok=True)
            with wav_file(folder / new.file, entry.sample_rate) as file:
                file.writeframes(pcm)
            write_entry(entry, folder)
            (folder / former.file).unlink(missing_ok=True)
            return entry

    def remove(self, id: str) -> None:
        """Deletes a job and all of its files."""
        with self._lock:
            if id in self._live:
                raise RequestError("this job is being made; stop it first")
            self._discard(self._find(id)[1])

    # On disk

    def _on_disk(self) -> list[tuple[Entry, Path]]:
        found = []
        for folder in sorted(self.folder.iterdir(), reverse=True) if self.folder.is_dir() else ():
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            try:
                entry = Entry.model_validate_json((folder / ENTRY).read_bytes())
            except (OSError, ValidationError) as broken:
                log.warning("%s holds no entry: %s", folder, broken)
                continue
            if entry.id == folder.name:
                found.append((entry, folder))
        return found

    def _find(self, id: str) -> tuple[Entry, Path]:
        for entry, folder in self._on_disk():  # never a path made from what was asked for
            if entry.id == id:
                return entry, folder
        raise RequestError("this job is not in the history (any more)")

    def _prune(self) -> None:
        """Removes the oldest while there are too many or they are too big, and what a kill left half made."""
        for left in self.folder.glob(".*-*"):
            if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        size = 0  # bytes
        for kept, (entry, folder) in enumerate(self._on_disk(), 1):
            size += sum(file.stat().st_size for file in folder.iterdir())
            if (kept > self._most_entries or size > self._most_bytes) and entry.id not in self._live:
                self._discard(folder)

    def _discard(self, folder: Path) -> None:
        gone = folder.rename(self.folder / f".gone-{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)

    def _closed(self, id: str) -> None:
        with self._lock:
            self._live.discard(id)
            self._prune()


class Keeping:
    """Writes one job while it is made. Used by the thread that reads the stream."""

    def __init__(
        self, history: History, entry: Entry, folder: Path, request: SpeechRequest | None, stats: StreamStats | None
    ) -> None:
        self.entry = entry
        self.request = request
        self._history, self._folder, self._stats = history, folder, stats
        self._first = len(entry.sentences)  # sentences that were there before
        self._offset = entry.samples
        self._position = 0  # in the stream, samples
        self._sentence = 0  # of the stream
        self._begin = 0  # of the sentence, pause included
        self._parts: list[np.ndarray] = []
        self.problem: str | None = None  # why nothing more is kept; the speech goes on

    def hear(self, stats: StreamStats) -> None:
        """Gives a resumed job the figures of the stream that goes on with it."""
        self._stats = stats

    def take(self, chunk: AudioChunk) -> None:
        """Takes the next chunk of the stream, in order. A full disk ends the keeping and not the speech."""
        assert self._stats is not None, "hear the stream first"
        if self.problem is not None:
            return
        try:
            self._take(chunk)
        except OSError as failed:
            self._give_up(failed)

    def _take(self, chunk: AudioChunk) -> None:
        if self._parts and chunk.sentence != self._sentence:
            self._close_sentence()
        self._sentence = chunk.sentence
        if not self._parts:
            self._begin = self._position
        self._parts.append(chunk.samples)
        self._position += len(chunk.samples)
        if chunk.is_last or self._is_complete():
            self._close_sentence()

    def _is_complete(self) -> bool:
        """True when the sentence is made to its end, and this was it: the worker is ahead of who reads."""
        assert self._stats is not None
        if self._sentence >= len(self._stats.spoken):
            return False
        spoken = self._stats.spoken[self._sentence]
        return spoken.complete and self._position == spoken.start + spoken.samples

    def _close_sentence(self) -> None:
        """Writes a sentence whose samples are all here, then names it in the entry."""
        assert self._stats is not None
        samples, self._parts = np.concatenate(self._parts), []
        start, length, text, written, odd = self._begin, len(samples), "", "", False
        if self._sentence < len(self._stats.spoken):
            spoken = self._stats.spoken[self._sentence]
            start, length, text, odd = spoken.start, spoken.samples, spoken.text, spoken.odd_length
            written = spoken.written
        index = self._first + self._sentence
        kept = KeptSentence(
            index=index,
            text=text,
            written=written,
            start=self._offset + start,
            samples=length,
            file=f"{index:04}.wav",
            odd_length=odd,
        )
        with wav_file(self._folder / kept.file, self.entry.sample_rate) as file:
            file.writeframes(to_pcm16(samples[start - self._begin :][:length]))
        self.entry.sentences.append(kept)
        self.entry.level_lufs = self._stats.level_lufs or self.entry.level_lufs
        self.entry.samples = self._offset + self._begin + len(samples)
        write_entry(self.entry, self._folder)

    def __enter__(self) -> "Keeping":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the entry; with sentences in it the whole is written."""
        try:
            self.entry.ended = self._stats.ended if self._stats is not None else None
            if self.entry.ended is not EndReason.ERROR and self.entry.resumable:
                self.entry.ended = EndReason.CANCELLED  # nobody read what the engine may have made to its end
            if self.entry.sentences:
                assemble(self.entry, self._folder)
            write_entry(self.entry, self._folder)
        except OSError as failed:
            self._give_up(failed)
        finally:
            self._history._closed(self.entry.id)

    def _give_up(self, failed: OSError) -> None:
        self.problem = f"the history cannot be written ({failed.strerror}); free some space"
        log.warning("%s", self.problem)


def again(request: SpeechRequest, sentence: str, seed: int) -> SpeechRequest:
    """The request that speaks one sentence of another once more with another seed; `sentence` as it was spoken."""
    return replace(request, text=sentence, seed=seed, normalize=False, words={}, first_sentence=0)
