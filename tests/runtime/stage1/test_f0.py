import torch

from runtime.stage1.f0 import F0Predictor
from tests import golden
from tests.runtime.stage1 import tiny_hift


def test_f0_in_double_matches_the_reference() -> None:
    fixture = golden.load("hift_io")
    net = tiny_hift.hift().f0_predictor.double()
    mel = fixture["mel"].double()
    torch.testing.assert_close(net(mel), fixture["f0_final_fp64"], rtol=1e-6, atol=0)
    torch.testing.assert_close(net(mel, is_last=False), fixture["f0_stream_fp64"], rtol=1e-6, atol=0)


def test_f0_keeps_the_precision_of_mel() -> None:
    net = tiny_hift.hift().f0_predictor.double()
    assert net(golden.load("hift_io")["mel"]).dtype == torch.float32


def test_f0_sees_no_further_than_it_says() -> None:
    """Poisoned frames show in f0 exactly as far as context and look-ahead reach (trap 50: the history a hop needs)."""
    net = tiny_hift.hift().f0_predictor
    mel = tiny_hift.mel(40)[None]
    mel[..., 20] = float("nan")
    touched = net(mel)[0].isnan().nonzero().flatten().tolist()
    assert touched == list(range(20 - F0Predictor.lookahead_frames, 20 + F0Predictor.context_frames + 1))


def test_f0_trains_in_float32() -> None:
    net = tiny_hift.hift().f0_predictor
    net(tiny_hift.mel(30).expand(2, -1, -1)).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
