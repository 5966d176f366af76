"""Profiles: settings that belong together, and what they refuse."""

from dataclasses import replace

import pytest

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
