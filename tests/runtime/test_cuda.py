"""The same engine on a CUDA device: close to the CPU's numbers where they can be, complete where they cannot."""

import numpy as np
import pytest
import torch

from runtime import Engine, EngineSettings, SpeechRequest
from runtime.stage1.base import build_solver, build_stage1
from runtime.stage1.conditioning import PreLookahead
from runtime.stage1.decoder import Stage1
from runtime.stage1.noise import NoiseBank
from tests import golden
from tests.runtime.stage1.tiny_flow import prepared, tiny_flow, tiny_vocoder

pytestmark = pytest.mark.cuda
FLOAT32 = EngineSettings(flow_precision="float32")
TEXT = "The quick brown fox jumps."


def test_the_flow_gives_the_official_mel():
    io, device = golden.load("stream_io"), torch.device("cuda")
    flow, noise = tiny_flow().to(device), NoiseBank(device)
    stage1 = Stage1(flow, build_solver(flow, FLOAT32), tiny_vocoder(), noise)
    assert stage1.describe()["flow estimator"].startswith("fused, ")
    state = stage1.open(prepared(io["prompt_token"], io["prompt_feat"], io["embedding"]))
    mel = stage1.new_mel(state, io["token"][0].long(), is_last=True).cpu()
    torch.testing.assert_close(mel[None], io["offline.mel"], atol=1e-3, rtol=0)


def test_what_the_flow_is_told_needs_no_workspace():
    """cuDNN asked for 60 GiB, and 0.2 s, to convolve these shapes in true float32."""
    device = torch.device("cuda")
    look = PreLookahead(80, 1024, 3).to(device)
    x, context = torch.randn(1, 125, 80, device=device), torch.randn(1, 3, 80, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        look(x, context)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


def test_stage_1_gives_the_sound_of_the_cpu(tiny_checkpoint, engine, voice):
    """The decode alone: f0 and phase drift between devices (spec 9.30), so both get the same tokens and few frames."""
    reference = engine.prepare(SpeechRequest(reference=voice, text=TEXT)).reference
    tokens = torch.arange(40)
    sounds = []
    for name in ("cpu", "cuda"):
        stage1 = build_stage1(tiny_checkpoint, FLOAT32, torch.device(name))
        sounds.append(stage1.decode(stage1.open(reference), tokens, is_last=True))
    assert sounds[1].device.type == "cpu"
    torch.testing.assert_close(sounds[1], sounds[0], atol=2e-2, rtol=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_engine_on_the_gpu_speaks_alone_and_in_company(tiny_checkpoint, voice, precision):
    settings = EngineSettings(device="cuda", lm_precision=precision, flow_precision=precision)
    with Engine(tiny_checkpoint, settings) as engine:
        assert engine.describe()["stage 1 device"].startswith("cuda")
        streams = [engine.stream(SpeechRequest(reference=voice, text=TEXT, seed=seed)) for seed in range(16)]
        for stream in streams:
            stream.__enter__()
        for stream in streams:
            samples = np.concatenate([chunk.samples for chunk in stream])
            assert len(samples) == stream.stats.tokens * 960 > 0
            assert np.isfinite(samples).all() and samples.std() > 1e-4
        assert engine.live_streams == 0
