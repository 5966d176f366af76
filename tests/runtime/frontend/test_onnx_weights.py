"""Weights out of ONNX files, as two exporters and several opsets write them, without a look at a name.

The released files cannot be had here. They are of the older exporter's kind: anonymous and transposed matrices, batch
norms folded into the convolutions before them.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from runtime.checkpoint import DEMO_FOLDER, SPEAKER_ENCODER, SPEECH_TOKENIZER
from runtime.errors import EngineUnavailable
from runtime.frontend import speaker, speech_tokens
from runtime.frontend.onnx_weights import read_layers
from runtime.frontend.speaker import CAMPPlus, CAMPPlusConfig
from runtime.frontend.speech_tokens import SpeechTokenizerConfig, SpeechTokenizerNet

FEATS = torch.randn(1, 128, 150, generator=torch.Generator().manual_seed(0))
FBANK = torch.randn(1, 150, 80, generator=torch.Generator().manual_seed(0))


def older_export(net: nn.Module, path: Path, inputs: tuple[torch.Tensor, ...], opset: int, fold: bool = True) -> None:
    mode = torch.onnx.TrainingMode.EVAL if fold else torch.onnx.TrainingMode.PRESERVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, inputs, str(path), dynamo=False, opset_version=opset, training=mode)


def rename_everything(path: Path) -> None:
    """Numbers in place of all names, as nobody can rely on them."""
    model = onnx.load(path)
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}") if name else name

    for node in model.graph.node:
        for field in (node.input, node.output):
            renamed = [new(name) for name in field]
            del field[:]
            field.extend(renamed)
    for value in (*model.graph.initializer, *model.graph.input, *model.graph.output):
        value.name = new(value.name)
    onnx.save(model, path)


@pytest.fixture(scope="module")
def tokenizer() -> SpeechTokenizerNet:
    torch.manual_seed(0)
    net = SpeechTokenizerNet(SpeechTokenizerConfig(width=64, heads=1, layers=3))
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def encoder() -> CAMPPlus:
    torch.manual_seed(0)
    net = CAMPPlus(CAMPPlusConfig(growth_rate=4, bn_size=2, init_channels=16, blocks=((2, 1), (2, 2), (1, 2))))
    net.requires_grad_(False)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    net(torch.randn(4, 300, 80) * 3)  # statistics
    return net.eval()


Export = Callable[[nn.Module, Path, tuple[torch.Tensor, ...]], None]
EXPORTS: dict[str, Export] = {
    "older, opset 14": lambda net, path, inputs: older_export(net, path, inputs, 14),
    "older, opset 17": lambda net, path, inputs: older_export(net, path, inputs, 17),
    "older, batch norms apart": lambda net, path, inputs: older_export(net, path, inputs, 17, fold=False),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_tokenizer_weights_are_found_whatever_they_are_called(
    name: str, tokenizer: SpeechTokenizerNet, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.onnx"
    lengths = torch.tensor([150], dtype=torch.int32)
    EXPORTS[name](tokenizer, path, (FEATS, lengths))
    rename_everything(path)
    found = speech_tokens.net_of(path)
    assert found.config == tokenizer.config
    torch.testing.assert_close(found.hidden(FEATS, lengths), tokenizer.hidden(FEATS, lengths), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", EXPORTS)
def test_speaker_weights_are_found_whatever_they_are_called(name: str, encoder: CAMPPlus, tmp_path: Path) -> None:
    path = tmp_path / "campplus.onnx"
    EXPORTS[name](encoder, path, (FBANK,))
    rename_everything(path)
    found = speaker.net_of(path)
    assert found.config == encoder.config
    torch.testing.assert_close(found(FBANK), encoder(FBANK), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("read", [speech_tokens.net_of, speaker.net_of])
def test_files_of_the_demo_are_read_without_their_names_too(read: Callable[[Path], nn.Module], tmp_path: Path) -> None:
    """Those were made by our exporter, the newer one; test_encoders.py holds what is read to onnxruntime."""
    name = SPEECH_TOKENIZER if read is speech_tokens.net_of else SPEAKER_ENCODER
    copied = tmp_path / name
    copied.write_bytes((DEMO_FOLDER / name).read_bytes())
    rename_everything(copied)
    named, nameless = read(DEMO_FOLDER / name).state_dict(), read(copied).state_dict()
    assert named.keys() == nameless.keys()
    assert all(torch.equal(value, nameless[key]) for key, value in named.items())


def test_a_net_of_another_kind_is_refused_with_the_reason(
    tokenizer: SpeechTokenizerNet, encoder: CAMPPlus, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    older_export(encoder, path, (FBANK,), 17)
    with pytest.raises(EngineUnavailable, match="another architecture"):
        speech_tokens.net_of(path)
    older_export(tokenizer, path, (FEATS, torch.tensor([150])), 17)
    with pytest.raises(EngineUnavailable, match="another architecture"):
        speaker.net_of(path)


def test_a_layer_too_many_or_too_few_is_refused(tokenizer: SpeechTokenizerNet, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    wider = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    older_export(wider, path, (torch.zeros(2, 3, 8),), 17)
    layers = read_layers(path)
    assert [layer.arrays[0].shape for layer in layers] == [(8, 8), (8, 8)]
    from runtime.frontend.onnx_weights import fill

    def run(net: nn.Module) -> object:
        return net(torch.zeros(1, 3, 8))

    with pytest.raises(EngineUnavailable, match="1 layers more than the net"):
        fill(nn.Sequential(nn.Linear(8, 8)), layers, run)
    with pytest.raises(EngineUnavailable, match="no layer for 2"):
        fill(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), layers, run)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(EngineUnavailable, match=r"model\.onnx cannot be read"):
        read_layers(path)
