"""Steps of the plain module, without graphs or kernels of ours: the books of `slot_engine.py` on any machine.

The numbers of a row are kept from its neighbours as in `torch_engine.py`: rows and visible positions come in whole
blocks. Slots are rows of one cache; those that nobody uses are filler.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.stage0.kv_cache import POSITION_BLOCK, ROW_BLOCK, round_up
from runtime.stage0.laws import Laws, philox, two_draws
from runtime.stage0.lm import LayerCache, SpeechLM
from runtime.stage0.slot_engine import BROKEN, early_ids
from runtime.types import SamplingParams


@dataclass(slots=True, eq=False)
class _Slot:
    sampling: SamplingParams
    seed: int
    min_tokens: int
    token: int  # the next input, as `prompt_ids` names it
    position: int
    said: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is over when it is launched."""

    made: list[int]

    def tokens(self) -> list[int]:
        return self.made


class PlainSteps:
    """Slots on any torch device."""

    def __init__(
        self, lm: SpeechLM, slots: int, positions: int, fidelity: Literal["intended", "official"] = "intended"
    ) -> None:
        self._lm = lm.eval().requires_grad_(False)
        self.slots, self.positions = slots, min(positions, lm.config.qwen.max_position_embeddings)
        self._early = early_ids(lm.config, fidelity)
        weight, qwen = lm.speech_embedding.weight, lm.config.qwen
        self._device, self._dtype = weight.device, weight.dtype
        room = round_up(self.positions, POSITION_BLOCK)
        shape = (2, round_up(slots, ROW_BLOCK), qwen.num_key_value_heads, room, qwen.head_dim)
        self._layers = [
            torch.empty(shape, device=self._device, dtype=self._dtype) for _ in range(qwen.num_hidden_layers)
        ]
        self._open: dict[int, _Slot] = {}

    def describe(self) -> dict[str, str]:
        return {
            "engine": "captured, without graphs",
            "device": self._device.type,
            "precision": str(self._dtype).removeprefix("torch."),
            "sampling": "ras by two draws or standard, by seed and position",
        }

    def open(self, slot: int, token: int, position: int, sampling: SamplingParams, seed: int, min_tokens: int) -> None:
        for layer in self._layers:
            layer[:, slot] = 0  # attention multiplies what it does not see by zero, and a leftover NaN stays NaN
        self._open[slot] = _Slot(sampling, seed, min_tokens, token, position)

    def read(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        for slot, start, ids in pieces:
            end = start + len(ids)
            positions = torch.arange(start, end, device=self._device)[None]
            self._lm(self._embed(ids)[None], positions, self._view(slice(slot, slot + 1), end))

    def launch(self, slots: Sequence[int]) -> Done:
        rows = round_up(1 + max(slots), ROW_BLOCK)
        tokens, positions = [0] * rows, [0] * rows
        for slot, state in self._open.items():  # one that takes no part writes where its own next step will write again
            if slot < rows:
                tokens[slot], positions[slot] = state.token, state.position
        at = torch.tensor(positions, device=self._device)[:, None]
        hidden = self._lm(self._embed(tokens)[:, None], at, self._view(slice(0, rows), 1 + max(positions)))
        logits = self._lm.logits(hidden[:, 0])
        made = self._draw(logits[list(slots)], [self._open[slot] for slot in slots])
        for slot, token in zip(slots, made, strict=True):
            state = self._open[slot]
            state.token, state.position = max(token, 0), min(state.position + 1, self.positions - 1)
            state.said.append(token)
        return Done(made)

    def close(self) -> None:
        self._layers.clear()
        self._open.clear()

    def _embed(self, ids: Sequence[int]) -> Tensor:
        """Embeddings [L, D] of ids as `prompt_ids` names them."""
        tokens = torch.tensor(ids, device=self._device)
        speech = F.embedding(tokens.clamp_min(0), self._lm.speech_embedding.weight)
        text = F.embedding((-1 - tokens).clamp_min(0), self._lm.backbone.embed_tokens.weight)
        return torch.where((tokens < 0)[:, None], text, speech)

    def _view(self, rows: slice, positions: int) -> list[LayerCache]:
        end = round_up(positions, POSITION_BLOCK)
        return [(layer[0, rows, :, :end], layer[1, rows, :, :end]) for layer in self._layers]

    def _draw(self, logits: Tensor, states: Sequence[_Slot]) -> list[int]:
        ids = logits.shape[-1]
        laws = Laws.of([state.sampling for state in states], ids, self._device)
        width = max(1, *(state.sampling.window for state in states))
        recent = torch.full((len(states), width), ids)
        seen = torch.zeros(len(states), ids, dtype=torch.bool)
        early = torch.zeros(len(states), ids, dtype=torch.bool)
        for row, state in enumerate(states):
            window = state.said[-state.sampling.window :] if state.sampling.window else []
            recent[row, : len(window)] = torch.tensor(window, dtype=torch.long)
            seen[row, [token for token in state.said if token >= 0]] = True
            early[row, slice(*self._early)] = len(state.said) < state.min_tokens
        seeds = torch.tensor([state.seed for state in states])
        numbers = philox(seeds, torch.tensor([len(state.said) for state in states]))
        device = self._device
        tokens, broken = two_draws(
            logits, laws, recent.to(device), early.to(device), seen.to(device), numbers.to(device)
        )
        return tokens.masked_fill(broken, BROKEN).tolist()
