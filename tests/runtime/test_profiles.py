"""Profiles: settings that belong together, and what they refuse."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime import Engine, EngineSettings, EngineUnavailable, RequestError, SamplingParams, SpeechRequest
from runtime.settings import PROFILES

TEXT = "The quick brown fox jumps over the lazy dog."
STANDARD = SamplingParams(method="standard")


@pytest.mark.parametrize("name", PROFILES)
def test_profile_sets_all_that_it_lists(name):
    settings = EngineSettings(profile=name, lm_precision="bfloat16")
    assert {key: getattr(settings, key) for key in PROFILES[name]} == PROFILES[name]
    assert settings.lm_precision == "bfloat16"
    assert replace(settings, device="cpu").profile == name


def test_setting_that_contradicts_its_profile_is_refused():
    with pytest.raises(EngineUnavailable, match="the profile latency sets hops to latency, not throughput"):
        EngineSettings(profile="latency", hops="throughput")
    with pytest.raises(EngineUnavailable, match="the profile throughput sets hops to throughput, not latency"):
        EngineSettings(profile="throughput", hops="latency")
    with pytest.raises(EngineUnavailable, match="latency or throughput or whole"):
        EngineSettings(profile="fast")


def test_standard_sampling_is_refused_at_load_when_the_checkpoint_says_ras(tiny_checkpoint):
    """Trap 14."""
    with pytest.raises(EngineUnavailable, match="ask for standard sampling, the checkpoint tiny is made for ras"):
        Engine(tiny_checkpoint, EngineSettings(sampling="standard"))


@pytest.fixture(scope="module")
def whole(tiny_checkpoint):
    with Engine(tiny_checkpoint, EngineSettings(profile="whole")) as engine:
        yield engine


@pytest.mark.parametrize(
    ("fidelity", "device", "capability", "dtype"),
    [
        ("intended", "cpu", (8, 0), torch.float32),
        ("intended", "cuda", (8, 0), torch.bfloat16),
        ("intended", "cuda", (7, 5), torch.float32),
        ("official", "cuda", (9, 0), torch.float32),
    ],
)
def test_auto_precision_is_half_where_a_gpu_has_it_and_nothing_official_is_asked(
    monkeypatch, fidelity, device, capability, dtype
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    settings = EngineSettings(fidelity=fidelity)
    assert settings.dtype(settings.flow_precision, torch.device(device)) is dtype
    assert settings.dtype("float16", torch.device(device)) is torch.float16


def test_a_stream_that_the_released_onnx_file_cannot_solve_is_refused_before_it_is_queued(whole, voice, monkeypatch):
    onnx = EngineSettings(estimator="tensorrt", estimator_onnx=Path("flow.onnx"))
    monkeypatch.setattr(whole, "settings", onnx)
    request = SpeechRequest(reference=voice, text=TEXT)
    with pytest.raises(RequestError, match="the released ONNX file has no chunk mask"):
        whole.prepare(request)
    assert not whole.prepare(replace(request, streaming=False)).streaming


def test_stage_0_rests_for_a_first_hop_on_a_cpu_always_and_on_a_gpu_when_nobody_else_is_there(whole, monkeypatch):
    def job(first_audio):
        return SimpleNamespace(stream=SimpleNamespace(stats=SimpleNamespace(first_audio_seconds=first_audio)))

    new, playing = job(None), job(0.5)
    for device, streams, jobs, rests in (
        ("cpu", 2, [new, playing], True),
        ("cpu", 2, [playing], False),
        ("cpu", 1, [playing], True),
        ("cuda", 1, [new], True),
        ("cuda", 2, [new], False),
        ("cuda", 2, [new, new], True),
        ("cuda", 1, [playing], False),
    ):
        monkeypatch.setattr(whole, "_device", torch.device(device))
        monkeypatch.setattr(whole, "_streams", set(range(streams)))
        assert whole._stage0_rests(jobs) is rests, (device, streams, rests)


def test_a_segment_is_opened_before_its_first_tokens_are_handed_over(whole, voice, monkeypatch):
    opened = []
    take, worker = whole._worker1.take, whole._worker1
    monkeypatch.setattr(worker, "take", lambda job: opened.append(job.segment.state is not None) or take(job))
    with whole.stream(SpeechRequest(reference=voice, text=TEXT, seed=3)) as stream:
        list(stream)
    assert opened == [True]


def test_request_that_contradicts_the_profiles_law_is_refused(whole, voice):
    with pytest.raises(RequestError, match="asks for standard sampling, the engine draws by ras"):
        whole.stream(SpeechRequest(reference=voice, text=TEXT, sampling=STANDARD))


def test_profile_whole_gives_a_sentence_in_one_piece(whole, voice):
    with whole.stream(SpeechRequest(reference=voice, text=TEXT, seed=3)) as stream:
        chunks = list(stream)
    assert stream.stats.tokens > 60
    assert len(chunks) == 1


def test_engine_tells_what_its_profile_came_to(whole):
    said = whole.describe()
    assert said["profile"] == "whole"
    assert said["sampling law"] == "ras"
    assert said["group"] == "32768 frames"
    assert said["streams"].startswith("64 spoken at a time")


def test_prepared_speech_can_be_spoken_again(whole, voice):
    speech = whole.prepare(SpeechRequest(reference=voice, text="Hello.", seed=3))
    heard = []
    for _ in range(2):
        with whole.speak(speech) as stream:
            heard.append([chunk.samples.tolist() for chunk in stream])
    assert heard[0] == heard[1]
