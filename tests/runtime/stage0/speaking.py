"""Lets an engine speak and writes down what it said."""

from dataclasses import dataclass, field

import torch

from runtime.errors import GenerationError
from runtime.stage0.base import Stage0
from runtime.types import EndReason, SamplingParams, Stage0Prompt, TokenStep
from tests.runtime.stage0.models import GREEDY, RAS, STANDARD, prompt


@dataclass
class Spoken:
    """What one stream gave."""

    tokens: list[int] = field(default_factory=list)
    end: EndReason | None = None
    error: GenerationError | None = field(default=None, compare=False)  # an exception equals itself alone; `end` tells


def take(engine: Stage0, spoken: dict[int, Spoken]) -> None:
    """One step."""
    for step in engine.step():
        note(spoken, step)


def note(spoken: dict[int, Spoken], step: TokenStep) -> None:
    """Writes down what a step gave, and holds it to the rules of TokenStep."""
    stream = spoken.setdefault(step.key, Spoken())
    assert stream.end is None, "a step after the last one"
    assert step.is_last == (step.end is not None)
    assert (step.error is not None) == (step.end is EndReason.ERROR)
    assert (step.token is None) == (step.end in (EndReason.STOP, EndReason.ERROR))
    if step.token is not None:
        stream.tokens.append(step.token)
    stream.end, stream.error = step.end, step.error


def finish(engine: Stage0, spoken: dict[int, Spoken] | None = None) -> dict[int, Spoken]:
    spoken = {} if spoken is None else spoken
    while engine.live_streams:
        take(engine, spoken)
    return spoken


def speak(engine: Stage0, said: Stage0Prompt, sampling: SamplingParams = GREEDY, seed: int = 0) -> Spoken:
    engine.add(0, said, sampling, seed)
    return finish(engine)[0]


def many(count: int) -> list[tuple[Stage0Prompt, SamplingParams, int]]:
    """Requests of every length, with and without reference, under both laws."""
    generator = torch.Generator().manual_seed(count)

    def ids(limit: int, most: int) -> torch.Tensor:
        size = int(torch.randint(0, most, (1,), generator=generator))
        return torch.randint(0, limit, (size,), generator=generator)

    return [
        (
            prompt(text=ids(512, 40), speech=ids(301, 30), min_tokens=20, max_tokens=10 + 7 * index % 60),
            (RAS, STANDARD)[index % 2],
            1000 + index,
        )
        for index in range(count)
    ]
