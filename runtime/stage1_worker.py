"""The second worker of an engine: makes pieces of tokens audible and hands the sound to their streams.

It owns stage 1 and the pieces that wait for it.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from runtime.batching import Ready, next_group
from runtime.errors import as_generation_error
from runtime.jobs import ChunkJob, Segment
from runtime.stage1.decoder import Stage1
from runtime.stage1.interruption import Abandoned
from runtime.stage1.state import Chunk, Stage1State
from runtime.stream import SpeechStream
from runtime.types import EndReason
from runtime.worker import Worker

log = logging.getLogger(__name__)


class Stage1Worker(Worker):
    """Turns pieces of tokens into sound, as many streams at once as fit, the most urgent first.

    Unread streams wait, others pass them.
    """

    def __init__(
        self,
        stage1: Stage1,
        *,
        frame_limit: int,
        sentence_pause_seconds: float,
        on_sentence: Callable[[SpeechStream, int], None],
        others_may_work: threading.Event,
        others_rest: Callable[[Sequence[ChunkJob]], bool],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`others_may_work` is cleared while a group is worked on for which `others_rest` says so."""
        super().__init__("mynah-stage1", on_death)
        self._stage1 = stage1
        self._pause_seconds = sentence_pause_seconds
        self._frame_limit = frame_limit
        self._on_sentence = on_sentence
        self._others_may_work = others_may_work
        self._others_rest = others_rest
        self._jobs: dict[SpeechStream, deque[ChunkJob]] = {}
        self._group_seconds = 0.05  # of late, until there were some

    @property
    def hop_seconds(self) -> float:
        """How long a piece handed over now is likely to take: it waits for one group and is part of the next."""
        return 2 * self._group_seconds

    # Calls from other threads, through `post`

    def take(self, job: ChunkJob) -> None:
        if not job.stream.ended:
            self._jobs.setdefault(job.stream, deque()).append(job)

    def open(self, stream: SpeechStream, segment: Segment) -> None:
        """Makes ready what a segment needs before its first tokens are there. What is wrong with it shows then."""
        if not stream.ended:
            with contextlib.suppress(Exception):
                self._state(stream, segment)

    def drop(self, stream: SpeechStream) -> None:
        self._jobs.pop(stream, None)

    def look_again(self) -> None:
        """A consumer has read, so its stream may have room; being called is all that is needed."""

    @property
    def streams(self) -> int:
        return len(self._jobs)

    # The work

    @property
    def busy(self) -> bool:
        return any(stream.has_room for stream in self._jobs)

    def work(self) -> None:
        ready = [self._ready(stream, jobs[0]) for stream, jobs in self._jobs.items() if stream.has_room]
        soon = time.monotonic() + self.hop_seconds
        group = [self._next_job(one.key) for one in next_group(ready, self._frame_limit, soon)]
        group = [job for job in group if not job.stream.ended]
        began = time.perf_counter()
        chunks, opened = [], []
        for job in group:
            try:
                chunks.append(self._chunk(job))
                opened.append(job)
            except Exception as error:  # whatever it is, it belongs to this request
                self._fail(job, error)
        if self._others_rest(opened):
            self._others_may_work.clear()
        self._stage1.is_wanted = lambda: not all(job.stream.ended for job in opened)
        try:
            outcomes = self._decode(chunks)
        except Abandoned:
            return
        finally:
            self._others_may_work.set()
        seconds = time.perf_counter() - began
        self._group_seconds += 0.25 * (seconds - self._group_seconds)
        for job, chunk, outcome in zip(opened, chunks, outcomes, strict=True):
            job.stream.stats.stage1_seconds += seconds
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                self._deliver(job, chunk, outcome.numpy())
            except Exception as error:  # likewise
                self._fail(job, error)

    def _ready(self, stream: SpeechStream, job: ChunkJob) -> Ready[SpeechStream]:
        prompt = len(stream.speech.reference.speech_tokens)
        is_first = stream.stats.first_audio_seconds is None
        return Ready(stream, stream.due, self._stage1.frames(prompt + len(job.tokens)), is_first)

    def _next_job(self, stream: SpeechStream) -> ChunkJob:
        jobs = self._jobs[stream]
        job = jobs.popleft()
        if not jobs:
            del self._jobs[stream]
        return job

    def _chunk(self, job: ChunkJob) -> Chunk:
        stream, segment = job.stream, job.segment
        if job.opens_sentence:
            self._on_sentence(stream, job.sentence)
        return Chunk(self._state(stream, segment), job.tokens, job.is_last, keep=job.hops_again)

    def _state(self, stream: SpeechStream, segment: Segment) -> Stage1State:
        if segment.state is None:
            segment.state = self._stage1.open(stream.speech.reference, speed=stream.speech.speed)
        return segment.state

    def _decode(self, chunks: list[Chunk]) -> Sequence[Tensor | Exception]:
        try:
            return self._stage1.decode_together(chunks)
        except Exception as error:  # e.g. out of memory: whose fault it was cannot be told, so all in the group end
            log.exception("a solve of stage 1 failed")
            return [error] * len(chunks)

    def _deliver(self, job: ChunkJob, chunk: Chunk, samples: np.ndarray) -> None:
        stream = job.stream
        stream.stats.clipped_samples += chunk.state.clipped - job.segment.clipped
        job.segment.clipped = chunk.state.clipped
        if stream.leveller is not None:
            if job.opens_sentence:
                stream.leveller.open(samples, goes_on=not job.ends_sentence)
                stream.stats.level_lufs = stream.leveller.target_lufs
            samples = stream.leveller.apply(samples)
        before = cut = after = 0
        if job.opens_sentence:
            pause = stream.speech.sentences[job.sentence].pause_before_seconds
            if not pause and stream.speech.first_sentence + job.sentence > 0:
                pause = self._pause_seconds
            before, cut = stream.silence.before(samples, pause)
        stream.silence.sent(samples[cut:])
        if job.ends_stream:
            after = stream.silence.after(stream.speech.sentences[job.sentence].pause_after_seconds)
        if len(samples) + before + after or job.ends_sentence:
            stream.deliver(
                samples[cut:],
                job.sentence,
                is_last=job.ends_stream,
                ends_sentence=job.ends_sentence,
                silence=(before, after),
            )
        if job.ends_stream:
            stream.end(EndReason.LENGTH if stream.stats.length_capped else EndReason.STOP)

    def _fail(self, job: ChunkJob, error: Exception) -> None:
        self._jobs.pop(job.stream, None)
        job.stream.fail(as_generation_error(error))
