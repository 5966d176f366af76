"""What the second worker solves together, and what it keeps for later."""

import threading
import time
from types import SimpleNamespace

import torch

from runtime.jobs import ChunkJob, Segment
from runtime.stage1.state import Chunk
from runtime.stage1_worker import Stage1Worker


class Groups:
    """Stage 1 that notes whose chunks come together, and gives no sound."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.is_wanted = lambda: True

    def frames(self, tokens: int) -> int:
        return 2 * tokens

    def open(self, reference: SimpleNamespace, *, speed: float) -> SimpleNamespace:
        return SimpleNamespace(whose=reference.key)

    def decode_together(self, chunks: list[Chunk]) -> list[Exception]:
        self.seen.append([chunk.state.whose for chunk in chunks])
        return [ValueError("silence")] * len(chunks)


class Listening(SimpleNamespace):
    """A stream, as far as the worker looks at it."""

    __hash__ = object.__hash__


def stream(key: str, due_in: float, first_audio_seconds: float | None) -> Listening:
    return Listening(
        ended=None,
        has_room=True,
        due=time.monotonic() + due_in,
        speech=SimpleNamespace(reference=SimpleNamespace(key=key, speech_tokens=torch.arange(87)), speed=1.0),
        stats=SimpleNamespace(first_audio_seconds=first_audio_seconds, stage1_seconds=0.0),
        fail=lambda error: None,
    )


def test_first_chunks_are_solved_with_what_runs_out_and_before_what_can_wait():
    stage1 = Groups()
    worker = Stage1Worker(
        stage1,
        frame_limit=8192,
        sentence_pause_seconds=0.0,
        on_sentence=lambda *_: None,
        others_may_work=threading.Event(),
        others_rest=lambda _: False,
        on_death=lambda error: None,
    )
    streams = [stream("plays", 30.0, 0.1), stream("new", -0.1, None), stream("runs out", 0.0, 0.1)]
    streams.append(stream("newer", -0.05, None))
    for one in streams:
        job = ChunkJob(
            one,
            0,
            Segment(schedule=SimpleNamespace()),
            torch.arange(41),
            is_last=False,
            hops_again=True,
            opens_sentence=True,
            ends_sentence=False,
            ends_stream=False,
        )
        worker.take(job)
    worker.work()
    worker.work()
    assert stage1.seen == [["new", "newer", "runs out"], ["plays"]]
    assert not worker.busy
