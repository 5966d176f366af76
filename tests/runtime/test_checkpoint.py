"""Opening a checkpoint: the released layout, strictly, with every problem named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint import SCALE, expand, load_strict, open_checkpoint, read_weights, released_name
from runtime.errors import CheckpointError
from runtime.stage0.lm import SpeechLM
from runtime.stage1.conditioning import Flow
from runtime.stage1.hift import HiFT
from tests import golden
from tests.runtime.test_recipe import released_config

MODULES = {"llm": (SpeechLM, "lm"), "flow": (Flow, "flow"), "hift": (HiFT, "hift")}


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    copy = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint.folder, copy)
    return copy


def build(checkpoint, part):
    module, field = MODULES[part]
    return module(getattr(checkpoint.config, field))


# The released model, key by key


@pytest.mark.parametrize("part", ["llm", "flow", "hift"])
def test_the_full_model_has_exactly_the_released_tensors(part):
    """Trap 19. The 4.4 GB cannot be tried in a test, so the model is built without memory and held to their list."""
    manifest = golden.meta("manifest_full")[part]
    module, field = MODULES[part]
    with torch.device("meta"):
        model = module(getattr(released_config(), field))
    ours = {released_name(part, name): value for name, value in model.state_dict().items()}
    theirs = {name: shape for name, shape, _ in manifest["tensors"] if name not in manifest.get("tied", {})}
    assert {name: list(value.shape) for name, value in ours.items()} == theirs
    assert {value.dtype for value in ours.values()} == {torch.float32}


# Strictness


@pytest.mark.parametrize("part", ["llm", "flow", "hift"])
def test_missing_unexpected_and_misshapen_tensors_are_all_named(tiny_checkpoint, part):
    """Trap 19."""
    weights = tiny_checkpoint.weights(part)
    names = sorted(name for name in weights if weights[name].dim() > 1)
    del weights[names[0]]
    weights[names[1]] = weights[names[1]][:-1]
    weights["stranger.weight"] = torch.zeros(1)
    model = build(tiny_checkpoint, part)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_strict(model, part, weights)
    message = str(caught.value)
    assert f"missing {names[0]}" in message and "unexpected stranger.weight" in message
    assert f"{names[1]} is [" in message and "the config says [" in message
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_nan_in_the_weights_is_named(tiny_checkpoint):
    weights = tiny_checkpoint.weights("flow")
    weights["input_embedding.weight"][3, 4] = torch.nan
    with pytest.raises(CheckpointError, match=r"input_embedding\.weight has NaN"):
        load_strict(build(tiny_checkpoint, "flow"), "flow", weights)


def test_a_tied_head_is_accepted_when_equal_and_refused_when_not(tiny_checkpoint):
    """Trap 19."""
    weights = tiny_checkpoint.weights("llm")
    head = weights["llm.model.model.embed_tokens.weight"].clone()
    load_strict(build(tiny_checkpoint, "llm"), "llm", weights | {"llm.model.lm_head.weight": head})
    head[0, 0] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight should be tied"):
        load_strict(build(tiny_checkpoint, "llm"), "llm", weights | {"llm.model.lm_head.weight": head})


def test_both_namings_of_weight_norm_and_the_training_prefix_load(tiny_checkpoint):
    weights = tiny_checkpoint.weights("hift")
    old = {
        "generator."
        + name.replace(".parametrizations.weight.original0", ".weight_g").replace(
            ".parametrizations.weight.original1", ".weight_v"
        ): value
        for name, value in weights.items()
    }
    assert not old.keys() & weights.keys()
    model = build(tiny_checkpoint, "hift")
    load_strict(model, "hift", old)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


# Files


def test_safetensors_are_preferred_and_pt_files_work(folder):
    weights = load_file(folder / "hift.safetensors")
    torch.save({name: value + 1 for name, value in weights.items()}, folder / "hift.pt")
    first = next(iter(weights))
    assert torch.equal(read_weights(folder, "hift")[first], weights[first].float())
    (folder / "hift.safetensors").unlink()
    assert torch.equal(read_weights(folder, "hift")[first], (weights[first] + 1).float())


def test_the_reinforced_language_model_is_selectable(folder):
    name = "llm.model.model.norm.weight"
    other = load_file(folder / "llm.safetensors") | {name: torch.full((32,), 2.0)}
    save_file(other, folder / "llm.rl.safetensors")
    assert not torch.equal(open_checkpoint(folder).weights("llm")[name], other[name])
    assert torch.equal(open_checkpoint(folder, "llm.rl").weights("llm")[name], other[name])


class Burglar:
    def __reduce__(self):
        return Path.touch, (Path("EXECUTED"),)


def test_a_weight_file_with_code_in_it_is_not_opened(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (folder / "hift.safetensors").unlink()
    torch.save({"weight": Burglar()}, folder / "hift.pt")
    with pytest.raises(CheckpointError, match=r"hift\.pt"):
        read_weights(folder, "hift")
    assert not (tmp_path / "EXECUTED").exists()


@pytest.mark.parametrize("name", ["hift.safetensors", "hift.pt"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\x00" * 100])
def test_a_broken_weight_file_is_named(folder, name, content):
    (folder / "hift.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_weights(folder, "hift")


def test_a_list_instead_of_a_state_dict_is_refused(folder):
    (folder / "hift.safetensors").unlink()
    torch.save([torch.zeros(1)], folder / "hift.pt")
    with pytest.raises(CheckpointError, match="no state dict"):
        read_weights(folder, "hift")


def test_all_missing_files_are_listed_at_once(folder):
    for name in ("flow.safetensors", "campplus.onnx", "CosyVoice-BlankEN/merges.txt"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for name in ("flow.safetensors or flow.pt", "campplus.onnx", "CosyVoice-BlankEN/merges.txt"):
        assert name in str(caught.value)


def test_a_broken_nested_config_is_named(folder):
    (folder / "CosyVoice-BlankEN/config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        open_checkpoint(folder)


def test_key_value_heads_are_held_against_the_weights(folder):
    """Trap 18: 2 heads in the config, 1 in the weights."""
    from runtime.settings import EngineSettings
    from runtime.stage0.base import build_stage0

    path = folder / "CosyVoice-BlankEN/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": 2}))
    with pytest.raises(CheckpointError, match=r"k_proj|key/value heads|num_key_value_heads"):
        build_stage0(open_checkpoint(folder), EngineSettings(), torch.device("cpu"))


# Storage form


def test_int8_rows_and_half_precision_expand_to_plain_float32():
    weight = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(dim=(1, 2)) / 127
    stored = {
        "a.weight": (weight / scale[:, None, None]).round().to(torch.int8),
        "a.weight" + SCALE: scale.half(),
        "a.bias": torch.ones(6).half(),
        "a.steps": torch.tensor(3),
    }
    plain = expand(stored)
    assert plain.keys() == {"a.weight", "a.bias", "a.steps"}
    assert plain["a.weight"].dtype == plain["a.bias"].dtype == torch.float32
    torch.testing.assert_close(plain["a.weight"], weight, atol=float(scale.max()), rtol=1e-3)


def test_int8_without_its_scale_is_named():
    with pytest.raises(CheckpointError, match=r"a\.weight is stored as int8 without a\.weight\.int8_scale"):
        expand({"a.weight": torch.zeros(2, 2, dtype=torch.int8)})
