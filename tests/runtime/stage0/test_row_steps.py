"""Decoding on a CPU: the module's numbers, and the same bits alone and in company."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.config import LMConfig
from runtime.stage0.kv_cache import KVCache
from runtime.stage0.lm import LayerCache, SpeechLM
from runtime.stage0.row_steps import RowSteps
from tests.runtime.stage0.models import golden_config, seeded_lm

LENGTHS = (4, 9, 31, 2, 17, 60, 5, 44, 12, 1, 23)


def demo_shape() -> LMConfig:
    """Widths of the bundled checkpoint, at which matrix libraries choose other kernels than at those of a test."""
    tiny = golden_config()
    qwen = replace(
        tiny.qwen,
        vocab_size=8,
        hidden_size=320,
        intermediate_size=1024,
        num_attention_heads=5,
        num_key_value_heads=1,
        num_hidden_layers=2,
    )
    return replace(tiny, qwen=qwen)


def lively(config: LMConfig) -> SpeechLM:
    torch.manual_seed(5)
    return SpeechLM(config).eval().requires_grad_(False)


def written(lm: SpeechLM, lengths: tuple[int, ...]) -> list[LayerCache]:
    """A cache whose rows hold random keys and values up to their lengths, and room for one more."""
    cache, generator = KVCache(lm.config.qwen, torch.device("cpu"), torch.float32), torch.Generator().manual_seed(1)
    for row, length in enumerate(lengths):
        cache.join(length + 1)
        for half in (half for layer in cache.row(row, length) for half in layer):
            half.copy_(torch.randn(half.shape, generator=generator))
    return cache.view(1 + max(lengths))


def inputs(lm: SpeechLM, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(len(lengths)) * 7 % lm.config.speech_tokens
    return tokens, torch.tensor(lengths)


@pytest.mark.parametrize("build", [seeded_lm, lambda: lively(demo_shape())], ids=["tiny", "demo"])
@torch.inference_mode()
def test_logits_and_cache_are_those_of_the_module(build):
    lm = build()
    tokens, positions = inputs(lm, LENGTHS)
    theirs, ours = written(lm, LENGTHS), written(lm, LENGTHS)
    hidden = lm(lm.speech_embedding(tokens)[:, None], positions[:, None], theirs)
    expected = lm.logits(hidden[:, 0])
    found = RowSteps(lm).logits(tokens, positions, ours)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for (keys, values), (their_keys, their_values) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(keys, their_keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, their_values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build", [seeded_lm, lambda: lively(demo_shape())], ids=["tiny", "demo"])
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_among_others(build):
    """Trap 9, and not by luck of a kernel: no product takes more than one row."""
    lm = build()
    steps, (tokens, positions) = RowSteps(lm), inputs(lm, LENGTHS)
    together = steps.logits(tokens, positions, written(lm, LENGTHS))
    for row in range(len(LENGTHS)):
        cache = [(keys[row : row + 1].clone(), values[row : row + 1].clone()) for keys, values in written(lm, LENGTHS)]
        alone = steps.logits(tokens[row : row + 1], positions[row : row + 1], cache)
        assert torch.equal(alone[0], together[row]), row


@torch.inference_mode()
def test_nan_of_a_neighbour_is_not_seen():
    """Trap 43: neither in its input nor in its keys and values."""
    lm = seeded_lm()
    lm.speech_embedding.weight.data[7] = torch.nan
    tokens, positions = inputs(lm, LENGTHS[:3])  # the second one is token 7
    found = RowSteps(lm).logits(tokens, positions, written(lm, LENGTHS[:3]))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_weights_are_shared_with_the_module():
    """q, k and v become views of one matrix: nothing lies in memory twice, and the module sees what the steps see."""
    lm = seeded_lm()
    before = {name: weight.clone() for name, weight in lm.state_dict().items()}
    steps = RowSteps(lm)
    for name, weight in lm.state_dict().items():
        assert torch.equal(weight, before[name]), name
    attention = lm.backbone.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == steps._qkv[0][0].untyped_storage().data_ptr()
