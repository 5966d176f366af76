"""The language model as a stock Qwen2 folder: what stands in it, and that it is written once."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from runtime.stage0.qwen_export import CONFIG, WEIGHTS, export_qwen2
from tests.runtime.stage0.models import seeded_lm


def test_folder_is_a_stock_qwen2_with_the_speech_table_as_its_embedding(tmp_path):
    lm = seeded_lm()
    folder = export_qwen2(lm, tmp_path)
    config, weights = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (321, False)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1_000_000
    assert config["eos_token_id"] == lm.config.eos
    assert config["torch_dtype"] == "float32"
    assert torch.equal(weights["model.embed_tokens.weight"], lm.speech_embedding.weight)
    assert torch.equal(weights["lm_head.weight"], lm.llm_decoder.weight)
    assert torch.equal(weights["model.norm.weight"], lm.backbone.norm.weight)
    query = "layers.1.self_attn.q_proj.bias"
    assert torch.equal(weights[f"model.{query}"], lm.backbone.get_parameter(query))
    assert len(weights) == len(lm.state_dict()) - 1  # all but the text table


def test_model_is_written_once_and_found_again(tmp_path):
    folder = export_qwen2(seeded_lm(), tmp_path)
    written = (folder / WEIGHTS).stat().st_mtime_ns
    assert export_qwen2(seeded_lm(), tmp_path) == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [folder]


def test_other_weights_config_or_precision_are_another_folder(tmp_path):
    nudged, longer = seeded_lm(), seeded_lm()
    nudged.llm_decoder.weight.data[7, 3] += 1e-3
    longer.config = replace(longer.config, qwen=replace(longer.config.qwen, max_position_embeddings=64))
    models = (seeded_lm(), nudged, longer, seeded_lm().bfloat16())
    assert len({export_qwen2(model, tmp_path) for model in models}) == 4


def test_unfinished_export_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.stage0.qwen_export.save_file", lambda *_, **__: raise_disk_full())
    with pytest.raises(OSError, match="no space"):
        export_qwen2(seeded_lm(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def raise_disk_full() -> None:
    raise OSError("no space left on device")
