"""The verdict on a reference: what is measured on real clips, and where the proposed part begins and ends."""

import time
from pathlib import Path

import numpy as np
import pytest

from app.reference_check import (
    LONG,
    SpeechDetector,
    channels_differ,
    check,
    clipped_places,
    close_end,
    cut,
    ends_in_pauses,
    noise_levels,
    propose_window,
    speech_spans,
    transcript_doubt,
)
from runtime import AudioClip, load_clip

AUDIO = Path(__file__).parents[1] / "audio"
CLIPS = sorted(path.name for path in AUDIO.iterdir() if path.suffix != ".md")


@pytest.fixture(scope="module")
def detector() -> SpeechDetector:
    return SpeechDetector()


def told(name: str, detector: SpeechDetector) -> str:
    return " ".join(check(load_clip(AUDIO / name), detector).remarks)


@pytest.mark.parametrize("name", CLIPS)
def test_every_verdict_comes_within_a_second_and_proposes_a_part_of_the_clip(
    name: str, detector: SpeechDetector
) -> None:
    began = time.monotonic()
    clip = load_clip(AUDIO / name)
    report = check(clip, detector)
    assert time.monotonic() - began < 1.0
    begin, end = report.window
    assert 0 <= begin < end <= clip.seconds + 0.001 and end - begin <= LONG + 0.5


def test_clean_clips_are_good_and_the_others_say_why_not(detector: SpeechDetector) -> None:
    for name in ("cross_lingual_prompt.wav", "en_clean_24k.m4a"):
        assert check(load_clip(AUDIO / name), detector).level == "good", name
    assert "There is noise" in told("en_noisy_48k_mono.wav", detector)
    assert "It is quiet (-26 dB" in told("zh_quiet_16k_mono.wav", detector)
    assert "longer than 30 s" in told("multilingual_60s_24k.mp3", detector)
    assert "It is short" in told("en_u8_44k1_mono.wav", detector)


def test_a_tone_silence_and_a_blink_are_no_voice(detector: SpeechDetector) -> None:
    tone = 0.5 * np.sin(np.arange(48_000) * 0.1).astype(np.float32)
    cases = {"No speech": tone, "silent": np.zeros(48_000, np.float32), "0.01 s long": tone[:240]}
    for words, samples in cases.items():
        report = check(AudioClip(samples, 24_000), detector)
        assert report.level == "bad" and words in report.remarks[0]


def test_the_proposed_part_begins_and_ends_in_pauses(detector: SpeechDetector) -> None:
    for name in ("multilingual_60s_24k.mp3", "jfk_44k1_stereo.flac", "cross_lingual_prompt.wav"):
        report = check(load_clip(AUDIO / name), detector)
        assert ends_in_pauses(report.speech, report.window), name


def test_a_clip_cut_in_mid_word_is_used_up_to_the_pause_before(detector: SpeechDetector) -> None:
    clip = load_clip(AUDIO / "jfk_44k1_stereo.flac")
    ragged = AudioClip(clip.samples[: int(9.2 * clip.sample_rate)], clip.sample_rate)  # inside the last phrase
    report = check(ragged, detector)
    assert 7.6 < report.window[1] < 8.3
    assert "It ends in mid-word; the lit part ends in the pause before." in report.remarks


def test_windows_follow_the_pauses() -> None:
    assert propose_window((), 4.0) == (0.0, 4.0)
    assert propose_window(((1.0, 5.0),), 8.0) == (0.75, 5.25)
    assert propose_window(((0.1, 5.0),), 5.1) == (0.0, 5.1)  # what silence there is
    forty = tuple((float(s), s + 3.5) for s in range(0, 40, 4))
    begin, end = propose_window(forty, 40.0)
    assert end - begin <= LONG and ends_in_pauses(forty, (begin, end))
    assert propose_window(((0.0, 40.0),), 40.0) == (0.0, LONG)  # somebody who never pauses


def test_short_holes_belong_to_speech_and_clicks_do_not() -> None:
    probabilities = np.zeros(100)
    probabilities[10:20] = probabilities[22:40] = 0.9
    probabilities[60:62] = 0.9
    assert speech_spans(probabilities) == ((10 * 0.032, 40 * 0.032),)


def test_noise_is_measured_in_the_pauses() -> None:
    frames = np.repeat([0.01, 0.1, 0.01], 10)
    samples = np.repeat(frames, 512).astype(np.float32)
    noise, above = noise_levels(samples, np.where(frames > 0.05, 1.0, 0.0))
    assert noise == pytest.approx(-40, abs=0.1) and above == pytest.approx(20, abs=0.1)
    assert noise_levels(samples, np.ones(30)) == (None, None)


def test_clipping_is_a_flat_top_and_not_a_loud_one() -> None:
    wave = np.sin(np.arange(2400) * 2 * np.pi / 240).astype(np.float32)
    assert clipped_places(wave * 0.5) == 0
    assert clipped_places(np.clip(1.5 * wave, -1, 1)) == 20
    assert clipped_places(np.float32([0, 1, 0, -1] * 50)) == 0


def test_different_voices_left_and_right_are_told(tmp_path: Path) -> None:
    assert channels_differ(AUDIO / "two_voices_16k_stereo.wav")
    assert not channels_differ(AUDIO / "jfk_44k1_stereo.flac")
    assert not channels_differ(AUDIO / "zero_shot_prompt.wav")
    assert not channels_differ(AUDIO / "en_clean_24k.m4a")


def test_words_that_cannot_be_what_is_said_are_questioned() -> None:
    assert transcript_doubt("希望你以后能够做的比我还好呦。", 2.9) is None
    assert transcript_doubt("He began a confused complaint against the wizard.", 4.0) is None
    assert "too many" in (transcript_doubt("希望你以后能够做的比我还好呦。" * 4, 2.9) or "")
    assert "too few" in (transcript_doubt("Yes.", 10.0) or "")


def test_a_cut_takes_its_part() -> None:
    clip = AudioClip(np.arange(1000, dtype=np.float32), 1000)
    assert cut(clip, (0.25, 0.5)).samples.tolist() == list(range(250, 500))
    assert cut(clip, None) is clip


def test_an_end_in_mid_word_gets_a_moment_of_silence_and_a_pause_none() -> None:
    """Complaint 8, input 13."""
    jfk = load_clip(AUDIO / "jfk_44k1_stereo.flac")
    ragged = AudioClip(jfk.samples[: 6 * jfk.sample_rate], jfk.sample_rate)
    closed = close_end(ragged)
    assert closed.seconds == pytest.approx(6.2) and np.array_equal(
        closed.samples[: len(ragged.samples)], ragged.samples
    )
    for name in ("heron", "rook", "wren"):
        whole = load_clip(AUDIO.parents[1] / "assets" / "voices" / f"{name}.wav")
        assert close_end(whole) is whole
    empty = AudioClip(np.zeros(0, np.float32), 24_000)
    assert close_end(empty) is empty
