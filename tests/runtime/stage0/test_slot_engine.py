"""The books of the engine that keeps streams in slots: who is read, who steps, and whose a token is."""

from itertools import pairwise

import pytest
import torch

from runtime.errors import RequestError
from runtime.stage0.plain_steps import PlainSteps
from runtime.stage0.prompt import embed_prompt, prompt_ids
from runtime.stage0.slot_engine import PIECE, SlotStage0
from runtime.types import EndReason
from tests.runtime.stage0.models import GREEDY, RAS, chain_lm, golden_lm, golden_prompt, prompt, seeded_lm
from tests.runtime.stage0.speaking import finish, speak, take


class Watched(PlainSteps):
    """Writes down what it is asked for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked: list[tuple[str, list[int]]] = []

    def read(self, pieces):
        self.asked.append(("read", [len(ids) for _, _, ids in pieces]))
        super().read(pieces)

    def launch(self, slots):
        self.asked.append(("step", list(slots)))
        return super().launch(slots)


def watched(lm, slots=8, positions=1024) -> tuple[SlotStage0, Watched]:
    steps = Watched(lm, slots, positions)
    return SlotStage0(lm.config, steps), steps


def test_ids_of_a_prompt_are_its_embeddings():
    lm, said = golden_lm(), golden_prompt("zero_shot")
    steps = PlainSteps(lm, 1, 512)
    assert torch.equal(steps._embed(prompt_ids(lm.config, said)), embed_prompt(lm, said))


def test_a_step_is_under_way_before_the_one_before_it_is_looked_at():
    """The device never waits for the host; the price is one step too many behind an end."""
    engine, steps = watched(chain_lm({6563: (10,), 10: (11,), 11: (6562,)}))
    assert speak(engine, prompt()).tokens == [10, 11]
    assert steps.asked == [("read", [3])] + [("step", [0])] * 4


def test_no_step_is_launched_beyond_the_length_limit():
    """A slot ends there, and so would the memory."""
    engine, steps = watched(chain_lm({6563: (10,), 10: (11,), 11: (10,)}), positions=9)
    spoken = speak(engine, prompt(max_tokens=50))
    assert (spoken.tokens, spoken.end) == ([10, 11, 10, 11, 10], EndReason.LENGTH)
    assert [kind for kind, _ in steps.asked] == ["read"] + ["step"] * 5


def test_a_token_of_a_step_under_way_is_not_given_to_the_next_owner_of_the_slot():
    engine, steps = watched(seeded_lm(), slots=1)
    alone = speak(engine, prompt(text=[9, 8]), RAS, 5)
    engine.add(1, prompt(min_tokens=9), RAS, 1)
    engine.step()
    engine.drop(1)
    assert engine.free_slots == 1
    assert speak(engine, prompt(text=[9, 8]), RAS, 5) == alone
    assert steps.slots == engine.free_slots == 1


def test_reading_prompts_never_puts_more_than_a_piece_between_two_steps():
    """Prompts are read beside those who speak: whole ones as they fit, a long one piece by piece."""
    lm = seeded_lm()
    engine, steps = watched(lm)
    engine.add(0, prompt(min_tokens=40, max_tokens=40), RAS, 0)
    spoken = {}
    take(engine, spoken)
    arrivals = {1: 98, 2: 98, 3: 2 * PIECE + 30, 4: 20, 5: 250}
    for key, length in arrivals.items():
        engine.add(key, prompt(text=[2 + key] * length, min_tokens=15, max_tokens=15), RAS, key)
    steps.asked.clear()
    finish(engine, spoken)
    reads = [lengths for kind, lengths in steps.asked if kind == "read"]
    assert reads == [[99, 99], [PIECE], [PIECE], [31, 21], [251]]
    kinds = [kind for kind, _ in steps.asked]
    assert not any(pair == ("read", "read") for pair in pairwise(kinds))
    for key, length in arrivals.items():
        alone = prompt(text=[2 + key] * length, min_tokens=15, max_tokens=15)
        assert spoken[key] == speak(watched(lm)[0], alone, RAS, key)


def test_a_long_prompt_is_read_at_once_when_nobody_is_held_up():
    engine, _ = watched(seeded_lm())
    engine.add(0, prompt(text=[5] * (2 * PIECE), min_tokens=2), RAS, 0)
    assert [step.key for step in engine.step()] == [0]


def test_prompt_that_fills_a_slot_is_refused_with_the_setting_to_raise():
    engine, _ = watched(golden_lm(), positions=20)
    engine.add(0, prompt(speech=[10] * 15), GREEDY, 0)
    with pytest.raises(RequestError, match=r"takes 20 positions, a slot has 20; .*raise slot_positions$"):
        engine.add(1, prompt(speech=[10] * 16), GREEDY, 0)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_any_seed_is_taken(seed):
    lm = seeded_lm()
    assert speak(watched(lm)[0], prompt(min_tokens=8), RAS, seed) == speak(
        watched(lm)[0], prompt(min_tokens=8), RAS, seed
    )
