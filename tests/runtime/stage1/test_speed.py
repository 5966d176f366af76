"""Speed on the mel's time axis, whole and in chunks. Trap 70: speed has an effect in streams too, without seams."""

import itertools

import pytest
import torch
from torch import Tensor

from runtime.stage1.speed import Stretch
from tests import golden

SPEEDS = [0.5, 0.7, 0.9, 1.1, 1.25, 1.3, 1.9, 2.0]


def pushed(mel: Tensor, speed: float, cuts: list[int]) -> Tensor:
    """Feeds the mel cut at these frames, the last piece flagged as last."""
    stretch, edges = Stretch(speed), [0, *cuts, mel.shape[-1]]
    pieces = [
        stretch.push(mel[:, start:end], is_last=index == len(cuts))
        for index, (start, end) in enumerate(itertools.pairwise(edges))
    ]
    return torch.cat(pieces, dim=-1)


def test_speed_one_hands_the_mel_on() -> None:
    mel = torch.randn(80, 9)
    assert Stretch(1.0).push(mel, is_last=False) is mel


def test_whole_mel_matches_golden() -> None:
    io = golden.load("stream_io")
    faster = Stretch(1.25).push(io["offline.mel"][0], is_last=True)
    assert faster.shape == (80, 192)
    torch.testing.assert_close(faster[None, :, -8:], io["speed125.mel_tail"], atol=5e-5, rtol=0)


def test_stream_at_an_even_ratio_equals_the_official_whole() -> None:
    mel = golden.load("stream_io")["offline.mel"][0]
    whole = Stretch(1.25).push(mel, is_last=True)
    torch.testing.assert_close(pushed(mel, 1.25, [90, 190]), whole, atol=5e-5, rtol=0)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("cuts", [[1], [50, 51, 52], [90, 190], [2, 2, 200, 241], list(range(1, 241))])
def test_cuts_leave_no_trace(speed: float, cuts: list[int]) -> None:
    mel = torch.randn(80, 241, generator=torch.Generator().manual_seed(4))
    one_cut = pushed(mel, speed, [120])
    assert one_cut.shape[-1] == int(241 / speed)
    assert torch.equal(pushed(mel, speed, cuts), one_cut)


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_ramp_stays_a_ramp_of_another_slope(speed: float) -> None:
    ramp = torch.arange(100.0)[None]
    out = pushed(ramp, speed, [10, 60])[0]
    expected = ((torch.arange(len(out)) + 0.5) * speed - 0.5).clamp(0, 99)
    torch.testing.assert_close(out, expected)


def test_settled_frames_leave_at_once() -> None:
    stretch = Stretch(0.5)
    assert stretch.push(torch.randn(80, 50), is_last=False).shape[-1] >= 98


def test_an_empty_last_push_brings_what_is_left() -> None:
    stretch = Stretch(0.8)
    first = stretch.push(torch.randn(80, 100), is_last=False)
    rest = stretch.push(torch.empty(80, 0), is_last=True)
    assert first.shape[-1] + rest.shape[-1] == 125 and rest.shape[-1] > 0
    assert Stretch(0.8).push(torch.empty(80, 0), is_last=True).shape == (80, 0)
