"""The consumer's end of one request: sound comes out, and leaving it stops the work.

Three threads meet here: the consumer reads and closes, the stage-1 worker delivers, either worker may report a failure.
Whatever happens, exactly one ending is recorded and a done marker always follows the last chunk.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType

import numpy as np

from runtime.errors import SpeechError
from runtime.levelling import SentenceLeveller
from runtime.silence import SilenceKeeper
from runtime.types import AudioChunk, EndReason, PreparedSpeech, StreamStats


class SpeechStream:
    """A request being spoken: a context manager that yields `AudioChunk`s.

    Entering starts the work, leaving the block cancels what is left of it and frees everything. Iteration blocks until
    sound is ready and raises the error that ended this request, if one did. `close` may be called from any thread.
    """

    def __init__(
        self,
        speech: PreparedSpeech,
        stats: StreamStats,
        *,
        requested_at: float,
        chunk_queue: int,
        leveller: SentenceLeveller | None = None,
        on_start: Callable[["SpeechStream"], None],
        on_read: Callable[[], None],
        on_end: Callable[["SpeechStream"], None],
    ) -> None:
        self.speech = speech
        self.stats = stats
        self.silence = SilenceKeeper(stats.sample_rate)  # touched by the stage-1 worker alone
        self.leveller = leveller  # likewise
        self._requested_at = requested_at  # of time.monotonic
        self._chunk_queue = chunk_queue
        self._on_start, self._on_read, self._on_end = on_start, on_read, on_end
        self._out: SimpleQueue[AudioChunk | SpeechError | None] = SimpleQueue()  # bounded by has_room; None is the end
        self._lock = threading.Lock()
        self._unread = 0
        self._exhausted = False

    # The consumer's side

    def __enter__(self) -> "SpeechStream":
        self._on_start(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> "SpeechStream":
        return self

    def __next__(self) -> AudioChunk:
        if self._exhausted:
            raise StopIteration
        item = self._out.get()
        if isinstance(item, AudioChunk):
            with self._lock:
                self._unread -= 1
            self._on_read()
            return item
        self._exhausted = True
        if item is not None:
            raise item
        raise StopIteration

    def close(self) -> None:
        """Ends the stream now. What was made stays readable; nothing more is made."""
        self.end(EndReason.CANCELLED)

    # The workers' side

    @property
    def ended(self) -> bool:
        return self.stats.ended is not None

    @property
    def has_room(self) -> bool:
        """False while the consumer has left too many chunks unread: no further one is made until it reads."""
        return self._unread < self._chunk_queue

    @property
    def due(self) -> float:
        """When its next sound is wanted, of time.monotonic: at once, or when what was delivered has been played."""
        stats = self.stats
        if stats.first_audio_seconds is None:
            return self._requested_at
        return self._requested_at + stats.first_audio_seconds + stats.audio_seconds

    def played_at(self, seconds: float) -> float | None:
        """When so much sound will have been played, of time.monotonic; None before the first was delivered."""
        first = self.stats.first_audio_seconds
        return None if first is None else self._requested_at + first + seconds

    def deliver(
        self,
        samples: np.ndarray,
        sentence: int,
        *,
        is_last: bool,
        ends_sentence: bool,
        silence: tuple[int, int] = (0, 0),
    ) -> None:
        """Hands over sound with zeros before and after it; a stream that has ended meanwhile drops it."""
        with self._lock:
            if self.ended:
                return
            stats = self.stats
            if stats.first_audio_seconds is None:
                stats.first_audio_seconds = time.monotonic() - self._requested_at
            spoken = stats.spoken[sentence]
            if not spoken.samples:
                spoken.start = stats.samples + silence[0]
            spoken.samples += len(samples)
            spoken.complete = ends_sentence
            samples = np.pad(samples, silence) if any(silence) else samples
            chunk = AudioChunk(samples, stats.sample_rate, stats.chunks, sentence, is_last)
            stats.chunks += 1
            stats.samples += len(samples)
            self._unread += 1
            self._out.put(chunk)

    def end(self, reason: EndReason, error: SpeechError | None = None) -> None:
        """Records the ending, once: later calls change nothing."""
        with self._lock:
            if self.ended:
                return
            self.stats.ended = reason
            self.stats.total_seconds = time.monotonic() - self._requested_at
            self._out.put(error)
        self._on_end(self)

    def fail(self, error: SpeechError) -> None:
        self.end(EndReason.ERROR, error)
