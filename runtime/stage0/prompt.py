"""Lays out text and reference tokens as the language model's input (spec 3.2).

`[sos | text | task | reference speech]` as embeddings [L, D]: text through the text table, the rest through the speech
table, whose control rows the ids of LMConfig name.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.config import LMConfig
from runtime.errors import RequestError
from runtime.stage0.lm import SpeechLM
from runtime.types import Stage0Prompt


def prompt_length(prompt: Stage0Prompt) -> int:
    """Positions the prompt takes: its tokens, and one each for sos and task."""
    return len(prompt.text_tokens) + len(prompt.speech_tokens) + 2


def check_prompt(config: LMConfig, prompt: Stage0Prompt) -> None:
    """Raises RequestError for what the model cannot read: ids outside their table, no room, no token to make."""
    _check_ids("text", prompt.text_tokens, config.qwen.vocab_size)
    _check_ids("reference speech", prompt.speech_tokens, config.speech_tokens)
    length, limit = prompt_length(prompt), config.qwen.max_position_embeddings
    if length >= limit:
        raise RequestError(f"the prompt takes {length} positions, the model has {limit}; shorten text or reference")
    if prompt.max_tokens < 1:
        raise RequestError(f"max_tokens is {prompt.max_tokens}; it must be at least 1")


def prompt_ids(config: LMConfig, prompt: Stage0Prompt) -> list[int]:
    """The same input as ids [L], for engines that look them up themselves; -1 - id stands for one of the text table."""
    text = [-1 - token for token in prompt.text_tokens.tolist()]
    return [config.sos, *text, config.task_id, *prompt.speech_tokens.tolist()]


def embed_prompt(lm: SpeechLM, prompt: Stage0Prompt) -> Tensor:
    """Embeddings [L, D] of a checked prompt, on the model's device and in its precision."""
    return lay_out(lm.config, lm.backbone.embed_tokens.weight, lm.speech_embedding.weight, prompt)


def lay_out(config: LMConfig, text: Tensor, speech: Tensor, prompt: Stage0Prompt) -> Tensor:
    """The same from the two tables alone, for engines that keep the rest of the model elsewhere."""
    device = speech.device
    sos, task = F.embedding(torch.tensor([config.sos, config.task_id], device=device), speech).split(1)
    said = F.embedding(prompt.text_tokens.to(device), text)
    return torch.cat((sos, said, task, F.embedding(prompt.speech_tokens.to(device), speech)))


def _check_ids(what: str, ids: Tensor, table: int) -> None:
    wrong = ids[(ids < 0) | (ids >= table)]
    if len(wrong):
        raise RequestError(
            f"{what} token id {int(wrong[0])} is outside 0..{table - 1}; does the tokenizer fit the model?"
        )
