"""What the two workers do to each other and to the arithmetic of their threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from runtime import AudioClip, Engine, SpeechRequest
from runtime.worker import Worker


class Idle(Worker):
    """Has nothing to do but what is posted."""

    busy = False

    def work(self) -> None: ...


def test_no_token_is_made_beside_a_first_hop_or_beside_any_of_one_who_is_alone(
    engine: Engine, voice: AudioClip, monkeypatch
) -> None:
    """Both would take the cores of a CPU from each other, and the listener hears nothing until the hop is done."""
    stage0, stage1 = engine._stage0, engine._stage1
    steps, seen = [0], []
    step, decode = stage0.step, stage1.decode_together

    def counted():
        steps[0] += 1
        return step()

    def watched(chunks):
        time.sleep(0.05)  # a step under way comes to its end
        before = steps[0]
        time.sleep(0.1)
        seen.append((before, steps[0]))
        return decode(chunks)

    monkeypatch.setattr(stage0, "step", counted)
    monkeypatch.setattr(stage1, "decode_together", watched)
    text = " ".join(["This sentence is one of several that follow each other in a row."] * 3)
    request = SpeechRequest(reference=voice, text=text, seed=1)
    with engine.stream(request) as stream:
        assert list(stream)
    assert len(seen) > 2 and seen[0][0] > 0 and all(before == after for before, after in seen)
    seen.clear()
    with ThreadPoolExecutor() as pool, engine.stream(request) as one, engine.stream(request) as other:
        assert all(pool.map(list, (one, other)))
    assert any(before < after for before, after in seen)  # in company both stages work at once, but for first hops


def test_numbers_too_small_to_hear_are_zero_on_a_worker() -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor has no such mode")
    worker, found, done = Idle("idle", on_death=lambda error: None), [], threading.Event()
    tiny = torch.full((64,), 1e-38)
    worker.start()
    worker.post(lambda: found.append((tiny * 1e-2).tolist()))
    worker.post(done.set)
    assert done.wait(10)
    worker.stop()
    assert found == [[0.0] * 64]
    assert (tiny * 1e-2).all(), "the caller's own thread keeps them"
