"""The speaker encoder: its torch twin against the fixture, and the ONNX file made from it against the twin."""

from pathlib import Path

import onnx
import pytest
import torch

from runtime.errors import CheckpointError, GenerationError
from runtime.frontend.mel import KaldiFbank
from runtime.frontend.speaker import CAMPPlus, CAMPPlusConfig, SpeakerEncoder, export_speaker_encoder, segment_mean
from runtime.frontend.speech_tokens import SpeechTokenizer
from tests import golden


@pytest.fixture(scope="module")
def net() -> CAMPPlus:
    """Few layers, so that the export takes seconds; statistics that batch norm has to use."""
    torch.manual_seed(0)
    config = CAMPPlusConfig(growth_rate=4, bn_size=2, init_channels=16, blocks=((2, 1), (2, 2), (1, 2)))
    net = CAMPPlus(config).requires_grad_(False)
    net(torch.randn(4, 300, 80) * 3)
    return net.eval()


@pytest.fixture(scope="module")
def exported(net: CAMPPlus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "campplus.onnx"
    export_speaker_encoder(net, path)
    return path


def test_net_equals_the_reference() -> None:
    config = CAMPPlusConfig(growth_rate=4, bn_size=2, init_channels=16)
    net = CAMPPlus(config).eval().requires_grad_(False)
    net.load_state_dict(golden.load("campplus_tiny"), strict=True)
    io = golden.load("campplus_io")
    torch.testing.assert_close(net(io["fbank"]), io["embedding"], atol=1e-4, rtol=0)


def test_default_sizes_are_the_released_ones() -> None:
    with torch.device("meta"):
        net = CAMPPlus()
    megabytes = sum(value.numel() for value in net.state_dict().values()) * 4 / 1e6
    assert megabytes == pytest.approx(28.3, rel=0.03)  # the released ONNX file, graph included


def test_last_segment_is_averaged_over_its_own_frames() -> None:
    x = torch.arange(250.0)[None, None]
    means = segment_mean(x)
    assert means.shape == x.shape
    assert means[0, 0, [0, 99, 100, 249]].tolist() == [49.5, 49.5, 149.5, 224.5]


@pytest.mark.parametrize("samples", [8_000, 16_123, 32_000, 52_345])  # around and between 100-frame segments
def test_exported_file_gives_the_vector_of_the_net(net: CAMPPlus, exported: Path, samples: int) -> None:
    sound = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.1
    vector = SpeakerEncoder(exported, threads=1).embed(sound)
    assert vector.shape == (192,)
    torch.testing.assert_close(vector, net(KaldiFbank()(sound)[None])[0], atol=1e-4, rtol=0)


def test_exported_file_has_the_released_interface(exported: Path) -> None:
    graph = onnx.load(exported).graph
    assert [entry.name for entry in (*graph.input, *graph.output)] == ["input", "output"]
    assert [axis.dim_value for axis in graph.input[0].type.tensor_type.shape.dim] == [1, 0, 80]  # 0: free
    assert [axis.dim_value for axis in graph.output[0].type.tensor_type.shape.dim] == [1, 192]


def test_export_leaves_the_training_mode_as_it_was(net: CAMPPlus, exported: Path) -> None:
    assert not net.training


def test_a_vector_of_another_size_is_an_error(exported: Path) -> None:
    with pytest.raises(GenerationError, match="192 values; 256 finite ones were due"):
        SpeakerEncoder(exported, embedding_size=256).embed(torch.randn(8_000))


def test_a_vector_with_nan_is_an_error(exported: Path) -> None:
    with pytest.raises(GenerationError, match="finite"):
        SpeakerEncoder(exported).embed(torch.full((8_000,), torch.nan))


def test_another_model_under_the_right_name_fails_at_load(exported: Path) -> None:
    with pytest.raises(CheckpointError, match="has 1 inputs, expected 2"):
        SpeechTokenizer(exported)
