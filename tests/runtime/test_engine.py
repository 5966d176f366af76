"""The whole corridor on the tiny checkpoint: what a stream promises, alone and among many.

Traps by their number in the reliability list. Trap 25 is excluded by the design: the stages hand each other typed
values in one process, so no field can be unknown to one of them.
"""

import contextlib
import dataclasses
import random
import threading

import numpy as np
import pytest
import torch

from runtime import (
    AudioClip,
    EndReason,
    Engine,
    EngineSettings,
    EngineUnavailable,
    GenerationError,
    Mode,
    Overloaded,
    RequestError,
    SpeechRequest,
)
from runtime.engine import resolve_device
from runtime.types import SamplingParams, TokenStep

SENTENCE = "The quick brown fox jumps."
LONG = " ".join(["This sentence is one of three that follow each other in a row."] * 3)


def request(voice: AudioClip, **changes) -> SpeechRequest:
    return SpeechRequest(**{"reference": voice, "text": SENTENCE, "seed": 7} | changes)


def speak(engine: Engine, wish: SpeechRequest):
    with engine.stream(wish) as stream:
        chunks = list(stream)
    return chunks, stream.stats


def joined(chunks) -> np.ndarray:
    return np.concatenate([chunk.samples for chunk in chunks])


def settle(engine: Engine) -> None:
    """Waits until both workers have taken the calls posted so far."""
    for worker in (engine._worker0, engine._worker1):
        done = threading.Event()
        worker.post(done.set)
        assert done.wait(30)


def assert_idle(engine: Engine) -> None:
    settle(engine)
    assert engine.live_streams == 0
    assert engine._worker0.streams == engine._worker1.streams == 0
    assert engine._stage0.live_streams == 0


# One stream


def test_a_stream_gives_every_token_as_sound(engine, voice):
    chunks, stats = speak(engine, request(voice))
    assert stats.ended in (EndReason.STOP, EndReason.LENGTH)
    assert sum(len(chunk.samples) for chunk in chunks) == stats.samples == stats.tokens * 960
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    samples = joined(chunks)
    assert samples.dtype == np.float32 and np.abs(samples).max() <= 0.99 and samples.std() > 1e-4
    assert 0 < stats.prepare_seconds < stats.first_audio_seconds <= stats.total_seconds
    assert stats.stage0_seconds > 0 and stats.stage1_seconds > 0 and stats.real_time_factor > 0
    assert_idle(engine)


def test_the_same_seed_gives_the_same_sound(engine, voice):
    first, _ = speak(engine, request(voice))
    again, _ = speak(engine, request(voice))
    other, _ = speak(engine, request(voice, seed=8))
    assert np.array_equal(joined(first), joined(again))
    assert not np.array_equal(joined(first)[:9600], joined(other)[:9600])


def test_without_a_seed_one_is_drawn_and_told(engine, voice):
    first, stats = speak(engine, request(voice, seed=None))
    again, _ = speak(engine, request(voice, seed=stats.seed))
    assert np.array_equal(joined(first), joined(again))


def test_streaming_and_whole_speak_the_same_tokens(engine, voice):
    streamed, stats = speak(engine, request(voice))
    whole, whole_stats = speak(engine, request(voice, streaming=False))
    assert stats.tokens == whole_stats.tokens and len(whole) == 1 < len(streamed)
    assert len(joined(streamed)) == len(joined(whole))


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"transcript": "A short clip."}, Mode.ZERO_SHOT),
        ({}, Mode.CROSS_LINGUAL),
        ({"instruction": "Speak softly."}, Mode.INSTRUCT),
        ({"text": "我们今天去公园，好吗？"}, Mode.CROSS_LINGUAL),
    ],
)
def test_every_mode_speaks(engine, voice, changes, mode):
    chunks, stats = speak(engine, request(voice, **changes))
    assert stats.mode is mode and stats.samples == stats.tokens * 960 > 0
    assert chunks[-1].is_last


def test_voice_conversion_keeps_the_length_of_its_source(engine, voice):
    chunks, stats = speak(engine, request(voice, text="", source=voice))
    assert stats.mode is Mode.CONVERSION and stats.tokens == 30
    assert len(joined(chunks)) == 30 * 960


def test_speed_works_in_a_stream(engine, voice):
    """Trap 70."""
    normal, _ = speak(engine, request(voice))
    fast, _ = speak(engine, request(voice, speed=1.25))
    assert abs(len(joined(fast)) - len(joined(normal)) / 1.25) <= 480
    assert len(fast) == len(normal)


def test_sampling_is_echoed_as_it_was_used(engine, voice):
    """Trap 14: there is one source of sampling, the request or else the checkpoint, and the stats show it."""
    _, stats = speak(engine, request(voice))
    assert stats.sampling == SamplingParams("ras", 1.0, 0.8, 25, 1.0, 10, 0.1)
    greedy = SamplingParams("standard", temperature=0.0)
    _, stats = speak(engine, request(voice, sampling=greedy))
    assert stats.sampling == greedy


def test_the_length_limit_ends_a_stream_and_is_told(engine, voice, monkeypatch):
    """Trap 11: the limit is 20 tokens per text token, and reaching it is flagged."""
    monkeypatch.setattr("runtime.frontend.prepare.MIN_RATIO", 20)  # no stop before the limit
    _, stats = speak(engine, request(voice, text="Ho ho ho."))
    assert stats.tokens + stats.dropped_tokens == 20 * len("Ho ho ho.")
    assert stats.ended is EndReason.LENGTH and stats.length_capped == [0]


# Long text


def test_long_text_is_spoken_sentence_by_sentence_without_a_gap(engine, voice):
    chunks, stats = speak(engine, request(voice, text=LONG))
    assert stats.sentences > 1
    assert sorted({chunk.sentence for chunk in chunks}) == list(range(stats.sentences))
    assert [chunk.sentence for chunk in chunks] == sorted(chunk.sentence for chunk in chunks)
    assert stats.samples == stats.tokens * 960
    assert sum(chunk.is_last for chunk in chunks) == 1 and chunks[-1].is_last


def test_a_pause_between_sentences_is_a_setting(tiny_checkpoint, voice):
    with Engine(tiny_checkpoint, EngineSettings(sentence_pause_seconds=0.5)) as engine:
        chunks, stats = speak(engine, request(voice, text=LONG))
        assert stats.samples == stats.tokens * 960 + (stats.sentences - 1) * 12000
        opener = next(chunk for chunk in chunks if chunk.sentence == 1)
        assert not opener.samples[:12000].any() and opener.samples[12000:].any()


def test_what_passes_the_noise_is_split_and_loses_nothing(engine, voice, monkeypatch):
    """Trap 44."""
    monkeypatch.setattr(engine._stage1, "capacity_tokens", lambda reference: 40)
    chunks, stats = speak(engine, request(voice, text=LONG))
    assert stats.tokens > 80 and stats.samples == stats.tokens * 960
    assert sum(chunk.is_last for chunk in chunks) == 1 and chunks[-1].is_last


# Many streams


def test_sixty_four_streams_with_cancellations_leak_nothing_and_equal_their_solo_runs(engine, voice):
    """Traps 9, 28, 29, 30, 36, 52."""
    settle(engine)
    threads_before = threading.active_count()
    wishes = [request(voice, text=f"Number {n} speaks.", seed=n) for n in range(64)]
    cancelled = set(random.Random(5).sample(range(64), 13))
    results: dict[int, tuple] = {}

    def run(n: int) -> None:
        with engine.stream(wishes[n]) as stream:
            if n in cancelled:
                if n % 3:
                    next(stream)
                return
            results[n] = (list(stream), stream.stats)

    pool = [threading.Thread(target=run, args=(n,)) for n in range(64)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join(90)
    assert set(results) == set(range(64)) - cancelled
    assert_idle(engine)
    assert threading.active_count() == threads_before

    for n in random.Random(6).sample(sorted(results), 12):
        chunks, stats = results[n]
        alone, alone_stats = speak(engine, wishes[n])
        assert stats.tokens == alone_stats.tokens and stats.dropped_tokens == alone_stats.dropped_tokens
        assert [len(chunk.samples) for chunk in chunks] == [len(chunk.samples) for chunk in alone]
        np.testing.assert_allclose(joined(chunks), joined(alone), atol=1e-4)


def test_a_consumer_that_does_not_read_holds_up_nobody(engine, voice):
    """Trap 30: its chunks are bounded, others pass."""
    with engine.stream(request(voice, text=LONG)) as unread:
        for _ in range(3):
            _, stats = speak(engine, request(voice))
            assert stats.ended is not None
        settle(engine)
        assert unread._unread <= engine.settings.chunk_queue
        assert not unread.ended
        rest = list(unread)  # it goes on once it is read
    assert rest[-1].is_last
    assert_idle(engine)


def test_closing_a_stream_frees_stage_0_within_a_step(engine, voice):
    """Trap 29."""
    with engine.stream(request(voice, text=LONG)) as stream:
        next(stream)
        stream.close()
        settle(engine)
        assert engine._stage0.live_streams == 0
        assert stream.stats.ended is EndReason.CANCELLED
    assert_idle(engine)


def test_closing_from_another_thread_ends_a_waiting_consumer(engine, voice):
    with engine.stream(request(voice, text=LONG)) as stream:
        threading.Timer(0.05, stream.close).start()
        list(stream)  # returns
    assert stream.stats.ended is EndReason.CANCELLED


def test_releasing_twice_and_releasing_strangers_is_harmless(engine, voice):
    """Trap 28."""
    stream = engine.stream(request(voice))
    with stream:
        list(stream)
    stream.close()
    stream.close()
    engine._worker0.post(engine._worker0.drop, stream)
    engine._worker1.post(engine._worker1.drop, stream)
    assert stream.stats.ended in (EndReason.STOP, EndReason.LENGTH)
    assert_idle(engine)


def test_a_stream_that_is_never_entered_costs_nothing(engine, voice):
    engine.stream(request(voice))
    assert_idle(engine)


def test_too_many_requests_are_refused_at_the_door(tiny_checkpoint, voice):
    with Engine(tiny_checkpoint, EngineSettings(max_streams=1, max_waiting=1, chunk_queue=1)) as engine:
        first, second = (engine.stream(request(voice, text=LONG)) for _ in range(2))
        with first, second, pytest.raises(Overloaded):
            engine.stream(request(voice)).__enter__()
        _, stats = speak(engine, request(voice))
        assert stats.ended is not None


def test_streams_solved_in_groups_sound_like_each_alone(tiny_checkpoint, engine, voice):
    """Batching changes no stream: its cuts are its own, and rows do not see each other."""
    wishes = [request(voice, text=f"Number {n} speaks.", seed=n) for n in range(6)]
    alone = [joined(speak(engine, wish)[0]) for wish in wishes]
    groups = []
    with Engine(tiny_checkpoint, EngineSettings(group_frames=100_000)) as together:
        decode = together._stage1.decode_together
        together._stage1.decode_together = lambda chunks: groups.append(len(chunks)) or decode(chunks)
        with contextlib.ExitStack() as entered:
            streams = [entered.enter_context(together.stream(wish)) for wish in wishes]
            found = [joined(list(stream)) for stream in streams]
    assert max(groups) > 1
    for samples, expected in zip(found, alone, strict=True):
        assert samples.shape == expected.shape
        assert np.square(samples - expected).mean() < 1e-4 * np.square(expected).mean()  # 40 dB


def test_a_failed_solve_ends_those_in_it_and_no_others(engine, voice, monkeypatch):
    monkeypatch.setattr(engine._stage1, "decode_together", lambda chunks: 1 / 0)
    with pytest.raises(GenerationError, match="ZeroDivisionError"):
        speak(engine, request(voice))
    monkeypatch.undo()
    neighbours_speak(engine, voice)


# Failures


def neighbours_speak(engine, voice):
    _, stats = speak(engine, request(voice))
    assert stats.ended in (EndReason.STOP, EndReason.LENGTH)
    assert_idle(engine)


@pytest.mark.parametrize("error", [RuntimeError("torn"), KeyError("torn"), GenerationError("torn")])
def test_an_exception_in_stage_1_reaches_its_own_stream(engine, voice, monkeypatch, error):
    """Trap 31."""
    begin = engine._stage1.begin

    def failing(chunk, voices):
        if chunk.state.stretch.speed == 1.5:
            raise error
        return begin(chunk, voices)

    monkeypatch.setattr(engine._stage1, "begin", failing)
    with engine.stream(request(voice, text=LONG)) as neighbour:
        with pytest.raises(GenerationError, match="torn"):
            speak(engine, request(voice, speed=1.5))
        assert list(neighbour)[-1].is_last
    neighbours_speak(engine, voice)


def test_an_exception_while_joining_stage_0_reaches_its_own_stream(engine, voice, monkeypatch):
    """Trap 31."""
    monkeypatch.setattr(engine._stage0, "add", lambda *arguments: 1 / 0)
    with pytest.raises(GenerationError, match="ZeroDivisionError"):
        speak(engine, request(voice))
    monkeypatch.undo()
    neighbours_speak(engine, voice)


def test_hundreds_of_waiting_requests_that_cannot_join_each_hear_of_it(tiny_checkpoint, voice, monkeypatch):
    with Engine(tiny_checkpoint, EngineSettings(max_streams=1, max_waiting=400)) as engine:
        speech = engine.prepare(request(voice, text=LONG))
        monkeypatch.setattr(engine, "prepare", lambda wish: speech)
        with engine.stream(request(voice)) as first:
            next(first)
            monkeypatch.setattr(engine._stage0, "add", lambda *arguments: 1 / 0)
            waiting = [engine.stream(request(voice)) for _ in range(400)]
            for stream in waiting:
                stream.__enter__()
        for stream in waiting:
            with pytest.raises(GenerationError, match="ZeroDivisionError"):
                next(stream)
        assert_idle(engine)


def test_an_exception_while_sound_is_handed_over_reaches_its_own_stream(engine, voice, monkeypatch):
    """Trap 31."""
    with engine.stream(request(voice)) as stream:
        monkeypatch.setattr(stream.silence, "sent", lambda samples: 1 / 0)
        with pytest.raises(GenerationError, match="ZeroDivisionError"):
            list(stream)
    neighbours_speak(engine, voice)


def test_an_error_between_chunks_follows_the_sound_that_was_made(engine, voice, monkeypatch):
    """Trap 31: a done marker always follows."""
    begin = engine._stage1.begin

    def failing_at_the_end(chunk, voices):
        if chunk.is_last:
            raise RuntimeError("torn")
        return begin(chunk, voices)

    monkeypatch.setattr(engine._stage1, "begin", failing_at_the_end)
    heard = []
    with pytest.raises(GenerationError, match="torn"), engine.stream(request(voice, text=LONG)) as stream:
        for chunk in stream:
            heard.append(chunk)
    assert heard and not heard[-1].is_last
    assert stream.stats.ended is EndReason.ERROR
    monkeypatch.undo()
    neighbours_speak(engine, voice)


def test_illegal_tokens_are_dropped_and_counted(engine, voice, monkeypatch):
    """Trap 27."""
    step = engine._stage0.step

    def with_illegal_tokens():
        return [extra for real in step() for extra in (TokenStep(real.key, -1), TokenStep(real.key, 6600), real)]

    clean, clean_stats = speak(engine, request(voice))
    monkeypatch.setattr(engine._stage0, "step", with_illegal_tokens)
    chunks, stats = speak(engine, request(voice))
    assert stats.dropped_tokens > clean_stats.dropped_tokens
    assert np.array_equal(joined(chunks), joined(clean))


def test_a_model_that_says_nothing_is_an_error_not_an_empty_file(engine, voice, monkeypatch):
    silent = lambda: [TokenStep(key, None, True, EndReason.STOP) for key in list(engine._worker0._live)]  # noqa: E731
    monkeypatch.setattr(engine._stage0, "step", silent)
    with pytest.raises(GenerationError, match="gave no sound"):
        speak(engine, request(voice))
    monkeypatch.undo()
    for key in range(10_000):
        engine._worker0.post(engine._stage0.drop, key)
    neighbours_speak(engine, voice)


@pytest.mark.parametrize(("part", "name"), [("speech_tokens", "tokens"), ("mel", "mel"), ("speaker", "speaker")])
def test_missing_conditioning_is_an_error(engine, voice, part, name, monkeypatch):
    """Trap 24: never the voice of nobody."""
    speech = engine.prepare(request(voice))
    empty = dataclasses.replace(speech.reference, **{part: getattr(speech.reference, part)[:0]})
    monkeypatch.setattr(engine, "prepare", lambda wish: dataclasses.replace(speech, reference=empty))
    with pytest.raises(GenerationError, match=name):
        speak(engine, request(voice))
    monkeypatch.undo()
    neighbours_speak(engine, voice)


def test_what_crosses_between_the_stages_is_the_same_object(engine, voice, monkeypatch):
    """Trap 23: half-precision conditioning arrives bit for bit, as nothing is packed and unpacked on the way."""
    speech = engine.prepare(request(voice))
    half = dataclasses.replace(speech.reference, mel=speech.reference.mel.bfloat16())
    seen = []
    opened = engine._stage1.open
    monkeypatch.setattr(engine, "prepare", lambda wish: dataclasses.replace(speech, reference=half))
    monkeypatch.setattr(engine._stage1, "open", lambda reference, speed: seen.append(reference) or opened(reference))
    speak(engine, request(voice))
    assert seen[0] is half and seen[0].mel.dtype is torch.bfloat16


def test_a_dead_worker_fails_its_requests_at_once(tiny_checkpoint, voice, monkeypatch):
    engine = Engine(tiny_checkpoint)
    monkeypatch.setattr(engine._worker1, "work", lambda: 1 / 0)
    with pytest.raises(GenerationError, match="a worker of the engine died"):
        speak(engine, request(voice))
    with pytest.raises(EngineUnavailable, match="restart it"):
        engine.stream(request(voice))
    engine.close()


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ""}, "text"),
        ({"text": " \n\t"}, "text"),
        ({"text": "?!..."}, "text"),
        ({"speed": 0.1}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"transcript": "?!"}, "transcript"),
        ({"transcript": "word " * 500}, "transcript"),
        ({"text": "a<|endofprompt|>b<|endofprompt|>c"}, "endofprompt"),
        ({"instruction": "word " * 200}, "instruction"),
        ({"reference": AudioClip(np.zeros(48000, np.float32), 24000)}, "silent"),
        ({"reference": AudioClip(np.zeros(0, np.float32), 24000)}, "empty"),
        ({"reference": AudioClip(np.full(48000, np.nan, np.float32), 24000)}, "not a number|NaN"),
    ],
)
def test_bad_input_is_refused_before_a_model_runs(engine, voice, changes, message, monkeypatch):
    """Traps 67, 68, 69."""
    monkeypatch.setattr(engine._frontend._encoders.tokens, "encode", lambda samples: 1 / 0)
    with pytest.raises(RequestError, match=message):
        engine.stream(request(voice, **changes))
    assert_idle(engine)


def test_a_bad_source_is_refused_before_a_model_runs(engine, voice, monkeypatch):
    monkeypatch.setattr(engine._frontend._encoders.tokens, "encode", lambda samples: 1 / 0)
    with pytest.raises(RequestError, match="source"):
        engine.stream(request(voice, text="", source=AudioClip(np.zeros(48000, np.float32), 24000)))


# Life of an engine


def test_closing_twice_is_harmless_and_ends_what_runs(tiny_checkpoint, voice):
    engine = Engine(tiny_checkpoint)
    with pytest.raises(GenerationError, match="engine was closed"), engine.stream(request(voice, text=LONG)) as stream:
        next(stream)
        engine.close()
        list(stream)
    engine.close()
    with pytest.raises(EngineUnavailable):
        engine.stream(request(voice))
    assert not engine._worker0._thread.is_alive() and not engine._worker1._thread.is_alive()


def test_describe_tells_what_is_live(engine):
    described = engine.describe()
    assert described["fidelity"] == "intended"
    assert any("torch" in value for value in described.values())


def test_each_plan_speaks_the_same_tokens_and_is_told(tiny_checkpoint, engine, voice):
    assert "latency" in engine.describe()["hops"]
    long = request(voice, text=LONG)
    many, many_stats = speak(engine, long)
    with Engine(tiny_checkpoint, EngineSettings(hops="throughput")) as fewer:
        assert "throughput" in fewer.describe()["hops"]
        two_goes, stats = speak(fewer, long)
    assert stats.tokens == many_stats.tokens and len(two_goes) < len(many)
    first, same = two_goes[0].samples, many[0].samples
    np.testing.assert_allclose(first, same, atol=1e-4)


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "mps"])
def test_a_device_that_is_not_here_is_named(name):
    """Trap 22: what was asked for is what runs, or loading fails."""
    with pytest.raises(EngineUnavailable, match=name.split(":")[0]):
        resolve_device(name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lm_precision": "fp8"},
        {"flow_precision": "half"},
        {"fidelity": "exact"},
        {"final_attention": "causal"},
        {"hops": "few"},
        {"voice_kv_bytes": -1},
        {"stream_kv_bytes": -1},
        {"group_frames": 0},
        {"estimator": "onnx"},
        {"stage0": "llama"},
        {"chunk_queue": 0},
        {"sentence_pause_seconds": -1.0},
    ],
)
def test_a_setting_without_meaning_is_refused(wrong):
    """Trap 22."""
    ((name, value),) = wrong.items()
    with pytest.raises(EngineUnavailable, match=f"{name} is {value!r}"):
        EngineSettings(**wrong)


def test_a_text_is_spoken_from_a_later_sentence_as_in_the_whole(engine, voice):
    whole, stats = speak(engine, request(voice, text=LONG))
    rest, rest_stats = speak(engine, request(voice, text=LONG, first_sentence=1, level_lufs=stats.level_lufs))
    assert np.array_equal(joined(rest), joined([chunk for chunk in whole if chunk.sentence >= 1]))
    assert rest_stats.sentences == stats.sentences - 1 and rest_stats.seed == stats.seed
    with pytest.raises(RequestError, match="no sentence 9"):
        engine.stream(request(voice, text=LONG, first_sentence=9))
