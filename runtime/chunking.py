"""What happens to speech tokens between the stages: which are kept, and where they are cut (spec 3.5, 6.2).

Pure bookkeeping on token counts. A cut depends on how many tokens there are, never on when they came, so that a stream
sounds the same on a slow and on a fast machine.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from runtime.errors import RequestError

HopPlan = Literal["latency", "throughput"]


class SilenceThinner:
    """Keeps the first five of a run of silent tokens and drops the rest (spec 3.5). One per sentence."""

    KEPT = 5

    def __init__(self, silent_tokens: Set[int]) -> None:
        self._silent = silent_tokens
        self._run = 0

    def keeps(self, token: int) -> bool:
        self._run = self._run + 1 if token in self._silent else 0
        return self._run <= self.KEPT


@dataclass(frozen=True, slots=True)
class Cut:
    """Hand the tokens [0, tokens) of a segment to stage 1; unless it is the last, they end in the look-ahead."""

    tokens: int
    is_last: bool
    is_extra: bool = False  # taken for want of sound: not where the count alone would have cut


class ChunkSchedule:
    """How many tokens to wait for, chunk after chunk. One per segment.

    `latency` is the official loop: 25 + pad, 50, 100, 100, ..., then the rest. `throughput` takes the same first hop
    and then everything, as each further hop solves again what was solved before; only what passes `cap_tokens` is cut
    there, so that a long sentence does not let its listener wait. A caller who sees that the listener will run dry may
    ask for what there is: then the stream is cut where its clock said so, and no longer sounds as it would alone.

    The first chunk is longer by `pad`, which brings prompt and emitted tokens onto the 25-token grid of the streaming
    mask (spec 4.4); from there every hop is a multiple of the grid. The hop lives here and not in the model, so that
    every stream starts small again (spec 9.26).
    """

    def __init__(
        self,
        prompt_tokens: int,
        *,
        hops: HopPlan = "latency",
        grid: int = 25,
        lookahead: int = 3,
        first_hop: int | None = None,
        cap_tokens: int | None = None,
        streaming: bool = True,
    ) -> None:
        hop = grid if first_hop is None else first_hop
        limit = 4 * grid if cap_tokens is None else cap_tokens
        for tokens in (hop, limit):
            if tokens < grid or tokens % grid:
                raise RequestError(f"a hop of {tokens} tokens is off the grid; choose a multiple of {grid}")
        self._grid = grid
        self._lookahead = lookahead
        self._hop = hop
        self._hop_limit = limit
        self._hops = hops
        self._pad = -prompt_tokens % grid
        self._streaming = streaming
        self._emitted = 0
        self._further = False  # a second hop was taken
        self._done = False

    @property
    def hops_again(self) -> bool:
        """Whether another hop is likelier than the rest: with `throughput` only in what is long already."""
        return self._hops == "latency" or self._further

    def next(self, available: int, finished: bool, *, is_urgent: bool = False) -> Cut | None:
        """The next cut, when `available` tokens allow one; None to wait, and after the last.

        `is_urgent` takes whole steps of the grid, however few, instead of waiting for a hop; never as the first.
        """
        if self._done:
            return None
        hop = self._hop + (self._pad if self._emitted == 0 else 0)
        ready = available - self._emitted - self._lookahead
        is_extra = is_urgent and not finished and self._emitted > 0 and self._grid <= ready < hop
        if is_extra:
            hop = ready - ready % self._grid
        if self._streaming and ready >= hop:
            self._further = self._emitted > 0
            self._emitted += hop
            if not is_extra:
                self._hop = self._hop_limit if self._hops == "throughput" else min(self._hop_limit, 2 * self._hop)
            return Cut(self._emitted + self._lookahead, is_last=False, is_extra=is_extra)
        if not finished:
            return None
        self._done = True
        return Cut(available, is_last=True)
