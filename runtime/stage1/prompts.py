"""The finished blocks of each voice's prompt, solved once and kept (spec 4.4).

They hang on the voice alone, so that a first hop in a known voice evaluates the frames behind them and no other.
"""

import logging
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from runtime.errors import GenerationError
from runtime.stage1.conditioning import Flow
from runtime.stage1.host import on_host
from runtime.stage1.noise import NoiseBank
from runtime.stage1.past import Past, VoiceCache
from runtime.stage1.solver import Piece, Solved
from runtime.stage1.state import Stage1State, piece_of

if TYPE_CHECKING:  # base.py builds what stands on this file
    from runtime.stage1.base import FlowSolver

log = logging.getLogger(__name__)
KeyT = TypeVar("KeyT")
NOT_FINITE = "the flow gave NaN or infinite mel; this segment cannot go on"
AT_ONCE = 16  # new voices that are solved together: each may weigh some hundred megabytes


class Prompts:
    """The past of every voice that is asked for, out of a cache or newly solved."""

    def __init__(self, flow: Flow, solver: "FlowSolver", noise: NoiseBank, limit_bytes: int) -> None:
        self._flow, self._solver, self._noise = flow, solver, noise
        self.cache = VoiceCache(limit_bytes if solver.keeps_past else 0)

    def pasts(self, states: Sequence[Stage1State]) -> dict[str, Past | Exception]:
        """What is remembered of the prompts of these segments, by voice; new voices are solved first, together.

        By themselves though they are not to be kept: so a hop is the same computation, bit for bit, whether its voice
        is known, new, or too large to be kept.
        """
        voices: dict[str, Past | Exception] = {}
        new: dict[str, Piece] = {}
        fits: set[str] = set()
        for state in states:
            frames = self.frames(state)
            if not frames or state.voice in new:
                continue
            if past := self.cache.get(state.voice):
                voices[state.voice] = past
                continue
            if self.cache.make_room(self._solver.past_bytes(frames)):
                fits.add(state.voice)
            mu = self._flow.mu(state.prompt_tokens[None], is_last=False)
            new[state.voice] = piece_of(state, self._noise, mu, frames, chunked=True, keep=frames)
        for first in range(0, len(new), AT_ONCE):
            some = dict(islice(new.items(), first, first + AT_ONCE))
            for voice, solved in solve_apart(self._solver, some).items():
                voices[voice] = self._learn(voice, solved, voice in fits)
        return voices

    def frames(self, state: Stage1State) -> int:
        """How many frames of a prompt may be kept for its voice; 0 when nothing is."""
        config = self._flow.config
        tokens = len(state.prompt_tokens) - config.lookahead_tokens
        frames = min(config.mel_per_token * tokens, state.prompt_mel.shape[-1])
        frames -= frames % config.dit.chunk_frames
        return max(0, frames) if self.cache.limit_bytes else 0

    def _learn(self, voice: str, solved: Solved | Exception, fits: bool) -> Past | Exception:
        """The past of a voice, or the error of all chunks in this voice."""
        if isinstance(solved, Exception):
            return solved
        if solved.past is None or not on_host(solved.mel.isfinite().all()):
            return GenerationError(NOT_FINITE)
        if fits:
            self.cache.put(voice, solved.past)
        return solved.past


def solve_apart(solver: "FlowSolver", pieces: dict[KeyT, Piece]) -> dict[KeyT, Solved | Exception]:
    """All in one solve. When that fails each is tried by itself, so that only the guilty end."""
    if not pieces:
        return {}
    try:
        return dict(zip(pieces, solver.solve(list(pieces.values())), strict=True))
    except Exception as error:  # e.g. out of memory
        log.exception("a solve of %d pieces failed", len(pieces))
        if len(pieces) == 1:
            return dict.fromkeys(pieces, error)
    alone: dict[KeyT, Solved | Exception] = {}
    for key, piece in pieces.items():
        alone |= solve_apart(solver, {key: piece})
    return alone
