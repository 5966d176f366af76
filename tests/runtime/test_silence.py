"""Pauses in sound: exact to the sample, with the quiet of the speech around them counted in."""

import numpy as np
import pytest

from runtime import EndReason, SpeechRequest
from runtime.silence import SilenceKeeper

RATE = 24_000
TEXT = 'Early words. [pause 1.5s] Later words. <break time="250ms"/>[pause 0.25s] The end.'


def noise(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.2, 0.5, round(seconds * RATE)).astype(np.float32)


def quiet(seconds: float) -> np.ndarray:
    return np.full(round(seconds * RATE), 1e-4, np.float32)


def gap(first: list[np.ndarray], second: np.ndarray, seconds: float) -> float:
    """Seconds of quiet that are heard between two sentences."""
    keeper = SilenceKeeper(RATE)
    for chunk in first:
        keeper.sent(chunk)
    before, cut = keeper.before(second, seconds)
    whole = np.concatenate([*first, np.zeros(before, np.float32), second[cut:]])
    loud = np.flatnonzero(np.abs(whole) > 0.01)
    return float(np.diff(loud).max() - 1) / RATE


@pytest.mark.parametrize("edge", [0.0, 0.005, 0.2])
def test_quiet_at_the_edges_counts_towards_a_pause(edge: float) -> None:
    heard = gap([noise(0.3), np.concatenate([noise(0.1), quiet(edge)])], np.concatenate([quiet(edge), noise(0.3)]), 1.5)
    assert heard == pytest.approx(1.5, abs=0.011)


def test_quiet_is_counted_over_chunks() -> None:
    first = [np.concatenate([noise(0.3), quiet(0.1)]), quiet(0.2)]
    assert gap(first, noise(0.3), 0.5) == pytest.approx(0.5, abs=1e-3)


def test_a_pause_shorter_than_the_edges_cuts_the_quiet_that_was_not_sent() -> None:
    first = [np.concatenate([noise(0.3), quiet(0.1)])]
    assert gap(first, np.concatenate([quiet(0.3), noise(0.3)]), 0.2) == pytest.approx(0.2, abs=1e-3)
    assert gap(first, np.concatenate([quiet(0.3), noise(0.3)]), 0.05) == pytest.approx(0.1, abs=1e-3)


def test_nothing_is_cut_where_no_pause_was_asked_for() -> None:
    keeper = SilenceKeeper(RATE)
    keeper.sent(quiet(0.2))
    assert keeper.before(quiet(0.2), 0.0) == (0, 0) and keeper.after(0.0) == 0


def speak(engine, voice, text, **changes):
    with engine.stream(SpeechRequest(reference=voice, text=text, seed=7, **changes)) as stream:
        chunks = list(stream)
    return np.concatenate([chunk.samples for chunk in chunks]), chunks, stream.stats


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stream_holds_its_pauses_to_the_sample(engine, voice, streaming):
    samples, chunks, stats = speak(engine, voice, TEXT, streaming=streaming)
    assert stats.ended in (EndReason.STOP, EndReason.LENGTH)
    first, second, third = stats.spoken
    assert second.start - (first.start + first.samples) == round(1.5 * RATE)
    assert third.start - (second.start + second.samples) == round(0.5 * RATE)
    assert not samples[first.samples : second.start].any() and samples[second.start : second.start + 480].any()
    assert stats.samples == len(samples) == sum(each.samples for each in stats.spoken) + 2 * RATE
    assert [each.text for each in stats.spoken] == ["Early words.", "Later words.", "The end."]
    assert all(each.tokens * 960 == each.samples and each.complete for each in stats.spoken)
    assert sum(each.tokens for each in stats.spoken) == stats.tokens
    assert chunks[-1].is_last


def test_pauses_at_both_ends_are_kept(engine, voice):
    samples, chunks, stats = speak(engine, voice, "[pause 1s] Hello. [pause 2s]")
    (only,) = stats.spoken
    assert only.start == RATE and len(samples) == only.samples + 3 * RATE
    assert not samples[:RATE].any() and not samples[-2 * RATE :].any()
    assert chunks[-1].is_last and stats.sentences == 1


def test_a_pause_changes_no_sample_of_the_words_around_it(engine, voice):
    with_pause, _, stats = speak(engine, voice, "Early words. [pause 1s] Later words.")
    shorter, _, other = speak(engine, voice, "Early words. [pause 0.5s] Later words.")
    for mine, theirs in zip(stats.spoken, other.spoken, strict=True):
        assert np.array_equal(
            with_pause[mine.start : mine.start + mine.samples], shorter[theirs.start : theirs.start + theirs.samples]
        )


def test_a_mark_takes_the_place_of_the_pause_between_sentences(engine, voice, monkeypatch):
    monkeypatch.setattr(engine._worker1, "_pause_seconds", 0.3)
    text = " ".join(["This sentence is one of three that follow each other in a row."] * 3) + "[pause 1s] End."
    _, _, stats = speak(engine, voice, text)
    gaps = [b.start - a.start - a.samples for a, b in zip(stats.spoken, stats.spoken[1:], strict=False)]
    assert gaps == [round(0.3 * RATE)] * (len(gaps) - 1) + [RATE] and len(gaps) > 1


def test_conversion_knows_no_pauses(engine, voice):
    samples, _, stats = speak(engine, voice, "", source=voice)
    assert len(samples) == stats.tokens * 960 == stats.spoken[0].samples
