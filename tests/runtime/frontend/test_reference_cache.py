"""Reference cache: traps 63 to 66 and 71."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from runtime.errors import RequestError
from runtime.frontend.audio import check_reference
from runtime.frontend.reference_cache import ReferenceCache, clip_key
from runtime.types import AudioClip, PreparedReference


def reference(key: str = "", frames: int = 100) -> PreparedReference:
    """40 tokens-and-mel bytes per frame, plus 40 of a speaker."""
    return PreparedReference(torch.zeros(0, dtype=torch.long), torch.randn(frames, 10), torch.randn(10), key)


def noise(seed: int) -> AudioClip:
    return AudioClip(np.random.default_rng(seed).uniform(-0.5, 0.5, 16_000).astype(np.float32), 16_000)


def test_keys_hold_all_that_a_reference_depends_on() -> None:
    """Trap 63: the transcript is no part of it, the samples are. Trap 71: nor do two providers share a voice."""
    clip = noise(0)
    same = clip_key(AudioClip(clip.samples.copy(), 16_000), "model", "cpu")
    assert clip_key(clip, "model", "cpu") == same
    touched = clip.samples.copy()
    touched[-1] += 1e-6
    others = [
        clip_key(AudioClip(touched, 16_000), "model", "cpu"),
        clip_key(AudioClip(clip.samples, 24_000), "model", "cpu"),
        clip_key(clip, "model", "cuda"),
        clip_key(clip, "other", "cpu"),
        clip_key(clip, "modelcpu"),
        clip_key(clip, "model", "cpu", True),
        clip_key(clip, "model", "cpu", False),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_a_caller_that_writes_into_its_array_does_not_change_the_cached_voice() -> None:
    """Trap 64."""
    cache, theirs = ReferenceCache(2**20), noise(0)
    checked, _ = check_reference(theirs, trim=False)
    key = clip_key(checked)

    def extract() -> PreparedReference:
        mel = torch.from_numpy(checked.samples)[:1000].reshape(100, 10)
        return PreparedReference(torch.zeros(0, dtype=torch.long), mel, torch.zeros(10), key)

    first = cache.get(key, extract)
    before = first.mel.clone()
    theirs.samples[:] = 0.25
    assert cache.get(key, extract) is first
    assert torch.equal(first.mel, before)
    assert clip_key(check_reference(theirs, trim=False)[0]) != key


def test_a_hundred_simultaneous_requests_make_one_extraction() -> None:
    """Trap 65."""
    cache, start, made = ReferenceCache(2**20), threading.Barrier(100), []

    def extract() -> PreparedReference:
        made.append(threading.get_ident())
        time.sleep(0.05)
        return reference()

    def ask(_: int) -> PreparedReference:
        start.wait()
        return cache.get("voice", extract)

    with ThreadPoolExecutor(100) as pool:
        voices = list(pool.map(ask, range(100)))
    assert len(made) == 1
    assert all(voice is voices[0] for voice in voices)


def test_different_voices_do_not_wait_for_each_other() -> None:
    cache, both_inside = ReferenceCache(2**20), threading.Barrier(2, timeout=10)

    def extract() -> PreparedReference:
        both_inside.wait()
        return reference()

    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda key: cache.get(key, extract), ["a", "b"]))) == 2


def test_an_evicted_voice_lives_on_in_the_requests_that_hold_it() -> None:
    """Trap 66."""
    cache = ReferenceCache(reference().num_bytes)
    held = cache.get("a", lambda: reference("a"))
    mel = held.mel.clone()
    cache.get("b", lambda: reference("b"))
    assert len(cache) == 1
    assert torch.equal(held.mel, mel)
    assert cache.get("a", lambda: reference("made again")).key == "made again"


def test_bytes_stay_bounded_and_the_least_recently_used_goes_first() -> None:
    size = reference().num_bytes
    cache = ReferenceCache(2 * size)
    for key in ("a", "b", "a", "c"):
        cache.get(key, lambda key=key: reference(key))
        assert cache.num_bytes <= cache.max_bytes
    assert cache.num_bytes == 2 * size
    assert cache.get("a", lambda: reference("new")).key == "a"
    assert cache.get("b", lambda: reference("new")).key == "new"


def test_a_voice_larger_than_the_cache_is_served_and_pushes_nothing_out() -> None:
    cache = ReferenceCache(reference().num_bytes)
    cache.get("small", lambda: reference("small"))
    assert cache.get("large", lambda: reference("large", frames=1000)).key == "large"
    assert cache.get("small", lambda: reference("new")).key == "small"


def ask_while_it_is_made(cache: ReferenceCache, error: BaseException, waiters: int) -> tuple[list[object], int]:
    """What the maker and those that wait for it get when the first extraction ends with `error`."""
    inside, go_on, calls = threading.Event(), threading.Event(), []

    def extract() -> PreparedReference:
        calls.append(None)
        if len(calls) > 1:
            return reference("second try")
        inside.set()
        go_on.wait(10)
        raise error

    def ask() -> object:
        try:
            return cache.get("voice", extract).key
        except BaseException as got:
            return got

    with ThreadPoolExecutor(1 + waiters) as pool:
        first = pool.submit(ask)
        assert inside.wait(10)
        rest = [pool.submit(ask) for _ in range(waiters)]
        time.sleep(0.1)  # let them reach the wait
        go_on.set()
        answers = [future.result(timeout=10) for future in (first, *rest)]
    return answers, len(calls)


def test_a_failed_extraction_reaches_all_that_wait_and_is_tried_again() -> None:
    cache, error = ReferenceCache(2**20), RequestError("no voice in it")
    answers, calls = ask_while_it_is_made(cache, error, waiters=5)
    assert calls == 1
    assert all(answer is error for answer in answers)
    assert cache.get("voice", lambda: reference("fresh")).key == "fresh"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupted_maker_is_replaced_by_one_that_waits(interrupt: BaseException) -> None:
    answers, calls = ask_while_it_is_made(ReferenceCache(2**20), interrupt, waiters=5)
    assert answers == [interrupt, *["second try"] * 5]
    assert calls == 2
