"""The speech LM against the official modules' numbers, and against itself without a cache."""

import pytest
import torch

from runtime.checkpoint import load_strict, released_name
from runtime.config import LMConfig, QwenConfig, RasConfig
from runtime.errors import CheckpointError
from runtime.stage0.kv_cache import KVCache
from runtime.stage0.lm import SpeechLM
from runtime.stage0.prompt import embed_prompt
from tests import golden
from tests.runtime.stage0.models import golden_config, golden_lm, golden_prompt, golden_weights, prompt, seeded_lm

CASES = ("zero_shot", "instruct2", "cross_lingual")


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_prompt_prefill_and_greedy_logits_match_the_reference(case):
    io, lm = golden.load("llm_io"), golden_lm()
    x = embed_prompt(lm, golden_prompt(case))[None]
    assert torch.equal(x, io[f"{case}.lm_input"])

    cache = KVCache(lm.config.qwen, torch.device("cpu"), torch.float32)
    row, length = cache.join(x.shape[1]), x.shape[1]
    hidden = lm(x, cache=cache.row(row, length))
    torch.testing.assert_close(hidden, io[f"{case}.prefill_hidden"], atol=2e-5, rtol=0)
    for token, expected in zip(io[f"{case}.greedy_tokens"], io[f"{case}.logits"], strict=True):
        logits = lm.logits(hidden[0, -1])
        torch.testing.assert_close(logits[io["kept_ids"]], expected, atol=2e-5, rtol=0)
        assert logits.argmax() == token
        hidden = lm(lm.speech_embedding(token)[None, None], torch.tensor([[length]]), cache.view(length + 1))
        length += 1


@torch.inference_mode()
def test_cached_decoding_equals_one_uncached_pass():
    lm = seeded_lm()
    x = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(1))
    cache = KVCache(lm.config.qwen, torch.device("cpu"), torch.float32)
    cache.join(20)
    hidden = [lm(x[:, :20], cache=cache.row(0, 20))]
    hidden += [lm(x[:, n : n + 1], torch.tensor([[n]]), cache.view(n + 1)) for n in range(20, 30)]
    torch.testing.assert_close(torch.cat(hidden, dim=1), lm(x), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_half_precision_weights_give_float32_logits():
    lm = golden_lm().to(torch.bfloat16)
    hidden = lm(embed_prompt(lm, prompt())[None])
    assert hidden.dtype == torch.bfloat16
    assert lm.logits(hidden).dtype == torch.float32


def test_full_size_model_has_the_released_names_and_shapes():
    """Trap 19: what the released file holds is what the module asks for, key by key."""
    manifest = golden.meta("manifest_full")["llm"]
    qwen = QwenConfig(151936, 896, 4864, 24, 14, 2, 32768, 1e6, 1e-6)
    with torch.device("meta"):
        lm = SpeechLM(LMConfig(qwen, 6561, 200, RasConfig(0.8, 25, 10, 0.1)))
    ours = {released_name("llm", name): list(weight.shape) for name, weight in lm.state_dict().items()}
    assert ours == {name: shape for name, shape, _ in manifest["tensors"] if name not in manifest["tied"]}
    assert sum(weight.numel() for weight in lm.parameters()) == manifest["num_elements_without_tied"]


def test_load_names_missing_unexpected_and_misshapen_weights():
    """Trap 19."""
    weights = golden_weights()
    del weights["llm.model.model.norm.weight"]
    weights["llm_decoder.bias"] = torch.zeros(6761)
    weights["llm.model.model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError) as error:
        load_strict(SpeechLM(golden_config()), "llm", weights)
    for problem in ("missing llm.model.model.norm.weight", "unexpected llm_decoder.bias", "up_proj.weight is [3, 3]"):
        assert problem in str(error.value)


def test_untied_head_is_refused():
    """Trap 19: the file's lm_head must equal the text embedding; inference never uses it."""
    weights = golden_weights()
    weights["llm.model.lm_head.weight"] = weights["llm.model.lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match="tied"):
        load_strict(SpeechLM(golden_config()), "llm", weights)
