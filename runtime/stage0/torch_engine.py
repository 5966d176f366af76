"""The reference engine of stage 0: the plain torch LM with a KV cache, many streams in one decode batch.

A step decodes one token of each live stream in one batch, then prefills waiting prompts one at a time, which gives each
its first token; only so many per step that those who speak already are not held up. Sampling runs on the CPU row by
row, with a generator per stream.

On a CPU a stream's logits do not depend on its neighbours: every row goes through the matrices by itself
(`row_steps.py`), and the cache is read in whole blocks of positions. A small model takes one core (`cores.py`).
Measured bit-equal with one and two threads. With three and more, elementwise kernels may cut a row between threads and
take a scalar path there: logits then differ by rounding (4e-7), which hardly ever changes a token. Elsewhere the module
runs, its batch filled up to whole blocks of rows, so that matrix kernels keep out of their paths for leftovers, which
sum in another order.
"""

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from runtime.cores import fits_one_core, one_core
from runtime.errors import GenerationError
from runtime.stage0.kv_cache import ROW_BLOCK, KVCache, round_up
from runtime.stage0.lm import SpeechLM
from runtime.stage0.prompt import check_prompt, embed_prompt, prompt_length
from runtime.stage0.row_steps import RowSteps
from runtime.stage0.sampling import check_sampling, draw
from runtime.types import EndReason, SamplingParams, Stage0Prompt, TokenStep

PREFILL_POSITIONS = 256  # read per step, or one prompt if that is longer; streams that speak wait for no more


@dataclass(slots=True, eq=False)
class _Stream:
    """What one prompt carries from step to step."""

    key: int
    prompt: Stage0Prompt
    sampling: SamplingParams
    generator: torch.Generator
    max_tokens: int
    length: int  # positions in the cache, once it has a row
    tokens: list[int] = field(default_factory=list)  # generated so far


class TorchStage0:
    """Stage0 on any torch device."""

    def __init__(
        self, lm: SpeechLM, max_streams: int = 64, fidelity: Literal["intended", "official"] = "intended"
    ) -> None:
        self._lm = lm.eval().requires_grad_(False)
        self._max_streams = max_streams
        weight = lm.speech_embedding.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._row_steps = RowSteps(lm) if self._device.type == "cpu" else None
        self._cores = one_core if fits_one_core(lm) else nullcontext
        self._cache = KVCache(lm.config.qwen, self._device, self._dtype)
        self._rows: list[_Stream] = []  # index is the row in the cache
        self._waiting: deque[_Stream] = deque()
        # Until min_tokens: the reference masks the first stop id alone, which ends nothing (spec 9.6); we mask all.
        stop_ids = torch.arange(lm.config.rows) >= lm.config.speech_tokens
        self._too_early = stop_ids if fidelity == "intended" else torch.arange(lm.config.rows) == lm.config.sos

    @property
    def live_streams(self) -> int:
        """Streams that were added and have neither ended nor been dropped."""
        return len(self._rows) + len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Memory held for the live streams' keys and values; 0 when there are none."""
        return self._cache.num_bytes

    def describe(self) -> dict[str, str]:
        return {
            "engine": "torch",
            "device": str(self._device),
            "precision": str(self._dtype).removeprefix("torch."),
            "sampling": "ras by two draws or standard, one generator per stream",
        }

    def add(self, key: int, prompt: Stage0Prompt, sampling: SamplingParams, seed: int) -> None:
        """Takes a prompt in. Raises RequestError for one that cannot be spoken; nothing is kept of it then."""
        assert key not in {stream.key for stream in (*self._rows, *self._waiting)}, f"key {key} is live already"
        check_prompt(self._lm.config, prompt)
        check_sampling(sampling)
        length = prompt_length(prompt)
        max_tokens = min(prompt.max_tokens, self._lm.config.qwen.max_position_embeddings - length)
        generator = torch.Generator().manual_seed(seed)
        self._waiting.append(_Stream(key, prompt, sampling, generator, max_tokens, length))

    @torch.inference_mode()
    def step(self) -> list[TokenStep]:
        """One token, or an end, of each live stream; a stream that ended is gone when this returns."""
        with self._cores():
            return self._step()

    def _step(self) -> list[TokenStep]:
        steps = self._decode()
        read = 0
        while self._waiting and len(self._rows) < self._max_streams:
            length = self._waiting[0].length
            if read and read + length > PREFILL_POSITIONS:
                break
            read += length
            steps.append(self._prefill(self._waiting.popleft()))
        return steps

    @torch.inference_mode()
    def drop(self, key: int) -> None:
        """Forgets a stream and frees its memory. Unknown and ended keys are fine."""
        self._waiting = deque(stream for stream in self._waiting if stream.key != key)
        for stream in self._rows:
            if stream.key == key:
                self._leave(stream)
                return

    def close(self) -> None:
        """Forgets every stream; the weights go with the engine."""
        for stream in (*self._waiting, *self._rows):
            self.drop(stream.key)

    def _prefill(self, stream: _Stream) -> TokenStep:
        try:
            row = self._cache.join(stream.length)
            self._rows.append(stream)
            hidden = self._lm(embed_prompt(self._lm, stream.prompt)[None], cache=self._cache.row(row, stream.length))
            logits = self._lm.logits(hidden[0, -1]).cpu()
        except torch.OutOfMemoryError as full:
            error = GenerationError(f"no memory for a prompt of {stream.length} positions; lower max_streams ({full})")
            return self._fail(stream, error)
        return self._advance(stream, logits)

    def _decode(self) -> list[TokenStep]:
        """The next token of every stream. Where memory does not last, the longest give way to the others."""
        failed: list[TokenStep] = []
        while self._rows:
            try:
                logits = self._score()
            except torch.OutOfMemoryError as full:
                longest = max(self._rows, key=lambda stream: stream.length)
                reason = f"no memory for a stream of {longest.length} positions; lower max_streams ({full})"
                failed.append(self._fail(longest, GenerationError(reason)))
                continue
            streams = list(self._rows)
            for stream in streams:
                stream.length += 1
            return failed + [self._advance(stream, row) for stream, row in zip(streams, logits, strict=False)]
        return failed

    def _score(self) -> Tensor:
        """Logits [rows, V] after each stream's last token, which joins the cache; doing it again changes nothing."""
        rows = len(self._rows) if self._row_steps else round_up(len(self._rows), ROW_BLOCK)
        filler = [0] * (rows - len(self._rows))
        tokens = torch.tensor([stream.tokens[-1] for stream in self._rows] + filler, device=self._device)
        positions = torch.tensor([stream.length for stream in self._rows] + filler, device=self._device)
        cache = self._cache.view(1 + max(stream.length for stream in self._rows))
        if self._row_steps:
            return self._row_steps.logits(tokens, positions, cache)
        hidden = self._lm(self._lm.speech_embedding(tokens)[:, None], positions[:, None], cache)
        return self._lm.logits(hidden[:, 0]).cpu()  # the one copy to the host

    def _advance(self, stream: _Stream, logits: Tensor) -> TokenStep:
        """Draws a stream's next token from logits [V]; lets it leave when that ends it."""
        forbidden = self._too_early if len(stream.tokens) < stream.prompt.min_tokens else None
        try:
            token = draw(logits, stream.tokens, stream.sampling, stream.generator, forbidden)
        except GenerationError as error:
            return self._fail(stream, error)
        if token >= self._lm.config.speech_tokens:
            self._leave(stream)
            return TokenStep(stream.key, None, is_last=True, end=EndReason.STOP)
        stream.tokens.append(token)
        if len(stream.tokens) == stream.max_tokens:
            self._leave(stream)
            return TokenStep(stream.key, token, is_last=True, end=EndReason.LENGTH)
        return TokenStep(stream.key, token)

    def _fail(self, stream: _Stream, error: GenerationError) -> TokenStep:
        if stream in self._rows:
            self._leave(stream)
        return TokenStep(stream.key, None, is_last=True, end=EndReason.ERROR, error=error)

    def _leave(self, stream: _Stream) -> None:
        row = self._rows.index(stream)
        last = self._rows.pop()
        if last is not stream:
            self._rows[row] = last
        self._cache.leave(row)
