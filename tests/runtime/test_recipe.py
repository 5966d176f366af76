"""The released YAML is read as data, and becomes the config."""

from pathlib import Path

import pytest

from runtime.config import RELEASED_SILENT_TOKENS, ModelConfig
from runtime.errors import CheckpointError
from runtime.recipe import read_recipe

RELEASED = Path(__file__).parent / "released.yaml"
QWEN = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
}


def released_config(**changes: object) -> ModelConfig:
    return ModelConfig.from_recipe(read_recipe(RELEASED) | changes, QWEN)


def test_nothing_in_the_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(RELEASED)
    assert recipe["__set_seed2"] == ["touch EXECUTED"]
    assert not (tmp_path / "EXECUTED").exists()


def test_references_become_numbers():
    recipe = read_recipe(RELEASED)
    assert recipe["flow"]["decoder"]["estimator"]["static_chunk_size"] == 50
    assert recipe["hift"]["sampling_rate"] == 24000
    assert recipe["flow"]["decoder"]["cfm_params"]["content"]["sigma_min"] == 1e-6


def test_released_numbers_arrive_in_the_config():
    config = released_config()
    assert config.lm.eos == 6562 and config.lm.task_id == 6563 and config.lm.rows == 6761
    assert config.flow.dit.depth == 22 and config.flow.guidance_rate == 0.7
    assert config.hift.samples_per_frame == 480 and config.samples_per_token == 960
    assert config.mel.f_max is None
    assert config.silent_tokens == RELEASED_SILENT_TOKENS


def test_a_checkpoint_states_its_own_silent_tokens():
    assert released_config(silent_tokens=[]).silent_tokens == frozenset()


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"sample_rate": 22050}, ("sample_rate is 22050", "hift.sampling_rate is 24000")),
        ({"spk_embed_dim": 512}, ("spk_embed_dim is 512", "flow.spk_embed_dim is 192")),
        ({"chunk_size": 15}, ("chunk_size x token_mel_ratio is 30", "static_chunk_size is 50")),
    ],
)
def test_numbers_that_must_agree_are_compared_and_both_are_named(change, both):
    """Trap 18: two sources of one number are held against each other at load."""
    with pytest.raises(CheckpointError) as caught:
        released_config(**change)
    assert all(part in str(caught.value) for part in both)


def test_hidden_size_of_both_language_model_configs_must_agree():
    """Trap 18."""
    with pytest.raises(CheckpointError, match=r"llm_input_size is 896, but config.json hidden_size is 1024"):
        ModelConfig.from_recipe(read_recipe(RELEASED), QWEN | {"hidden_size": 1024, "num_attention_heads": 16})


@pytest.mark.parametrize("missing", ["llm", "flow", "hift", "feat_extractor", "sample_rate"])
def test_a_missing_block_is_named(missing):
    recipe = read_recipe(RELEASED)
    del recipe[missing]
    with pytest.raises(CheckpointError, match=missing):
        ModelConfig.from_recipe(recipe, QWEN)


def test_a_missing_field_of_the_nested_config_is_named():
    """Trap 18: the KV heads have no silent default."""
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        ModelConfig.from_recipe(read_recipe(RELEASED), {k: v for k, v in QWEN.items() if k != "num_key_value_heads"})


@pytest.mark.parametrize("text", ["just words", "a: [1", "a: !ref <nowhere>", "a: !ref <b>\nb: !ref <a>"])
def test_a_broken_file_is_a_clear_error(tmp_path, text):
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"broken\.yaml"):
        read_recipe(tmp_path / "broken.yaml")
