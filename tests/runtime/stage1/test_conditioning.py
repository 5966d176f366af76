"""Tokens and voice as the flow is told of them."""

import pytest
import torch
from torch import Tensor

from runtime.stage1.conditioning import Flow, prompt_condition
from runtime.stage1.noise import NoiseBank
from runtime.stage1.solver import solve
from tests import golden
from tests.runtime.stage1.tiny_flow import CPU, tiny_flow


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return golden.load("flow_io")


@pytest.fixture(scope="module")
def flow() -> Flow:
    return tiny_flow()


def test_lookahead_matches_golden(flow: Flow, io: dict[str, Tensor]) -> None:
    x = flow.input_embedding(io["pla.token"].long())
    final = flow.pre_lookahead_layer(x, torch.zeros(1, 3, 80))
    stream = flow.pre_lookahead_layer(x[:, :20], x[:, 20:])
    torch.testing.assert_close(final, io["pla.out_final"], atol=2e-5, rtol=0)
    torch.testing.assert_close(stream, io["pla.out_stream"], atol=2e-5, rtol=0)


def test_speaker_is_normalised_inside(flow: Flow, io: dict[str, Tensor]) -> None:
    torch.testing.assert_close(flow.speaker(io["flow.embedding"]), io["flow.spk_projected"], atol=2e-5, rtol=0)
    torch.testing.assert_close(flow.speaker(7 * io["flow.embedding"]), io["flow.spk_projected"], atol=2e-5, rtol=0)


def test_mu_repeats_each_token_and_keeps_the_lookahead_back(flow: Flow, io: dict[str, Tensor]) -> None:
    tokens = io["pla.token"].long()
    early, late = flow.mu(tokens, is_last=False), flow.mu(tokens, is_last=True)
    assert early.shape == (1, 80, 40) and late.shape == (1, 80, 46)
    assert torch.equal(late[:, :, 0::2], late[:, :, 1::2])
    torch.testing.assert_close(early, late[:, :, :40])


def test_prompt_mel_leads_and_zeros_follow() -> None:
    prompt = torch.randn(1, 80, 6)
    cond = prompt_condition(prompt, 9)
    assert torch.equal(cond[:, :, :6], prompt) and not cond[:, :, 6:].any() and cond.shape == (1, 80, 9)
    assert torch.equal(prompt_condition(prompt, 4), prompt[:, :, :4])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_whole_inference_matches_golden(flow: Flow, io: dict[str, Tensor], chunked: bool, is_last: bool) -> None:
    tokens = torch.cat((io["flow.prompt_token"], io["flow.token"]), dim=1).long()
    mel = _infer(flow, io, tokens, io["flow.prompt_feat"], chunked=chunked, is_last=is_last)
    expected = io[f"flow.mel_stream{chunked:d}_final{is_last:d}"]
    torch.testing.assert_close(mel, expected, atol=5e-5, rtol=0)


def test_inference_without_a_prompt_matches_golden(flow: Flow, io: dict[str, Tensor]) -> None:
    mel = _infer(flow, io, io["flow.token"].long(), torch.zeros(1, 0, 80), chunked=False, is_last=True)
    torch.testing.assert_close(mel, io["flow.mel_noprompt"], atol=5e-5, rtol=0)


@torch.inference_mode()
def _infer(
    flow: Flow, io: dict[str, Tensor], tokens: Tensor, prompt: Tensor, *, chunked: bool, is_last: bool
) -> Tensor:
    mu = flow.mu(tokens, is_last=is_last)
    frames = mu.shape[-1]
    mel = solve(
        flow.estimator,
        NoiseBank(CPU).flow_noise(frames)[None],
        mu,
        flow.speaker(io["flow.embedding"]),
        prompt_condition(prompt.transpose(1, 2), frames),
        steps=10,
        rate=0.7,
        chunked=chunked,
    )
    return mel[:, :, prompt.shape[1] :]
