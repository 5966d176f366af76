import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.checkpoint import load_strict
from runtime.config import F0Config
from runtime.stage1.causal import fold_weight_norm
from runtime.stage1.hift import HiFT, left_context_frames
from tests import golden
from tests.runtime.stage1 import tiny_hift


@pytest.fixture(scope="module")
def fixture() -> dict[str, Tensor]:
    return golden.load("hift_io")


def test_full_size_names_and_shapes_are_the_released_ones() -> None:
    released = golden.meta("manifest_full")["hift"]["tensors"]
    config = dataclasses.replace(tiny_hift.config(), base_channels=512, f0=F0Config(mel_bins=80, channels=512))
    with torch.device("meta"):
        ours = HiFT(config).state_dict()
    assert {name: list(value.shape) for name, value in ours.items()} == {name: shape for name, shape, _ in released}
    assert sum(value.numel() for value in ours.values()) == 20_779_887


def test_older_weight_norm_names_load() -> None:
    newer = {".parametrizations.weight.original0": ".weight_g", ".parametrizations.weight.original1": ".weight_v"}
    older = {}
    for name, value in tiny_hift.weights().items():
        for new, old in newer.items():
            name = name.replace(new, old)
        older[f"generator.{name}"] = value
    module = HiFT(tiny_hift.config())
    load_strict(module, "hift", older)
    assert torch.equal(module.conv_post.weight, tiny_hift.hift().conv_post.weight)


def test_layers_match_the_reference(fixture: dict[str, Tensor]) -> None:
    hift = tiny_hift.hift()
    mel = fixture["mel"]
    spectrum = hift.stft(fixture["source_final"][..., 0])
    pre = hift.conv_pre(F.pad(mel, (0, 4)))
    first_source = hift.source_downs[0](spectrum)
    for ours, theirs, tolerance in (
        (spectrum[:, :9, :64], "source_stft_real", 2e-5),
        (spectrum[:, 9:, :64], "source_stft_imag", 2e-5),
        (pre, "conv_pre_final", 1e-5),
        (hift.conv_pre(mel), "conv_pre_stream", 1e-5),
        (hift.ups[0](F.leaky_relu(pre, 0.1)), "ups0_final", 1e-5),
        (first_source, "source_down0", 1e-5),
        (hift.source_downs[1](spectrum), "source_down1", 1e-5),
        (hift.source_downs[2](spectrum)[..., :200], "source_down2", 1e-5),
        (hift.source_resblocks[0](first_source), "source_res0", 1e-5),
    ):
        assert ours.shape == fixture[theirs].shape, theirs
        assert (ours - fixture[theirs]).abs().max() <= tolerance, theirs


def test_samples_match_the_reference(fixture: dict[str, Tensor]) -> None:
    hift = tiny_hift.hift()
    whole = hift.decode(fixture["mel"], fixture["source_final"][..., 0]).clamp(-0.99, 0.99)
    torch.testing.assert_close(whole, fixture["decode_final"], atol=1e-4, rtol=0)
    begun = hift.decode(fixture["mel"][..., :37], fixture["source_stream"][:, 0], is_last=False).clamp(-0.99, 0.99)
    torch.testing.assert_close(begun, fixture["decode_stream"], atol=1e-4, rtol=0)


def test_folding_keeps_the_weights_and_leaves_plain_ones(fixture: dict[str, Tensor]) -> None:
    hift = tiny_hift.hift()
    kept = hift.ups[0].weight.detach().clone()
    assert torch.equal(fold_weight_norm(hift).ups[0].weight, kept)
    assert not any("parametrizations" in name for name in hift.state_dict())
    fold_weight_norm(hift)  # a second time does nothing
    whole = hift.decode(fixture["mel"], fixture["source_final"][..., 0]).clamp(-0.99, 0.99)
    torch.testing.assert_close(whole, fixture["decode_final"], atol=1e-4, rtol=0)


def test_every_weight_gets_a_gradient() -> None:
    """The three steps that GAN training takes, on a batch."""
    hift = tiny_hift.hift()
    mel = torch.stack([tiny_hift.mel(12), tiny_hift.mel(12, seed=1)])
    f0 = hift.f0_predictor(mel)
    source = hift.source(f0, torch.rand(2, 12 * 480, 9))
    (hift.decode(mel, source).square().mean() + f0.mean()).backward()
    assert [name for name, parameter in hift.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("change", [{}, {"resblock_kernels": (3, 5, 3)}, {"source_resblock_kernels": (31, 7, 61)}])
def test_a_window_is_stale_as_far_as_computed(change: dict[str, tuple[int, ...]]) -> None:
    """Poison before a window shows how far the past reaches: into the last frame of the left context, no further."""
    hift = HiFT(dataclasses.replace(tiny_hift.config(), **change))
    context = left_context_frames(hift.config)
    before, after = 4, context + 8
    mel, source = tiny_hift.mel(before + after)[None], torch.rand(1, (before + after) * 480) - 0.5
    mel[..., :before] = float("nan")
    source[:, : before * 480] = float("nan")
    stale = hift.decode(mel, source)[0].isnan().nonzero().max().item() + 1 - before * 480
    assert (context - 1) * 480 < stale <= context * 480


def test_context_is_enough_and_not_by_accident() -> None:
    hift = tiny_hift.hift()
    mel, source = tiny_hift.mel(60)[None], torch.rand(1, 60 * 480) - 0.5
    whole = hift.decode(mel, source)
    context = left_context_frames(hift.config)
    window = hift.decode(mel[..., 10:], source[:, 10 * 480 :])
    torch.testing.assert_close(window[:, context * 480 :], whole[:, (10 + context) * 480 :], atol=2e-5, rtol=0)
    assert (window[:, : context * 480] - whole[:, 10 * 480 : (10 + context) * 480]).abs().max() > 1e-3
