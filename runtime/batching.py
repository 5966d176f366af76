"""Which ready chunks stage 1 solves next, and together.

Each stream names the time by which its next sound is due: one that has not been heard yet when it asked to be, one that
plays when what it has runs out. The earliest goes first. So first chunks stand in front of streams that have sound in
hand, and neither can starve: a due time does not move while a chunk waits, and what comes later is due later.

A group ends for all its members at once, and a listener who has heard nothing yet should not wait for the long pieces
of others who could wait. So with a first chunk go other first chunks and what runs out soon, and nothing else. Order is
all that this decides; where a stream is cut, and so how it sounds, never depends on it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True)
class Ready(Generic[KeyT]):
    """A chunk that could be solved now."""

    key: KeyT
    due: float  # of a monotonic clock, in seconds
    frames: int  # that its solve evaluates, at most
    is_first: bool = False  # of a stream that has not been heard yet


def next_group(ready: Iterable[Ready[KeyT]], frame_limit: int, soon: float = math.inf) -> list[Ready[KeyT]]:
    """The most urgent chunk, however long, and after it all that fit beside it, most urgent first.

    With a first chunk only those that are first chunks too, or due before `soon`.
    """
    group: list[Ready[KeyT]] = []
    frames = 0
    for one in sorted(ready, key=lambda one: one.due):
        if not group:
            group, frames = [one], one.frames
        elif frames + one.frames <= frame_limit and (one.is_first or one.due < soon or not group[0].is_first):
            group.append(one)
            frames += one.frames
    return group
