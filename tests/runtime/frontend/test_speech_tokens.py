"""The speech tokenizer: its torch twin against the fixtures, and the ONNX file made from it against the twin."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
import torch

from runtime.errors import CheckpointError, EngineUnavailable, GenerationError
from runtime.frontend.mel import WhisperLogMel
from runtime.frontend.speech_tokens import (
    CODEBOOK,
    Quantizer,
    SpeechTokenizer,
    SpeechTokenizerConfig,
    SpeechTokenizerNet,
    export_speech_tokenizer,
    token_count,
)
from tests import golden

CONFIG = SpeechTokenizerConfig(width=64, heads=1, layers=2)


@pytest.fixture(scope="module")
def net() -> SpeechTokenizerNet:
    net = SpeechTokenizerNet(CONFIG)
    net.load_state_dict(golden.load("s3v3_tiny"), strict=True)
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def exported(net: SpeechTokenizerNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "speech_tokenizer_v3.onnx"
    export_speech_tokenizer(net, path)
    return path


def test_net_equals_the_reference_in_a_padded_batch(net: SpeechTokenizerNet) -> None:
    io = golden.load("s3v3_io")
    hidden = net.hidden(io["mel"], io["mel_len"])
    ids = net(io["mel"], io["mel_len"])
    for row, length in enumerate(io["code_len"].tolist()):
        torch.testing.assert_close(hidden[row, :length], io["hidden"][row, :length], atol=1e-4, rtol=0)
        levels = net.quantizer.levels(hidden[row, :length])
        torch.testing.assert_close(levels, io["fsq_pre_round"][row, :length], atol=1e-4, rtol=0)
        assert torch.equal(ids[row, :length], io["code"][row, :length])


def test_nan_behind_the_end_of_a_clip_changes_nothing(net: SpeechTokenizerNet) -> None:
    io = golden.load("s3v3_io")
    poisoned = io["mel"].clone()
    poisoned[1, :, int(io["mel_len"][1]) :] = torch.nan
    length = int(io["code_len"][1])
    assert torch.equal(net(poisoned, io["mel_len"])[1, :length], io["code"][1, :length])


def test_ids_cover_the_codebook_and_round_half_to_even() -> None:
    levels = torch.tensor([[-0.999] * 8, [0.999] * 8, [0.5] * 8, [-0.999] * 7 + [0.999], [0.999] + [-0.999] * 7])
    assert Quantizer.ids(levels).tolist() == [0, CODEBOOK - 1, (CODEBOOK - 1) // 2, 2 * 3**7, 2]


def test_levels_carry_gradients_to_the_encoder() -> None:
    net = SpeechTokenizerNet(SpeechTokenizerConfig(width=16, heads=2, layers=1))
    net.quantizer.levels(net.hidden(torch.randn(2, 128, 20), torch.tensor([20, 13]))).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_default_sizes_are_the_released_ones() -> None:
    with torch.device("meta"):
        net = SpeechTokenizerNet()
    megabytes = sum(parameter.numel() for parameter in net.parameters()) * 4 / 1e6
    assert megabytes == pytest.approx(969.45, rel=2e-3)  # the released ONNX file: these weights in float32


@pytest.mark.parametrize("samples", [8_000, 16_123, 31_999, 32_000, 52_345])
def test_exported_file_gives_the_tokens_of_the_net(net: SpeechTokenizerNet, exported: Path, samples: int) -> None:
    sound = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.1
    feats = WhisperLogMel()(sound[None])
    frames = feats.shape[-1]
    tokens = SpeechTokenizer(exported, threads=1).encode(sound)
    assert tokens.dtype == torch.int64
    assert len(tokens) == token_count(frames)
    assert torch.equal(tokens, net(feats, torch.tensor([frames]))[0].long())


def test_exported_file_has_the_released_interface(exported: Path) -> None:
    graph = onnx.load(exported).graph
    feats, length = graph.input
    assert (feats.name, length.name) == ("feats", "feats_length")
    assert (feats.type.tensor_type.elem_type, length.type.tensor_type.elem_type) == (
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT32,
    )
    assert [axis.dim_value for axis in feats.type.tensor_type.shape.dim] == [1, 128, 0]  # 0: free


def test_threads_share_one_tokenizer(exported: Path) -> None:
    tokenizer = SpeechTokenizer(exported, threads=1)
    sounds = [torch.randn(8_000 + 640 * i) * 0.1 for i in range(8)]
    alone = [tokenizer.encode(sound) for sound in sounds]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(tokenizer.encode, sounds))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_token_counts_of_the_known_clips() -> None:
    assert [token_count(frames) for frames in (348, 1374, 1, 2, 4, 5)] == [87, 344, 1, 1, 1, 2]


# Files that are not what they should be


def constant_tokens(path: Path, ids: list[int]) -> Path:
    """A file with the right inputs that answers the same ids to everything."""
    helper = onnx.helper
    inputs = [
        helper.make_tensor_value_info("feats", onnx.TensorProto.FLOAT, [1, 128, "frames"]),
        helper.make_tensor_value_info("feats_length", onnx.TensorProto.INT32, [1]),
    ]
    value = helper.make_tensor("value", onnx.TensorProto.INT32, [1, len(ids)], ids)
    node = helper.make_node("Constant", [], ["indices"], value=value)
    output = helper.make_tensor_value_info("indices", onnx.TensorProto.INT32, [1, len(ids)])
    graph = helper.make_graph([node], "tokens", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize("bad", [-1, CODEBOOK])
def test_ids_outside_the_codebook_never_leave_the_tokenizer(bad: int, tmp_path: Path) -> None:
    """Trap 27, at the door of the front end."""
    tokenizer = SpeechTokenizer(constant_tokens(tmp_path / "tokens.onnx", [0] * 12 + [bad]))
    with pytest.raises(GenerationError, match=r"tokens.onnx gave a token outside 0\.\.6560"):
        tokenizer.encode(torch.randn(8_000))


def test_a_wrong_token_count_is_an_error(tmp_path: Path) -> None:
    tokenizer = SpeechTokenizer(constant_tokens(tmp_path / "tokens.onnx", [7] * 12))
    with pytest.raises(GenerationError, match="12 tokens, 13 were due"):
        tokenizer.encode(torch.randn(8_000))


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1", bytes(1000)])
def test_a_file_that_is_no_onnx_model_fails_at_load(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "speech_tokenizer_v3.onnx"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"speech_tokenizer_v3.onnx cannot be opened .*; download it again"):
        SpeechTokenizer(path)


def test_a_missing_file_fails_at_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"speech_tokenizer_v3\.onnx is missing"):
        SpeechTokenizer(tmp_path / "speech_tokenizer_v3.onnx")


def test_provider_is_what_was_asked_for_and_stands_in_the_identity(exported: Path) -> None:
    """Trap 71: two providers give two identities, and with them two cache keys."""
    assert SpeechTokenizer(exported).identity == "speech_tokenizer_v3.onnx@CPUExecutionProvider"
    with pytest.raises(EngineUnavailable, match="no MoonExecutionProvider here"):
        SpeechTokenizer(exported, provider="MoonExecutionProvider")
