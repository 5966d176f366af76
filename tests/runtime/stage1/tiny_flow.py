"""The golden flow and what tests of stage 1 build on it: modules of tiny width with the official names."""

from typing import Literal

import torch
from torch import Tensor

from runtime.config import DiTConfig, FlowConfig
from runtime.settings import EngineSettings
from runtime.stage1.base import FlowSolver, build_solver, load_flow
from runtime.stage1.conditioning import Flow
from runtime.stage1.decoder import Stage1
from runtime.stage1.dit_packed import PackedSolver
from runtime.stage1.noise import NoiseBank
from runtime.stage1.solver import PlainSolver
from runtime.stage1.vocoder import Vocoder
from runtime.types import PreparedReference
from tests import golden
from tests.runtime.stage1 import tiny_hift

CPU = torch.device("cpu")


def flow_config() -> FlowConfig:
    noted = golden.meta("flow")["config"]
    dit = noted["dit"]
    return FlowConfig(
        speech_tokens=noted["vocab_size"],
        token_channels=noted["input_size"],
        mel_bins=noted["output_size"],
        speaker_dim=noted["spk_embed_dim"],
        mel_per_token=noted["token_mel_ratio"],
        lookahead_tokens=noted["pre_lookahead_len"],
        lookahead_channels=noted["pre_lookahead_channels"],
        guidance_rate=noted["cfm"]["inference_cfg_rate"],
        euler_steps=noted["cfm"]["n_timesteps"],
        dit=DiTConfig(
            dim=dit["dim"],
            depth=dit["depth"],
            heads=dit["heads"],
            head_dim=dit["dim_head"],
            ff_mult=dit["ff_mult"],
            mel_bins=dit["mel_dim"],
            mu_dim=dit["mu_dim"],
            speaker_dim=dit["spk_dim"],
            chunk_frames=dit["static_chunk_size"],
            conv_kernel=dit["conv_pos_kernel"],
            conv_groups=dit["conv_pos_groups"],
            time_channels=dit["freq_embed_dim"],
        ),
    )


def flow_weights() -> dict[str, Tensor]:
    """The golden weights. Of the token table only the rows that fixtures use are kept; the others are drawn anew."""
    weights = golden.load("flow_tiny")
    ids, rows = weights.pop("input_embedding.ids"), weights.pop("input_embedding.rows")
    table = torch.randn(6561, rows.shape[1], generator=torch.Generator().manual_seed(1))
    table[ids.long()] = rows
    return {**weights, "input_embedding.weight": table}


def tiny_flow(settings: EngineSettings | None = None) -> Flow:
    flow = load_flow(flow_config(), flow_weights(), CPU)
    build_solver(flow, settings or EngineSettings())
    return flow


def tiny_vocoder(noise: NoiseBank | None = None) -> Vocoder:
    return Vocoder(tiny_hift.hift(), noise or NoiseBank(CPU))


def tiny_solver(flow: Flow, estimator: str = "packed") -> FlowSolver:
    """Over the flow's own estimator, in whatever precision that is."""
    solver = {"packed": PackedSolver, "torch": PlainSolver}[estimator]
    return solver(flow.estimator, flow.config.euler_steps, flow.config.guidance_rate)


def tiny_stage1(
    final_attention: Literal["full", "chunked"] = "full",
    flow: Flow | None = None,
    estimator: str = "packed",
    voice_kv_bytes: int | None = None,
    stream_kv_bytes: int | None = None,
) -> Stage1:
    flow, noise = flow or tiny_flow(), NoiseBank(CPU)
    solver = tiny_solver(flow, estimator)
    return Stage1(
        flow,
        solver,
        tiny_vocoder(noise),
        noise,
        final_attention=final_attention,
        voice_kv_bytes=voice_kv_bytes,
        stream_kv_bytes=stream_kv_bytes,
    )


def prepared(tokens: Tensor, mel: Tensor, speaker: Tensor) -> PreparedReference:
    """A voice from golden tensors with their batch dimension of one."""
    return PreparedReference(speech_tokens=tokens[0].long(), mel=mel[0], speaker=speaker[0], key="golden")
