"""Tiny language models for stage-0 tests: the golden one, a seeded one, and one whose next token is written by hand."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from runtime.checkpoint import load_strict
from runtime.config import LMConfig, QwenConfig, RasConfig
from runtime.stage0.lm import SpeechLM
from runtime.types import SamplingParams, Stage0Prompt, empty_tokens
from tests import golden

GREEDY = SamplingParams(temperature=0)
RAS = SamplingParams()
STANDARD = SamplingParams(method="standard", temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1)


def golden_config() -> LMConfig:
    notes = golden.meta("llm")
    return LMConfig(
        qwen=QwenConfig.from_json(notes["qwen2"]),
        speech_tokens=notes["speech_token_size"],
        extra_ids=notes["num_extra_ids"],
        ras=RasConfig(top_p=0.8, top_k=25, win_size=10, tau_r=0.1),
    )


def golden_weights() -> dict[str, Tensor]:
    """The golden weights under the released names. Rows that the fixtures never touch were cut; they are zero here."""
    weights = golden.load("llm_tiny")
    kept, rows = weights.pop("kept_ids"), golden_config().rows
    for name in ("speech_embedding.weight", "llm_decoder.weight"):
        weights[name] = torch.zeros(rows, weights[name].shape[1]).index_copy(0, kept, weights[name])
    weights["llm.model.lm_head.weight"] = weights["llm.model.model.embed_tokens.weight"]
    return weights


def golden_lm() -> SpeechLM:
    lm = SpeechLM(golden_config())
    load_strict(lm, "llm", golden_weights())
    return lm.eval()


def golden_prompt(case: str) -> Stage0Prompt:
    """The prompt of a golden case. Only zero-shot has reference speech; the others keep the part up to the marker."""
    tensors, notes = golden.load("llm_io"), golden.meta("llm")
    before, limits = tensors["prompt_text"][0], notes["cases"][case]
    if case != "zero_shot":
        before = before[: before.tolist().index(notes["endofprompt_token_id"]) + 1]
    return prompt(
        text=torch.cat((before, tensors["text"][0])),
        speech=tensors["prompt_speech_token"][0] if case == "zero_shot" else None,
        min_tokens=limits["min_len"],
        max_tokens=limits["max_len"],
    )


def seeded_lm(seed: int = 0) -> SpeechLM:
    """Every weight random and lively enough that sampling has many choices and history matters."""
    config = golden_config()
    lm = SpeechLM(replace(config, speech_tokens=301, extra_ids=20))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if name.endswith("norm.weight"):
                continue
            scale = 1.0 if "embed" in name else 2.5 * weight.shape[-1] ** -0.5
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return lm.eval()


def chain_lm(after: Mapping[int, tuple[int, ...]]) -> SpeechLM:
    """A real model with weights set by hand: after token a come the ids of `after[a]`, the first by far the likeliest.

    The key for the first token is the task id. Attention and MLP add nothing, so each input is its own direction.
    """
    lm = SpeechLM(golden_config())
    with torch.no_grad():
        for weight in lm.parameters():
            weight.zero_()
        for norm in (module for module in lm.modules() if isinstance(module, torch.nn.RMSNorm)):
            norm.weight.fill_(1)
        for axis, (token, followers) in enumerate(after.items()):
            lm.speech_embedding.weight[token, axis] = 1
            for rank, follower in enumerate(followers):
                lm.llm_decoder.weight[follower, axis] = 10 / (1 + rank)
    return lm.eval()


def prompt(
    text: list[int] | Tensor | None = None,
    speech: list[int] | Tensor | None = None,
    min_tokens: int = 0,
    max_tokens: int = 20,
) -> Stage0Prompt:
    """A prompt of two text tokens if nothing else is said."""
    return Stage0Prompt(
        text_tokens=torch.as_tensor([3, 4] if text is None else text).long(),
        speech_tokens=empty_tokens() if speech is None else torch.as_tensor(speech).long(),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
    )


def widened(lm: SpeechLM) -> SpeechLM:
    """The same function with heads twice as wide and zeros in what is new.

    Some attention kernels know no head narrower than 32. A head's element i turns with the frequency of element 2i in
    the wide one; scores are divided by a larger root, and norms average over twice as many values: weights make up.
    """
    config = lm.config
    qwen = replace(config.qwen, hidden_size=2 * config.qwen.hidden_size, rms_norm_eps=config.qwen.rms_norm_eps / 2)
    wide = SpeechLM(replace(config, qwen=qwen))
    half = config.qwen.head_dim // 2
    spread = torch.cat((torch.arange(half) * 2, torch.arange(half) * 2 + 2 * half))  # places of a narrow head

    def heads(count: int) -> Tensor:
        return (torch.arange(count)[:, None] * 4 * half + spread).flatten()

    places = {"q_proj": heads(qwen.num_attention_heads)}
    places |= dict.fromkeys(("k_proj", "v_proj"), heads(qwen.num_key_value_heads))
    with torch.no_grad():
        for (name, new), old in zip(wide.named_parameters(), lm.parameters(), strict=True):
            new.zero_()
            kind = next((kind for kind in places if kind in name), None)
            scale = 2**0.5 if kind == "q_proj" else 2**-0.5 if name.endswith("norm.weight") else 1.0
            rows = torch.arange(len(old)) if kind is None else places[kind]
            if old.dim() == 1:
                new[rows] = scale * old
            else:
                columns = places["q_proj"] if "o_proj" in name else torch.arange(old.shape[1])
                new[rows[:, None], columns] = scale * old
    return wide.eval()
