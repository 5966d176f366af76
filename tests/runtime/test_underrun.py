"""A stream that would run dry takes an extra hop: on a fake clock, with a scripted language model."""

import threading

import pytest
import torch

from runtime import EngineSettings, SpeechRequest
from runtime.engine import resolve_extra_hops
from runtime.jobs import ChunkJob
from runtime.stage0_worker import Stage0Worker
from runtime.stream import SpeechStream
from runtime.types import EndReason, StreamStats, TokenStep

SPEAKABLE = 7  # not silent
HOP_SECONDS = 0.1  # of a solve


class Scripted:
    """One token a step for each prompt, `total` in all."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.given: dict[int, int] = {}

    def add(self, key, prompt, sampling, seed):
        self.given[key] = 0

    def step(self):
        steps = []
        for key in list(self.given):
            self.given[key] += 1
            is_last = self.given[key] == self.total
            steps.append(TokenStep(key, SPEAKABLE, is_last, EndReason.STOP if is_last else None))
            if is_last:
                del self.given[key]
        return steps

    def drop(self, key):
        self.given.pop(key, None)


def speak(engine, voice, *, tokens: int, token_seconds: float, extra_hops: bool) -> tuple[StreamStats, float]:
    """Runs a stream on a fake clock. Returns its stats and for how long its listener heard nothing after the start."""
    speech = engine.prepare(SpeechRequest(reference=voice, text="One sentence.", seed=1))
    stats = StreamStats("cross_lingual", 1, speech.sampling, len(speech.sentences), 24_000)
    stats.spoken = engine.stream(SpeechRequest(reference=voice, text="One sentence.")).stats.spoken
    stream = SpeechStream(
        speech, stats, requested_at=0.0, chunk_queue=4, on_start=id, on_read=lambda: None, on_end=lambda _: None
    )
    now, jobs = 0.0, []

    def hand_over(job: ChunkJob) -> None:
        if not jobs:
            stats.first_audio_seconds = now + HOP_SECONDS
        heard = len(job.tokens) - (0 if job.is_last else 3)
        jobs.append((now + HOP_SECONDS, heard / 25 - (0 if job.is_last else 0.16)))

    may_step = threading.Event()
    may_step.set()
    worker = Stage0Worker(
        Scripted(tokens),
        engine.checkpoint.config,
        hops="throughput",
        max_streams=1,
        capacity_tokens=lambda _: 1000,
        hand_over=hand_over,
        announce=lambda *_: None,
        may_step=may_step,
        on_death=lambda _: None,
        hop_seconds=(lambda: HOP_SECONDS) if extra_hops else None,
        clock=lambda: now,
    )
    worker.add(stream)
    while worker.busy:
        now += token_seconds
        worker.work()
    dry, heard_until, ends_at = 0.0, 0.0, stats.first_audio_seconds
    for ready_at, sounds_until in jobs:
        dry += max(0.0, ready_at - ends_at) if heard_until else 0.0
        ends_at = max(ends_at, ready_at) + sounds_until - heard_until
        heard_until = sounds_until
    return stats, dry


@pytest.mark.parametrize("tokens", [60, 120, 140])
def test_a_stream_whose_tokens_come_in_time_takes_no_extra_hop(engine, voice, tokens):
    stats, dry = speak(engine, voice, tokens=tokens, token_seconds=0.005, extra_hops=True)
    assert stats.extra_hops == 0 and dry == 0


def test_a_stream_that_would_run_dry_takes_extra_hops_and_says_so(engine, voice):
    """Tokens come little faster than they are spoken: the rest would be ready long after the first hop has ended."""
    patient, without = speak(engine, voice, tokens=130, token_seconds=0.03, extra_hops=False)
    stats, dry = speak(engine, voice, tokens=130, token_seconds=0.03, extra_hops=True)
    assert patient.extra_hops == 0 and without > 0.5
    assert stats.extra_hops > 0 and dry == 0


@pytest.mark.parametrize(
    ("asked", "device", "taken"),
    [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_extra_hops_are_for_gpus_unless_the_settings_say_otherwise(asked, device, taken):
    assert resolve_extra_hops(EngineSettings(extra_hops=asked), torch.device(device)) is taken
