"""The language model inside vLLM, in this process and on the caller's thread.

vLLM batches, schedules, keeps keys and values and captures graphs; everything that decides a token is ours. A logits
processor computes the law of each row (`laws.py`), picks an id by a number that hangs on (seed, position) alone, and
leaves vLLM that one id; so streams have no generator, sampling waits for nothing, and a version of vLLM cannot change
it. `base.py` says which versions are served and checks that before this file is imported.
"""

import gc
import os

# vLLM takes these by variable only, and reads them when it is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no engine subprocess: add and step are plain calls
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the second runner takes no logits processors of this kind
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # its own handler writes to stdout, where `say` streams sound
os.environ["VLLM_NO_USAGE_STATS"] = "1"  # otherwise it reports to its makers
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it would be compiled, for two minutes, before the first token

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import vllm
from torch import Tensor
from vllm import EngineArgs, LLMEngine
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from runtime.config import LMConfig
from runtime.errors import EngineUnavailable, GenerationError
from runtime.stage0.laws import Laws, next_token_law, pick, uniform
from runtime.stage0.lm import SpeechLM
from runtime.stage0.prompt import check_prompt, lay_out, prompt_length
from runtime.stage0.qwen_export import export_qwen2
from runtime.stage0.sampling import check_sampling
from runtime.types import EndReason, SamplingParams, Stage0Prompt, TokenStep, empty_tokens

OURS = "mynah"  # our corner of vLLM's dictionaries
STEP_TOKENS = 2048  # prompt positions a step takes in beside its decodes; running streams wait no longer than for these
CPU_POSITIONS = 1024  # per stream: room for keys and values on the CPU, where no share of a GPU's memory sets it


@dataclass(frozen=True, slots=True)
class TokenIds:
    """What ids mean. All stop ids are alike, so only two are ever drawn: an end, and a row beyond repair."""

    speech: int  # ids below are sound, those from here up end a stream
    end: int
    broken: int
    early: tuple[int, int]  # first and one past the last id that must not come before min_tokens

    @classmethod
    def of(cls, config: LMConfig, fidelity: Literal["intended", "official"]) -> "TokenIds":
        # The reference masks its first stop id alone, which ends nothing (spec 9.6); we mask all.
        early = (config.speech_tokens, config.rows) if fidelity == "intended" else (config.sos, config.sos + 1)
        return cls(config.speech_tokens, config.eos, config.rows - 1, early)


@dataclass(slots=True, eq=False)
class _Stream:
    """What one prompt carries from step to step."""

    max_tokens: int
    made: int = 0


class VllmStage0:
    """Stage0 on what the installed vLLM drives: one GPU, or the CPU."""

    def __init__(
        self,
        lm: SpeechLM,
        device: torch.device,
        cache: Path,
        max_streams: int = 64,
        fidelity: Literal["intended", "official"] = "intended",
        memory_share: float = 0.2,
        tokens_per_output: int = 1,
        eager: bool = False,
    ) -> None:
        """Exports the model into `cache` unless it is there, starts vLLM on it and lets it speak once.

        `memory_share` is the part of the GPU's memory that vLLM takes; more `tokens_per_output` save some work per
        token and cost waiting; `eager` starts in seconds, without compiling or capturing, and steps slowly.
        """
        check_device(device)
        self._config, self._ids = lm.config, TokenIds.of(lm.config, fidelity)
        self._text = lm.backbone.embed_tokens.weight.detach().cpu()
        self._speech = lm.speech_embedding.weight.detach().cpu()
        self._stop_ids = list(range(lm.config.speech_tokens, lm.config.rows))
        self._live: dict[int, _Stream] = {}
        try:
            folder = export_qwen2(lm, cache)
        except OSError as refused:
            raise EngineUnavailable(
                f"the model cannot be written to {cache} ({refused}); set export_folder"
            ) from refused
        memory: dict[str, Any] = {"gpu_memory_utilization": memory_share}
        if device.type == "cpu":
            memory = {"kv_cache_memory_bytes": cache_bytes(lm, max_streams)}
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            generation_config="vllm",  # no defaults but ours
            dtype=str(self._speech.dtype).removeprefix("torch."),
            enable_prompt_embeds=True,
            max_model_len=lm.config.qwen.max_position_embeddings,
            max_num_seqs=max_streams,
            max_num_batched_tokens=max(STEP_TOKENS, max_streams),
            enable_prefix_caching=False,  # prompts differ from their second position on
            async_scheduling=False,  # a draw must know the tokens before it
            stream_interval=tokens_per_output,
            enforce_eager=eager or device.type == "cpu",
            disable_log_stats=True,
            logits_processors=[f"{Draws.__module__}:{Draws.__qualname__}"],
            additional_config={OURS: asdict(self._ids)},  # plain values: vLLM hashes them as JSON
            **memory,
        )
        try:
            self._engine: Any = LLMEngine.from_engine_args(arguments)  # None once closed
            self._compare()
            self._probe()
        except (RuntimeError, ValueError) as reason:
            raise EngineUnavailable(f"vLLM {vllm.__version__} cannot run this model here: {reason}") from reason

    @property
    def live_streams(self) -> int:
        """Streams that were added and have neither ended nor been dropped."""
        return len(self._live)

    def describe(self) -> dict[str, str]:
        return {
            "engine": "vllm",
            "version": vllm.__version__,
            "device": current_platform.device_type,
            "precision": str(self._speech.dtype).removeprefix("torch."),
            "sampling": "ras in closed form or standard, by seed and position",
        }

    def add(self, key: int, prompt: Stage0Prompt, sampling: SamplingParams, seed: int) -> None:
        """Takes a prompt in. Raises RequestError for one that cannot be spoken; nothing is kept of it then."""
        assert key not in self._live, f"key {key} is live already"
        check_prompt(self._config, prompt)
        check_sampling(sampling)
        room = self._config.qwen.max_position_embeddings - prompt_length(prompt)
        max_tokens = min(prompt.max_tokens, room)
        draw = Draw(sampling, seed, prompt.min_tokens)
        embeddings = lay_out(self._config, self._text, self._speech, prompt)
        self._engine.add_request(str(key), {"prompt_embeds": embeddings}, self._params(draw, max_tokens))
        self._live[key] = _Stream(max_tokens)

    def step(self) -> list[TokenStep]:
        """The tokens, or ends, that one step of vLLM gave; a stream that ended is gone when this returns."""
        steps: list[TokenStep] = []
        for output in self._engine.step() if self._live else []:
            key, said = int(output.request_id), output.outputs[0]
            steps += self._advance(key, said.token_ids, said.finish_reason)
        if any(step.error is not None for step in steps):
            self._engine.collective_rpc(scrub)
        return steps

    def drop(self, key: int) -> None:
        """Forgets a stream and frees its memory. Unknown and ended keys are fine."""
        if self._live.pop(key, None) is not None:
            self._engine.abort_request([str(key)])

    def close(self) -> None:
        """Stops vLLM, which gives its memory back; it sits in cycles of references, so these are collected."""
        if self._engine is None:
            return
        for key in list(self._live):
            self.drop(key)
        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        if current_platform.device_type == "cuda":
            torch.cuda.empty_cache()

    def _advance(self, key: int, tokens: Sequence[int], finished: str | None) -> list[TokenStep]:
        """Turns any number of new tokens into steps; lets the stream leave with the one that ends it."""
        steps: list[TokenStep] = []
        for token in tokens:
            stream = self._live.get(key)
            if stream is None:
                break
            stream.made += token < self._ids.speech
            if token == self._ids.broken:
                steps.append(failed(key, "every score is NaN, -inf or forbidden; a wider lm_precision may help"))
            elif token >= self._ids.speech:
                steps.append(TokenStep(key, None, is_last=True, end=EndReason.STOP))
            elif stream.made == stream.max_tokens:
                steps.append(TokenStep(key, token, is_last=True, end=EndReason.LENGTH))
            else:
                steps.append(TokenStep(key, token))
            if steps[-1].is_last:
                self._leave(key, finished)
        if finished is not None and key in self._live:
            steps.append(failed(key, f"vLLM ended the stream early ({finished})"))
            self._leave(key, finished)
        return steps

    def _leave(self, key: int, finished: str | None) -> None:
        if finished is None:  # vLLM would go on: it ends at no stop id that came too early
            self.drop(key)
        else:
            del self._live[key]

    def _params(self, draw: "Draw", max_tokens: int) -> VllmParams:
        return VllmParams(
            temperature=0,  # the processor leaves one id to choose from
            max_tokens=max_tokens,
            stop_token_ids=self._stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={OURS: draw},
        )

    def _compare(self) -> None:
        """What vLLM made of the export against the checkpoint's own numbers."""
        model, params = self._engine.vllm_config.model_config, self._params(Draw(SamplingParams(), 0, 0), 1)
        claims = {
            "key/value heads": (model.get_total_num_kv_heads(), self._config.qwen.num_key_value_heads),
            "ids": (model.get_vocab_size(), self._config.rows),
            "end id": (model.hf_config.eos_token_id, self._config.eos),
            "precision": (model.dtype, self._speech.dtype),
            "stop ids": (sorted(params.all_stop_token_ids), self._stop_ids),
        }
        wrong = [f"{name} {theirs}, not {ours}" for name, (theirs, ours) in claims.items() if theirs != ours]
        if wrong:
            raise ValueError("it reads other numbers than the checkpoint has: " + "; ".join(wrong))

    def _probe(self) -> None:
        """Says one token, so that what cannot run fails at load; kernels compile here and not in the first request."""
        prompt = Stage0Prompt(empty_tokens(), torch.tensor([0]), min_tokens=1, max_tokens=1)
        self.add(-1, prompt, SamplingParams(), 0)
        while self._live:
            for step in self.step():
                if step.error is not None:
                    raise ValueError(f"a probe ended with: {step.error}")


@dataclass(frozen=True, slots=True)
class Draw:
    """How one stream is drawn; travels to the processor with its request."""

    sampling: SamplingParams
    seed: int
    min_tokens: int


class Draws(LogitsProcessor):
    """Replaces each row of logits by the one id that its law and its number choose."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._ids = TokenIds(**vllm_config.additional_config[OURS])
        self._device, self._pinned = device, is_pin_memory
        self._rows: dict[int, tuple[Draw, list[int]]] = {}  # with the generated ids, a list that vLLM lengthens
        self._laws: Laws | None = None  # of the rows as they are, until a stream comes or goes

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows rows as vLLM joins, drops and moves them, in the order it asks for."""
        if batch_update is None:
            return
        self._laws = None
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, generated in batch_update.added:
            self._rows[row] = (params.extra_args[OURS], generated)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        rows, ids = [self._rows[row] for row in range(len(logits))], logits.shape[-1]
        if self._laws is None:
            self._laws = Laws.of([draw.sampling for draw, _ in rows], ids, self._device)
        windows = [said[-draw.sampling.window :] if draw.sampling.window else [] for draw, said in rows]
        early = self._column([len(said) < draw.min_tokens for draw, said in rows], torch.bool)[:, None]
        forbidden = torch.zeros_like(logits, dtype=torch.bool)
        forbidden[:, slice(*self._ids.early)] = early
        seen = None
        if any(draw.sampling.repetition_penalty != 1 for draw, _ in rows):
            said = self._padded([said for _, said in rows], ids)
            seen = torch.zeros(len(rows), ids + 1, dtype=torch.bool, device=self._device).scatter(-1, said, True)
            seen = seen[:, :ids]
        law, broken = next_token_law(logits, self._laws, self._padded(windows, ids), forbidden, seen)
        numbers = self._column([uniform(draw.seed, len(said)) for draw, said in rows], torch.float64)
        tokens = pick(law, numbers)
        tokens = tokens.masked_fill(tokens >= self._ids.speech, self._ids.end).masked_fill(broken, self._ids.broken)
        return logits.fill_(-torch.inf).scatter_(-1, tokens[:, None], 0.0)

    def _padded(self, lists: Sequence[list[int]], filler: int) -> Tensor:
        width = max(1, *map(len, lists))
        return self._column([ids + [filler] * (width - len(ids)) for ids in lists], torch.int64)

    def _column(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=self._pinned).to(self._device, non_blocking=True)


def failed(key: int, reason: str) -> TokenStep:
    error = GenerationError(f"the language model cannot go on: {reason}")
    return TokenStep(key, None, is_last=True, end=EndReason.ERROR, error=error)


def scrub(worker: Any) -> None:
    """Takes what is not finite out of vLLM's keys and values, before the blocks of a broken stream are used again.

    Attention multiplies leftovers by zero, and zero times NaN would be NaN in the next stream.
    """
    for cache in worker.model_runner.kv_caches:
        cache.nan_to_num_(0.0, 0.0, 0.0)


def check_device(device: torch.device) -> None:
    """Raises EngineUnavailable for a device that the installed vLLM does not drive."""
    theirs = current_platform.device_type or "nothing here"
    if device.type != theirs:
        raise EngineUnavailable(f"this build of vLLM drives {theirs}, not {device.type}; choose the torch engine")
    if device.index:
        raise EngineUnavailable(
            f"vLLM takes the first GPU, not {device}; set CUDA_VISIBLE_DEVICES={device.index} and choose cuda"
        )


def cache_bytes(lm: SpeechLM, max_streams: int) -> int:
    """Keys and values of that many streams of usual length, and of at least one of full length."""
    qwen, size = lm.config.qwen, lm.speech_embedding.weight.element_size()
    per_position = 2 * qwen.num_hidden_layers * qwen.num_key_value_heads * qwen.head_dim * size
    return per_position * max(qwen.max_position_embeddings + STEP_TOKENS, max_streams * CPU_POSITIONS)
