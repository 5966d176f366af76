"""What every stage-0 engine keeps to. A new engine adds one line to ENGINES.

Trap 14 is excluded by design: the sampling law stands in one place, the SamplingParams handed to `add`; no engine has
a default or a profile of its own that could contradict it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from runtime.errors import RequestError
from runtime.stage0.base import Stage0, installed_vllm
from runtime.stage0.lm import SpeechLM
from runtime.stage0.torch_engine import TorchStage0
from runtime.types import EndReason, SamplingParams, Stage0Prompt
from tests import golden
from tests.runtime.stage0.engines import build_captured, build_slots
from tests.runtime.stage0.models import (
    GREEDY,
    RAS,
    STANDARD,
    chain_lm,
    golden_lm,
    golden_prompt,
    prompt,
    seeded_lm,
)
from tests.runtime.stage0.speaking import Spoken, finish, many, speak, take

Build = Callable[..., Stage0]  # (lm, max_streams, fidelity)
needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="needs vLLM")
ENGINES = (
    "torch",
    "slots",  # the books of the captured engine over the plain module
    pytest.param("captured", marks=pytest.mark.cuda),
    pytest.param("vllm", marks=needs_vllm),
)


@pytest.fixture(params=ENGINES)
def build(request) -> Build:
    builders: dict[str, Build] = {"torch": TorchStage0, "slots": build_slots, "captured": build_captured}
    return builders.get(request.param) or request.getfixturevalue("build_vllm")


@pytest.fixture(autouse=True)
def one_thread():
    """With three threads and more a neighbour can change the last bit of a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(build: Build, lm: SpeechLM, requests: Iterable[tuple[Stage0Prompt, SamplingParams, int]]) -> list[Spoken]:
    return [speak(build(lm), *request) for request in requests]


# The reference's numbers


@pytest.mark.parametrize("case", ["zero_shot", "instruct2", "cross_lingual"])
def test_greedy_tokens_match_the_reference(build, case):
    tokens = speak(build(golden_lm(), fidelity="official"), golden_prompt(case)).tokens
    expected = golden.load("llm_io")[f"{case}.greedy_tokens"].tolist()
    assert tokens[: len(expected)] == expected


def test_greedy_run_stops_where_the_reference_stops(build):
    spoken = speak(build(golden_lm(), fidelity="official"), golden_prompt("zero_shot"))
    assert spoken.tokens == golden.load("llm_io")["zero_shot.greedy_tokens_until_stop"].tolist()
    assert spoken.end is EndReason.STOP


# Ends


@pytest.mark.parametrize("case", golden.meta("llm")["cases"]["stop_semantics"]["cases"], ids=lambda c: c["sampled"][2])
def test_every_stop_id_ends_the_stream_and_is_not_given_out(build, case):
    """Trap 12: no list of stop ids, only the rule that an id from `speech_tokens` up is one."""
    first, second, third = case["sampled"]
    lm = chain_lm({6563: (first,), first: (second,), second: (third,)})
    spoken = speak(build(lm, fidelity="official"), prompt())
    assert spoken.tokens == case["yielded"]
    assert spoken.end is EndReason.STOP


def test_length_limit_gives_the_last_token_and_says_length(build):
    """Trap 11: the limit is the prompt's own (20 per text token), there is no default to fall back to."""
    limit = golden.meta("llm")["cases"]["stop_semantics"]["never_stop_num_tokens"]
    spoken = speak(build(chain_lm({6563: (10,), 10: (11,), 11: (10,)})), prompt(max_tokens=limit))
    assert len(spoken.tokens) == limit
    assert spoken.end is EndReason.LENGTH


def test_stop_id_at_the_limit_is_a_stop(build):
    spoken = speak(build(chain_lm({6563: (10,), 10: (6562,)})), prompt(max_tokens=2))
    assert (spoken.tokens, spoken.end) == ([10], EndReason.STOP)
    spoken = speak(build(chain_lm({6563: (10,), 10: (6562,)})), prompt(max_tokens=1))
    assert (spoken.tokens, spoken.end) == ([10], EndReason.LENGTH)


@pytest.mark.parametrize("stop", [6561, 6562, 6760])
def test_no_stop_id_ends_a_stream_before_min_tokens(build, stop):
    """Trap 10: all 200 of them, not only 6561."""
    lm = chain_lm({6563: (stop, 10), 10: (stop, 11), 11: (stop, 10)})
    spoken = speak(build(lm, fidelity="intended"), prompt(min_tokens=18, max_tokens=180))
    assert (len(spoken.tokens), spoken.end) == (18, EndReason.STOP)


@pytest.mark.parametrize(("stop", "made"), [(6561, 18), (6562, 0), (6760, 0)])
def test_official_fidelity_masks_only_the_first_stop_id(build, stop, made):
    """Spec 9.6: the reference's minimum length hits 6561 alone. 18 steps mask it in the fixture, none mask 6562."""
    notes = golden.meta("llm")["cases"]["stop_semantics"]
    assert (notes["steps_with_6561_masked"], notes["steps_with_6562_masked"]) == (18, 0)
    lm = chain_lm({6563: (stop, 10), 10: (stop, 11), 11: (stop, 10)})
    spoken = speak(build(lm, fidelity="official"), prompt(min_tokens=18, max_tokens=180))
    assert (len(spoken.tokens), spoken.end) == (made, EndReason.STOP)


def test_length_is_bounded_by_the_model_too(build):
    lm = chain_lm({6563: (10,), 10: (11,), 11: (10,)})
    lm.config = replace(lm.config, qwen=replace(lm.config.qwen, max_position_embeddings=64))
    spoken = speak(build(lm), prompt(speech=[10] * (64 - 4 - 5), max_tokens=1000))
    assert (len(spoken.tokens), spoken.end) == (5, EndReason.LENGTH)


def test_unspeakable_prompt_is_refused_and_nothing_is_kept(build):
    engine = build(golden_lm())
    for bad in (prompt(text=[512]), prompt(speech=[6561]), prompt(text=[1] * 40_000), prompt(max_tokens=0)):
        with pytest.raises(RequestError):
            engine.add(1, bad, RAS, 0)
    with pytest.raises(RequestError, match="temperature"):
        engine.add(1, prompt(), SamplingParams(temperature=-1), 0)
    assert engine.live_streams == 0
    assert engine.step() == []


# Many streams


def test_tokens_come_one_by_one_in_order(build):
    """Trap 13: a step gives a list of single tokens; whoever takes them all loses and doubles none."""
    lm = chain_lm({6563: (10,), 10: (11,), 11: (12,), 12: (13,), 13: (6562,)})
    engine = build(lm)
    seen = []
    for key in (4, 2, 9):
        engine.add(key, prompt(), GREEDY, 0)
    while engine.live_streams:
        seen += engine.step()
    for key in (4, 2, 9):
        mine = [step for step in seen if step.key == key]
        assert [step.token for step in mine] == [10, 11, 12, 13, None]
        assert [step.is_last for step in mine] == [False] * 4 + [True]


def test_seeded_stream_is_the_same_alone_and_among_64_that_join_and_leave(build):
    """Trap 9."""
    lm, requests = seeded_lm(), many(64)
    expected = alone(build, lm, requests)
    engine, spoken = build(lm, max_streams=64), {}
    dropped = {key for key in range(64) if key % 5 == 3}
    for key, request in enumerate(requests):
        engine.add(key, *request)
        if key > 40:  # the first 40 join at once, the others one per step, while some leave after ten
            take(engine, spoken)
            if key - 10 in dropped:
                engine.drop(key - 10)
    for key in dropped:
        engine.drop(key)
    finish(engine, spoken)
    for key in set(range(64)) - dropped:
        assert spoken[key] == expected[key], key
    assert sum(len(stream.tokens) for stream in expected) > 1000


def test_order_of_arrival_changes_nothing(build):
    """Trap 16: in a batch of prefills and decodes each row keeps its own prompt, whatever row that is."""
    lm, requests = seeded_lm(), many(12)
    forward, backward = build(lm), build(lm)
    for key in range(12):
        forward.add(key, *requests[key])
    first, second = finish(forward), {}
    for key in reversed(range(12)):
        backward.add(key, *requests[key])
        take(backward, second)
    assert finish(backward, second) == first


def test_seed_decides(build):
    lm = seeded_lm()
    runs = [speak(build(lm), prompt(min_tokens=20, max_tokens=20), RAS, seed).tokens for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_streams_beyond_the_limit_wait_and_are_served(build):
    lm, requests = seeded_lm(), many(7)
    engine, spoken = build(lm, max_streams=2), {}
    for key, request in enumerate(requests):
        engine.add(key, *request)
    take(engine, spoken)
    assert len(spoken) == 2
    assert list(dict(sorted(finish(engine, spoken).items())).values()) == alone(build, lm, requests)


def test_prompt_speech_is_no_history_for_repetition(build):
    """Trap 15: reference tokens are read, but neither RAS nor the penalty holds them against the model."""
    lm = chain_lm({6563: (10,), 10: (10, 11), 11: (6562,)})
    for sampling in (RAS, SamplingParams(method="standard", temperature=0, repetition_penalty=10.0)):
        spoken = speak(build(lm), prompt(speech=[10] * 10, min_tokens=2), sampling)
        assert spoken.tokens[0] == 10
        assert spoken.tokens[1] != 10


# Faults


def with_bad_text(lm: SpeechLM, token: int = 7) -> SpeechLM:
    lm.backbone.embed_tokens.weight.data[token] = math.nan
    return lm


@pytest.mark.parametrize("sampling", [RAS, STANDARD, GREEDY])
def test_nan_in_a_prompt_ends_that_request_and_no_other(build, sampling):
    """Traps 1, 8 and 43: before, beside and after it everything is as if it had never come."""
    lm = with_bad_text(seeded_lm())
    healthy = prompt(text=[1, 2, 3], max_tokens=30)
    expected = speak(build(lm), healthy, sampling, 5)
    engine, spoken = build(lm), {}
    engine.add(0, healthy, sampling, 5)
    take(engine, spoken)
    engine.add(1, prompt(text=[1, 7, 3] * 20), sampling, 6)
    engine.add(2, healthy, sampling, 5)
    while not {1, 2} <= spoken.keys():  # a step may be under way already when they join
        take(engine, spoken)
    assert spoken[1].end is EndReason.ERROR
    assert "NaN" in str(spoken[1].error)
    engine.add(3, healthy, sampling, 5)  # takes the memory that the broken one left
    finish(engine, spoken)
    assert [spoken[key] for key in (0, 2, 3)] == [expected] * 3


def test_nan_while_decoding_ends_that_request_and_no_other(build):
    """Traps 1 and 43: the row turns bad in the middle of a batch, and its memory is used again."""
    lm = chain_lm({6563: (10,), 10: (11,), 11: (12,), 12: (6562,), 20: (21,), 21: (22,)})
    lm.speech_embedding.weight.data[22] = math.nan
    engine, spoken = build(lm), {}
    engine.add(0, prompt(speech=[20]), GREEDY, 0)  # 21, 22, then NaN
    for key in (1, 2, 3):
        engine.add(key, prompt(), GREEDY, 0)
    for _ in range(3):
        take(engine, spoken)
    assert (spoken[0].tokens, spoken[0].end) == ([21, 22], EndReason.ERROR)
    engine.add(4, prompt(), GREEDY, 0)
    finish(engine, spoken)
    for key in (1, 2, 3, 4):
        assert (spoken[key].tokens, spoken[key].end) == ([10, 11, 12], EndReason.STOP)


def test_row_with_nothing_left_to_draw_ends_that_request_alone(build):
    """Trap 5: every logit of this stream is -inf or forbidden; the engine lives."""
    lm = chain_lm({6563: (10,), 10: (11,), 11: (6562,), 20: (21,)})
    lm.speech_embedding.weight.data[21] = math.inf  # its norm is NaN, and so is all that follows
    engine, spoken = build(lm), {}
    engine.add(0, prompt(speech=[20]), STANDARD, 0)
    engine.add(1, prompt(), GREEDY, 0)
    finish(engine, spoken)
    assert spoken[0].end is EndReason.ERROR
    assert spoken[1].tokens == [10, 11]
    assert speak(engine, prompt()).tokens == [10, 11]


def test_storm_of_cancellations_and_faults_leaves_the_others_as_they_were(build):
    """Traps 1, 9, 28, 29 and 43 at once: a tenth is cancelled in mid-stream, a tenth has NaN in the prompt, and now and
    then a stream says a token whose embedding is NaN.
    """
    lm = with_bad_text(seeded_lm())
    lm.speech_embedding.weight.data[22] = math.nan
    requests = many(150)
    for key in range(5, 150, 10):
        requests[key] = (prompt(text=[1, 7, 3], max_tokens=30), RAS, key)
    cancelled = set(range(8, 150, 10))
    engine, spoken = build(lm, max_streams=16), {}
    waiting = list(range(150))
    while waiting or engine.live_streams:
        while waiting and engine.live_streams < 20:
            key = waiting.pop(0)
            engine.add(key, *requests[key])
        take(engine, spoken)
        for key in cancelled & spoken.keys():
            if len(spoken[key].tokens) == key % 7:
                engine.drop(key)
    survivors = sorted(set(range(150)) - cancelled)
    ends = [spoken[key].end for key in survivors]
    assert 15 < ends.count(EndReason.ERROR) < 60
    assert ends.count(EndReason.STOP) + ends.count(EndReason.LENGTH) > 60
    chosen = survivors[::3]
    assert [spoken[key] for key in chosen] == alone(build, lm, [requests[key] for key in chosen])


# Release


def test_drop_is_idempotent_and_frees_everything(build):
    """Trap 28: finished, cancelled, waiting, unknown and dropped twice are all the same to `drop`."""
    engine = build(seeded_lm(), max_streams=3)
    for round_ in range(3):
        for key in range(5):
            engine.add(key, prompt(max_tokens=1 if key == 0 else 50, min_tokens=50), RAS, key)
        steps = engine.step()
        assert [step.key for step in steps if step.is_last] == [0]
        for key in (0, 0, 1, 1, 4, 77, -1, 2, 3, 2):
            engine.drop(key)
        assert engine.live_streams == 0
        assert engine.step() == [], round_


def test_dropped_stream_gives_nothing_more(build):
    engine = build(seeded_lm())
    for key in (1, 2):
        engine.add(key, prompt(min_tokens=9, max_tokens=9), RAS, key)
    engine.step()
    engine.drop(1)
    assert {step.key for step in engine.step()} == {2}


def test_key_can_be_used_again_once_its_stream_is_gone(build):
    engine = build(seeded_lm())
    first = speak(engine, prompt(), RAS, 3)
    assert speak(engine, prompt(), RAS, 3) == first


def test_closing_ends_every_stream_and_can_be_repeated(build):
    engine = build(seeded_lm(), max_streams=5)
    engine.add(1, prompt(min_tokens=9), RAS, 1)
    engine.step()
    engine.close()
    engine.close()
    assert engine.live_streams == 0


def test_engine_tells_what_is_live(build):
    said = build(golden_lm(), fidelity="official").describe()
    assert said["device"] in ("cpu", "cuda")
    assert said["precision"] == "float32"
    assert all(isinstance(value, str) for value in said.values())
