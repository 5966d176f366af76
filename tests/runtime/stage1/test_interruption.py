"""Work that nobody wants any more ends between two modules, and leaves what comes after as it was."""

import itertools
import threading
import time

import pytest
import torch

from runtime import Engine, EngineSettings, SpeechRequest
from runtime.stage1.decoder import Stage1
from runtime.stage1.interruption import Abandoned
from tests import golden
from tests.runtime.stage1.tiny_flow import prepared, tiny_stage1


@pytest.fixture(scope="module")
def stage1() -> Stage1:
    stage1 = tiny_stage1()
    stage1.make_interruptible()
    return stage1


def test_a_decode_is_given_up_wherever_it_is_and_the_next_sounds_the_same(stage1: Stage1) -> None:
    io = golden.load("stream_io")
    reference = prepared(io["prompt_token"], io["prompt_feat"], io["embedding"])
    tokens = io["token"][0].long()
    wanted = stage1.decode(stage1.open(reference), tokens, is_last=True)
    asked = itertools.count()
    stage1.is_wanted = lambda: next(asked) >= 0
    stage1.decode(stage1.open(reference), tokens, is_last=True)
    times = next(asked)
    assert times > 10
    for after in (0, times // 2, times - 1):  # in the first Euler step, in the middle, in the vocoder
        left = iter([True] * after)
        stage1.is_wanted = lambda left=left: next(left, False)
        with pytest.raises(Abandoned):
            stage1.decode(stage1.open(reference), tokens, is_last=True)
        stage1.is_wanted = lambda: True
        assert torch.equal(stage1.decode(stage1.open(reference), tokens, is_last=True), wanted)


def test_a_stopped_stream_frees_stage_1_in_the_middle_of_a_solve(tiny_checkpoint, voice) -> None:
    began = threading.Event()
    with Engine(tiny_checkpoint, EngineSettings(device="cpu")) as engine:
        slow = engine._stage1._flow.estimator.transformer_blocks[0].ff
        handle = slow.register_forward_pre_hook(lambda *_: (began.set(), time.sleep(0.2))[0])  # ten times: 2 s a solve
        with engine.stream(SpeechRequest(reference=voice, text="The quick brown fox jumps.", seed=7)):
            assert began.wait(60)
        left = time.monotonic()
        idle = threading.Event()
        engine._worker1.post(idle.set)
        assert idle.wait(60) and time.monotonic() - left < 1
        handle.remove()
        with engine.stream(SpeechRequest(reference=voice, text="The quick brown fox jumps.", seed=7)) as stream:
            assert sum(len(chunk.samples) for chunk in stream) == stream.stats.tokens * 960
