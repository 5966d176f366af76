"""The language model at the speed of a GPU: every stream has a slot of its own, and steps run ahead of what was read.

This file keeps the books: who waits, who is read, who speaks, and which step's tokens are due. The arithmetic is behind
`Steps`: captured graphs on a GPU (`captured.py`), the plain module on a CPU (`plain_steps.py`), so that the books are
tested everywhere. Reading a prompt fills its slot up to the last position; that one is the first step's input, so there
is a single way in which tokens are made.

A step is launched before the tokens of the one before it have been looked at: the GPU never waits for us, and a stream
that ends has taken one step for nothing. Tokens of a step are credited to the streams that were in it when it was
launched, and to nobody if they have left meanwhile. Work is done in the order in which it was launched, so a slot can
be given away at once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, Protocol

import torch

from runtime.config import LMConfig
from runtime.errors import GenerationError, RequestError
from runtime.stage0.prompt import check_prompt, prompt_ids
from runtime.stage0.sampling import check_sampling
from runtime.types import EndReason, SamplingParams, Stage0Prompt, TokenStep

AHEAD = 1  # steps launched beyond the one whose tokens are read
PIECE = 256  # positions of prompts read per step; pieces of a prompt begin at multiples of it, whoever else is there
BROKEN = -1  # the token of a row in which nothing could be drawn


class Launched(Protocol):
    """A step under way."""

    def tokens(self) -> list[int]:
        """One per row, waited for: ids of the head, or BROKEN."""
        ...


class Steps(Protocol):
    """Slots, and what advances them. Calls take effect in the order in which they are made."""

    slots: int
    positions: int  # of a slot

    def open(self, slot: int, token: int, position: int, sampling: SamplingParams, seed: int, min_tokens: int) -> None:
        """Makes a slot ready to step from this id at this position; those before it are read by `read`."""
        ...

    def read(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Reads pieces of prompts: slot, first position, ids; at most PIECE positions together."""
        ...

    def launch(self, slots: Sequence[int]) -> Launched:
        """The next token of each of these slots."""
        ...

    def describe(self) -> dict[str, str]: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Stream:
    """What one prompt carries from step to step."""

    key: int
    prompt: Stage0Prompt
    sampling: SamplingParams
    seed: int
    max_tokens: int
    slot: int = -1
    read: int = 0  # positions of the prompt that are in the slot
    launched: int = 0  # steps
    made: int = 0  # tokens that were given out
    gone: bool = False

    @property
    def to_read(self) -> int:
        """Positions before the last, which is the first step's input."""
        return len(self.prompt.text_tokens) + len(self.prompt.speech_tokens) + 1


class SlotStage0:
    """Stage0 over any `Steps`."""

    def __init__(self, config: LMConfig, steps: Steps) -> None:
        self._config, self._steps = config, steps
        self._free = list(range(steps.slots))
        heapify(self._free)  # the lowest first, so that few rows stay few
        self._live: dict[int, _Stream] = {}
        self._waiting: deque[_Stream] = deque()
        self._reading: deque[_Stream] = deque()
        self._speaking: list[_Stream] = []
        self._under_way: deque[tuple[Launched, list[_Stream]]] = deque()
        self._closed = False

    @property
    def live_streams(self) -> int:
        """Streams that were added and have neither ended nor been dropped."""
        return len(self._live)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def describe(self) -> dict[str, str]:
        return self._steps.describe()

    def add(self, key: int, prompt: Stage0Prompt, sampling: SamplingParams, seed: int) -> None:
        """Takes a prompt in. Raises RequestError for one that cannot be spoken; nothing is kept of it then."""
        assert key not in self._live, f"key {key} is live already"
        check_prompt(self._config, prompt)
        check_sampling(sampling)
        signed = (seed + 2**63) % 2**64 - 2**63  # as a table on the device holds it
        stream = _Stream(key, prompt, sampling, signed, prompt.max_tokens)
        room = self._steps.positions - stream.to_read - 1
        if room < 1:
            raise RequestError(
                f"the prompt takes {stream.to_read + 1} positions, a slot has {self._steps.positions}; "
                "shorten text or reference, or raise slot_positions"
            )
        stream.max_tokens = min(stream.max_tokens, room)
        self._live[key] = stream
        self._waiting.append(stream)

    @torch.inference_mode()
    def step(self) -> list[TokenStep]:
        """One token, or an end, of each stream that was in the oldest step under way."""
        self._read_prompts()
        while self._reading and not self._speaking and not self._under_way:
            self._read_prompts()  # nobody is held up
        self._launch()
        while len(self._under_way) <= AHEAD and self._launch():
            pass
        if not self._under_way:
            return []
        launched, streams = self._under_way.popleft()
        tokens = zip(streams, launched.tokens(), strict=False)
        return [self._advance(stream, token) for stream, token in tokens if not stream.gone]

    def drop(self, key: int) -> None:
        """Forgets a stream and frees its slot. Unknown and ended keys are fine."""
        stream = self._live.pop(key, None)
        if stream is None:
            return
        stream.gone = True
        for where in (self._waiting, self._reading, self._speaking):
            if stream in where:
                where.remove(stream)
        if stream.slot >= 0:
            heappush(self._free, stream.slot)

    def close(self) -> None:
        """Frees what the engine holds on its device; it makes nothing after that."""
        for key in list(self._live):
            self.drop(key)
        self._under_way.clear()
        if not self._closed:
            self._steps.close()
        self._closed = True

    def _read_prompts(self) -> None:
        """Reads as much of the prompts as fits beside one step; who is read to the end speaks from the next one on."""
        while self._waiting and self._free:
            stream = self._waiting.popleft()
            stream.slot = heappop(self._free)
            self._reading.append(stream)
        pieces: list[tuple[int, int, Sequence[int]]] = []
        left = PIECE
        while self._reading:
            stream = self._reading[0]
            ids = prompt_ids(self._config, stream.prompt)
            end = min(stream.read + PIECE, stream.to_read)
            if end - stream.read > left:
                break
            left -= end - stream.read
            pieces.append((stream.slot, stream.read, ids[stream.read : end]))
            if not stream.read:
                prompt = stream.prompt
                self._steps.open(stream.slot, ids[-1], stream.to_read, stream.sampling, stream.seed, prompt.min_tokens)
            stream.read = end
            if end < stream.to_read:
                break  # its next piece is a whole step's worth
            self._speaking.append(self._reading.popleft())
        if pieces:
            self._steps.read(pieces)

    def _launch(self) -> bool:
        """One more step of everybody who has tokens left to make; False when there is nobody."""
        streams = [stream for stream in self._speaking if stream.launched < stream.max_tokens]
        if not streams:
            return False
        for stream in streams:
            stream.launched += 1
        self._under_way.append((self._steps.launch([stream.slot for stream in streams]), streams))
        return True

    def _advance(self, stream: _Stream, token: int) -> TokenStep:
        """Gives a token out, and lets its stream leave when that ends it."""
        if token == BROKEN:
            self.drop(stream.key)
            reason = "every score is NaN, -inf or forbidden; a wider lm_precision may help"
            error = GenerationError(f"the language model cannot go on: {reason}")
            return TokenStep(stream.key, None, is_last=True, end=EndReason.ERROR, error=error)
        if token >= self._config.speech_tokens:
            self.drop(stream.key)
            return TokenStep(stream.key, None, is_last=True, end=EndReason.STOP)
        stream.made += 1
        if stream.made == stream.max_tokens:
            self.drop(stream.key)
            return TokenStep(stream.key, token, is_last=True, end=EndReason.LENGTH)
        return TokenStep(stream.key, token)


def early_ids(config: LMConfig, fidelity: Literal["intended", "official"]) -> tuple[int, int]:
    """First and one past the last id that must not come before min_tokens.

    The reference masks its first stop id alone, which ends nothing (spec 9.6); we mask all.
    """
    return (config.speech_tokens, config.rows) if fidelity == "intended" else (config.sos, config.sos + 1)
