"""Choosing and loading an engine."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoint import Checkpoint
from runtime.config import ModelConfig
from runtime.errors import CheckpointError, EngineUnavailable
from runtime.settings import EngineSettings
from runtime.stage0.base import build_stage0, check_vllm, installed_vllm, load_lm
from tests import golden
from tests.runtime.stage0.models import GREEDY, golden_config, golden_prompt, golden_weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """A folder with the golden language model; stage 0 looks at nothing else."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    save_file({name: weight.clone() for name, weight in golden_weights().items()}, folder / "llm.safetensors")
    config = ModelConfig(24000, 25, 192, 25, golden_config(), None, None, None, frozenset())
    return Checkpoint(folder, config, "llm", "fingerprint")


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_engine_is_built_from_a_checkpoint_and_speaks(checkpoint, choice):
    engine = build_stage0(checkpoint, EngineSettings(stage0=choice, fidelity="official", max_streams=3), CPU)
    assert engine.describe() == {
        "engine": "torch",
        "device": "cpu",
        "precision": "float32",
        "sampling": "ras by two draws or standard, one generator per stream",
    }
    engine.add(0, golden_prompt("zero_shot"), GREEDY, 0)
    assert [engine.step()[0].token for _ in range(16)] == golden.load("llm_io")["zero_shot.greedy_tokens"].tolist()


def test_unknown_engine_is_refused_with_the_way_out(checkpoint):
    with pytest.raises(EngineUnavailable, match="'onnx'; choose auto or torch or captured or vllm"):
        EngineSettings(stage0="onnx")


@pytest.mark.skipif(installed_vllm() is not None, reason="vLLM is installed")
def test_missing_vllm_is_refused_with_the_extra_to_install(checkpoint):
    with pytest.raises(
        EngineUnavailable, match=r"install the `vllm` extra \(version 0\.23 or newer and older than 0\.31\)"
    ):
        build_stage0(checkpoint, EngineSettings(stage0="vllm"), CPU)


@pytest.mark.parametrize("found", ["0.23.0", "0.25.1.post1", "0.30.0", "0.30.2+cpu"])
def test_versions_of_vllm_that_are_served(found):
    check_vllm(found)


@pytest.mark.parametrize("found", ["0.9.0", "0.22.1", "0.31.0rc1", "1.0.0", "dev"])
def test_other_versions_of_vllm_are_refused_with_the_range(found):
    with pytest.raises(EngineUnavailable) as error:
        check_vllm(found)
    assert f"vLLM {found} is not served" in str(error.value)
    assert "version 0.23 or newer and older than 0.31" in str(error.value)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.0, math.nan])
def test_meaningless_share_of_memory_is_refused(share):
    with pytest.raises(EngineUnavailable, match="stage0_memory_share"):
        EngineSettings(stage0_memory_share=share)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_precision_that_was_asked_for_is_what_runs_and_what_is_told(checkpoint, precision):
    """Trap 22. An unknown precision is refused by EngineSettings itself."""
    engine = build_stage0(checkpoint, EngineSettings(lm_precision=precision), CPU)
    assert engine.describe()["precision"] == precision
    lm = load_lm(golden_config(), golden_weights(), getattr(torch, precision), CPU)
    assert {weight.dtype for weight in lm.parameters()} == {getattr(torch, precision)}
    engine.add(0, golden_prompt("zero_shot"), GREEDY, 0)
    assert engine.step()[0].error is None


def test_unknown_precision_is_refused():
    """Trap 22."""
    with pytest.raises(EngineUnavailable, match="int4"):
        EngineSettings(lm_precision="int4")


def test_key_value_heads_of_the_nested_config_are_held_to_the_weights():
    """Trap 18: the error names both places."""
    config = golden_config()
    config = replace(config, qwen=replace(config.qwen, num_key_value_heads=4))
    with pytest.raises(CheckpointError) as error:
        load_lm(config, golden_weights(), torch.float32, CPU)
    assert "k_proj.weight has 32 rows" in str(error.value)
    assert "num_key_value_heads 4 x head_dim 16 of the nested config.json makes 64" in str(error.value)


@pytest.mark.parametrize("change", [{"speech_tokens": 6560}, {"extra_ids": 3}])
def test_number_of_speech_and_stop_ids_is_held_to_the_weights(change):
    """Trap 12: stop ids follow from this one number, and a wrong one is found at load."""
    with pytest.raises(CheckpointError) as error:
        load_lm(replace(golden_config(), **change), golden_weights(), torch.float32, CPU)
    assert "speech_embedding.weight has 6761 rows" in str(error.value)
    assert "llm_decoder.weight has 6761 rows" in str(error.value)


def test_incomplete_weights_are_refused():
    """Trap 19: a module whose memory was never initialised must not get through."""
    weights = golden_weights()
    del weights["llm.model.model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing llm\.model\.model\.layers\.0\.self_attn\.k_proj\.weight"):
        load_lm(golden_config(), weights, torch.float32, CPU)
