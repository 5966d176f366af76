"""The first worker of an engine: makes tokens for all streams, thins and cuts them, hands the pieces on.

It owns stage 0 and what is known of a stream while its tokens are made.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from runtime.chunking import ChunkSchedule, HopPlan, SilenceThinner
from runtime.config import ModelConfig
from runtime.errors import GenerationError, SpeechError, as_generation_error
from runtime.jobs import ChunkJob, Segment
from runtime.stage0.base import Stage0
from runtime.stream import SpeechStream
from runtime.types import EndReason, Sentence, TokenStep
from runtime.worker import Worker

log = logging.getLogger(__name__)
SPARE_SECONDS = 0.05  # ahead of the last moment at which an extra hop could be taken
VOCODER_DELAY_SECONDS = 0.16  # frames it holds back at the end of a hop (spec 9.34)


@dataclass(slots=True, eq=False)
class Speaking:
    """What the stage-0 worker knows of a stream: the sentence it is in, and what that gave so far."""

    stream: SpeechStream
    sentence: int = -1  # the one begun last
    finished: int = -1  # the last whose tokens are complete
    heard: int = -1  # the last that stage 1 has begun
    key: int | None = None  # in stage 0, while tokens are being made
    thinner: SilenceThinner | None = None
    segment: Segment | None = None
    opened: bool = False  # a job of this sentence was handed on
    handed_tokens: int = 0  # of all sentences, that will be heard without a further piece
    cut_tokens: int = 0  # likewise, of the segment


class Stage0Worker(Worker):
    """Steps the language model for all live streams, thins and cuts their tokens, hands the pieces to stage 1.

    A stream is at most one sentence ahead of what stage 1 has begun, so that an unread stream costs no more than that.
    """

    def __init__(
        self,
        stage0: Stage0,
        config: ModelConfig,
        *,
        hops: HopPlan,
        max_streams: int,
        capacity_tokens: Callable[[SpeechStream], int],
        hand_over: Callable[[ChunkJob], None],
        announce: Callable[[SpeechStream, Segment], None],
        may_step: threading.Event,
        on_death: Callable[[BaseException], None],
        hop_seconds: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`announce` tells of a segment whose tokens begin to be made. `may_step` is clear while the cores are needed
        elsewhere. `hop_seconds` is how long stage 1 takes at present; given, a stream that would run dry takes an
        extra hop.
        """
        super().__init__("mynah-stage0", on_death)
        self._hop_seconds = hop_seconds
        self._clock = clock
        self._stage0 = stage0
        self._config = config
        self._hops = hops
        self._max_streams = max_streams
        self._capacity_tokens = capacity_tokens
        self._hand_over = hand_over
        self._announce = announce
        self._may_step = may_step
        self._keys = count()
        self._streams: dict[SpeechStream, Speaking] = {}
        self._waiting: deque[Speaking] = deque()
        self._live: dict[int, Speaking] = {}

    # Calls from other threads, through `post`

    def add(self, stream: SpeechStream) -> None:
        speaking = self._streams[stream] = Speaking(stream)
        self._go_on(speaking)

    def sentence_begun(self, stream: SpeechStream, sentence: int) -> None:
        """Stage 1 has begun a sentence, so the next one may be prepared."""
        if speaking := self._streams.get(stream):
            speaking.heard = sentence
            self._go_on(speaking)

    def drop(self, stream: SpeechStream) -> None:
        """Forgets a stream, whatever it was doing. Unknown streams are ignored."""
        speaking = self._streams.pop(stream, None)
        if speaking is None:
            return
        if speaking in self._waiting:
            self._waiting.remove(speaking)
        if speaking.key is not None:
            self._live.pop(speaking.key, None)
            self._stage0.drop(speaking.key)

    @property
    def streams(self) -> int:
        return len(self._streams)

    # The work

    @property
    def busy(self) -> bool:
        return bool(self._live or self._waiting)

    def work(self) -> None:
        self._admit()
        if not self._live:
            return
        self._may_step.wait()
        began = time.perf_counter()
        try:
            steps = self._stage0.step()
        except Exception as error:  # e.g. out of memory: whose fault it was cannot be told, so all in the batch end
            log.exception("a step of stage 0 failed")
            for speaking in list(self._live.values()):
                self._fail(speaking, as_generation_error(error))
            return
        seconds = time.perf_counter() - began
        for speaking in self._live.values():
            speaking.stream.stats.stage0_seconds += seconds
        for step in steps:
            self._route(step)

    def _go_on(self, speaking: Speaking) -> None:
        """Begins the next sentence when the last is complete and being heard."""
        following = speaking.sentence + 1
        if not speaking.finished == speaking.sentence == speaking.heard:
            return
        if following == len(speaking.stream.speech.sentences):
            return
        speaking.sentence = following
        speaking.thinner = SilenceThinner(self._config.silent_tokens)
        speaking.segment = self._new_segment(speaking.stream)
        speaking.opened = False
        sentence: Sentence = speaking.stream.speech.sentences[following]
        if sentence.tokens is None:
            self._waiting.append(speaking)
            return
        for token in sentence.tokens.tolist():  # conversion: the source's own tokens, unthinned (spec 3.5)
            self._keep(speaking, token)
        self._finish(speaking, EndReason.STOP)

    def _admit(self) -> None:
        """Lets waiting sentences into stage 0. Called by `work` alone, so that a failure here cannot lead back here."""
        while self._waiting and len(self._live) < self._max_streams:
            speaking = self._waiting.popleft()
            speech = speaking.stream.speech
            prompt = speech.sentences[speaking.sentence].prompt
            assert prompt is not None
            key = next(self._keys)
            try:
                seed = _sentence_seed(speech.seed, speech.first_sentence + speaking.sentence)
                self._stage0.add(key, prompt, speech.sampling, seed)
            except Exception as error:  # whatever it is, it belongs to this request
                self._fail(speaking, as_generation_error(error))
                continue
            speaking.key = key
            self._live[key] = speaking
            assert speaking.segment is not None
            self._announce(speaking.stream, speaking.segment)

    def _route(self, step: TokenStep) -> None:
        speaking = self._live.get(step.key)
        if speaking is None:
            return
        if step.error is not None:
            self._fail(speaking, step.error)
            return
        if step.token is not None:
            assert speaking.thinner is not None
            if 0 <= step.token < self._config.lm.speech_tokens and speaking.thinner.keeps(step.token):
                self._keep(speaking, step.token)
            else:
                speaking.stream.stats.dropped_tokens += 1
        if step.is_last:
            del self._live[step.key]
            speaking.key = None
            self._finish(speaking, step.end or EndReason.STOP)

    def _keep(self, speaking: Speaking, token: int) -> None:
        segment = speaking.segment
        assert segment is not None
        if len(segment.tokens) == self._capacity_tokens(speaking.stream):
            self._cut(speaking, finished=True)
            segment = speaking.segment = self._new_segment(speaking.stream)
        segment.tokens.append(token)
        speaking.stream.stats.tokens += 1
        speaking.stream.stats.spoken[speaking.sentence].tokens += 1
        self._cut(speaking, finished=False)

    def _finish(self, speaking: Speaking, reason: EndReason) -> None:
        """The tokens of a sentence are complete."""
        stream, segment = speaking.stream, speaking.segment
        assert segment is not None
        speaking.finished = speaking.sentence
        if reason is EndReason.LENGTH:
            stream.stats.length_capped.append(speaking.sentence)
        if not segment.tokens:
            text = stream.speech.sentences[speaking.sentence].text
            self._fail(speaking, GenerationError(f"the model gave no sound for {text[:60]!r}; try another seed"))
            return
        self._cut(speaking, finished=True, ends_sentence=True)
        self._go_on(speaking)

    def _cut(self, speaking: Speaking, *, finished: bool, ends_sentence: bool = False) -> None:
        segment = speaking.segment
        assert segment is not None
        is_final = speaking.sentence + 1 == len(speaking.stream.speech.sentences)
        is_urgent = not finished and self._runs_dry(speaking)
        while cut := segment.schedule.next(len(segment.tokens), finished, is_urgent=is_urgent):
            speaking.stream.stats.extra_hops += cut.is_extra
            heard = cut.tokens - (0 if cut.is_last else self._config.flow.lookahead_tokens)
            speaking.handed_tokens += heard - speaking.cut_tokens
            speaking.cut_tokens = 0 if cut.is_last else heard
            self._hand_over(
                ChunkJob(
                    speaking.stream,
                    speaking.sentence,
                    segment,
                    torch.tensor(segment.tokens[: cut.tokens], dtype=torch.long),
                    is_last=cut.is_last,
                    hops_again=segment.schedule.hops_again,
                    opens_sentence=not speaking.opened,
                    ends_sentence=ends_sentence and cut.is_last,
                    ends_stream=ends_sentence and is_final and cut.is_last,
                )
            )
            speaking.opened = True

    def _runs_dry(self, speaking: Speaking) -> bool:
        """Whether the listener will have heard all that was handed on before a piece cut now could sound."""
        if self._hop_seconds is None:
            return False
        seconds = (
            speaking.handed_tokens / self._config.token_rate / speaking.stream.speech.speed - VOCODER_DELAY_SECONDS
        )
        played = speaking.stream.played_at(seconds)
        return played is not None and played - self._clock() < self._hop_seconds() + SPARE_SECONDS

    def _new_segment(self, stream: SpeechStream) -> Segment:
        return Segment(
            ChunkSchedule(
                len(stream.speech.reference.speech_tokens),
                hops=self._hops,
                grid=self._config.chunk_tokens,
                lookahead=self._config.flow.lookahead_tokens,
                streaming=stream.speech.streaming,
            )
        )

    def _fail(self, speaking: Speaking, error: SpeechError) -> None:
        self.drop(speaking.stream)
        speaking.stream.fail(error)


def _sentence_seed(seed: int, sentence: int) -> int:
    """Each sentence draws from its own generator; the first one has the request's seed."""
    return (seed + 0x9E3779B97F4A7C15 * sentence) % 2**63
