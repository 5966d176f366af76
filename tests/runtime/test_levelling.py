"""Loudness by the standard, and sentences of one stream that stay together without anything being held back."""

import math

import numpy as np
import pytest

from runtime import Engine, EngineSettings, SpeechRequest, load_clip, resolve_checkpoint
from runtime.levelling import SentenceLeveller, loudness
from tests.conftest import TESTS

RATE = 24_000
SENTENCES = (
    "The river was low that summer.",
    "No.",
    "The captain shouted that every man should leave the ship at once!",
    "I do not know.",
    "By then we had gone.",
    "Why did she never write to us again?",
)


def sine(seconds: float, level_db: float, hertz: float = 997.0, rate: int = RATE) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (10 ** (level_db / 20) * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@pytest.mark.parametrize("rate", [24_000, 44_100, 48_000])
def test_a_sine_has_the_loudness_that_the_standard_gives(rate: int) -> None:
    """BS.1770: 997 Hz at full scale in one channel is -3.01 LUFS."""
    assert loudness(sine(2.0, 0.0, rate=rate), rate) == pytest.approx(-3.01, abs=0.05)
    assert loudness(sine(2.0, -20.0, rate=rate), rate) == pytest.approx(-23.01, abs=0.05)
    assert loudness(sine(2.0, 0.0, 40.0, rate), rate) < -8  # the head does not hear the low
    assert loudness(sine(2.0, 0.0, 8000.0, rate), rate) > 0  # and helps the high


def test_pauses_do_not_count() -> None:
    speech = sine(2.0, -20.0)
    with_pause = np.concatenate([speech, np.zeros(4 * RATE, np.float32), speech])
    assert loudness(with_pause, RATE) == pytest.approx(loudness(speech, RATE), abs=0.4)  # blocks at the borders do
    assert loudness(np.zeros(RATE, np.float32), RATE) == loudness(np.zeros(0, np.float32), RATE) == -math.inf


def test_a_gain_goes_a_part_of_the_way_and_no_further_than_its_bound() -> None:
    leveller = SentenceLeveller(RATE)
    leveller.open(sine(1.0, -20.0), goes_on=False)
    assert leveller.target_lufs == pytest.approx(-23.0, abs=0.1)
    assert np.array_equal(leveller.apply(sine(1.0, -20.0)), sine(1.0, -20.0))  # the first stays as it is
    for level_db, change_db in ((-17.0, -2.4), (-22.0, 1.6), (-40.0, 3.0), (0.0, -3.0)):
        leveller.open(sine(1.0, level_db), goes_on=False)
        assert loudness(leveller.apply(sine(1.0, level_db)), RATE) == pytest.approx(
            level_db - 3.0 + change_db, abs=0.05
        )


def test_silence_sets_no_level() -> None:
    leveller = SentenceLeveller(RATE)
    leveller.open(np.zeros(RATE, np.float32), goes_on=True)
    assert leveller.target_lufs is None
    leveller.open(sine(0.1, -20.0), goes_on=True)
    assert leveller.target_lufs is not None


def test_sentences_of_the_demo_voice_stay_within_two_lu() -> None:
    """Complaint 12. Without the leveller these are 3.0 LU apart."""
    voice = TESTS.parent / "assets" / "voices" / "wren"
    words = voice.with_suffix(".txt").read_text(encoding="utf-8")
    text = " [pause 0.2s] ".join(SENTENCES)
    request = SpeechRequest(load_clip(voice.with_suffix(".wav")), text=text, transcript=words, seed=1)
    with Engine(resolve_checkpoint("demo"), EngineSettings(device="cpu")) as engine, engine.stream(request) as stream:
        whole = np.concatenate([chunk.samples for chunk in stream])
    spoken = stream.stats.spoken
    assert len(spoken) == len(SENTENCES)
    levels = [loudness(whole[each.start :][: each.samples], RATE) for each in spoken]
    assert max(levels) - min(levels) <= 2.0, levels


def test_what_goes_on_later_has_the_level_of_the_whole(engine, voice) -> None:
    text = "One is here. [pause 0.1s] Two is here. [pause 0.1s] Three is here."
    request = SpeechRequest(voice, text=text, seed=4)
    with engine.stream(request) as stream:
        whole = np.concatenate([chunk.samples for chunk in stream])
    level = stream.stats.level_lufs
    later = SpeechRequest(voice, text=text, seed=4, first_sentence=1, level_lufs=level)
    with engine.stream(later) as rest:
        part = np.concatenate([chunk.samples for chunk in rest])
    first = stream.stats.spoken[1].start
    assert np.array_equal(part[rest.stats.spoken[0].start :], whole[first:])
    with engine.stream(SpeechRequest(voice, text="One is here.", seed=4)) as alone:
        list(alone)
    assert alone.stats.level_lufs is None  # one sentence is nobody's company
