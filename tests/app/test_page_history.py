"""What was made, in the page: heard again, carried away, gone on with, mended sentence by sentence, deleted."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pysubs2
import pytest
from playwright.sync_api import Page

from app.audio_format import to_pcm16
from app.history import History
from app.settings import Settings
from app.voices import VoiceLibrary
from runtime import Engine
from tests.app.fake_engine import RATE, FakeEngine, tone
from tests.app.site import AUDIO, Site, field, probe, result_of, unfold, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.page]

TEXT = "One is here. Two is here. Three is here. Four is here"


def speak(page: Page, text: str = TEXT) -> None:
    page.locator("#text textarea").fill(text)
    page.locator("#speak").click()


def wait_until_done(page: Page, runs: int = 1) -> None:
    wait_for(page, f"p.state === 'done' && p.log.filter(({{event}}) => event === 'end').length >= {runs}", seconds=60)


def entry_button(page: Page, name: str) -> None:
    page.locator("#history article").first.get_by_role("button", name=name).click()


def test_what_was_made_is_heard_again_after_a_restart(site: Callable[..., Site], tmp_path: Path) -> None:
    settings = Settings(history=tmp_path / "history")
    page = site(FakeEngine(seconds=2.0, splits=True), settings).visit_and_fill_in()
    assert not page.locator("#history-fold").is_visible()  # a newcomer has none
    speak(page)
    wait_until_done(page)
    page = site(FakeEngine(), settings).visit()
    unfold(page, "history")
    page.locator("#history article").get_by_text("One is here").wait_for()
    entry_button(page, "Play")
    wait_until_done(page)
    assert probe(page)["played"] == probe(page)["received"] == 2 * RATE
    assert result_of(page) == to_pcm16(tone(0, 2 * RATE))
    page.locator("#sentences summary").click()
    page.get_by_role("button", name="Play sentence 2").click()
    wait_until_done(page, runs=2)
    assert probe(page)["received"] == RATE // 2
    for kind in ("SRT", "VTT"):
        with page.expect_download() as download:
            entry_button(page, f"Save subtitles as {kind}")
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        lines = pysubs2.load(str(path))
        assert [line.plaintext for line in lines] == TEXT.split(". ") and [line.start for line in lines] == [
            *(0, 500, 1000, 1500)
        ]
    entry_button(page, "Delete")
    entry_button(page, "Really delete")
    page.locator("#history article").wait_for(state="detached")
    assert History(tmp_path / "history").entries() == []


def test_a_job_that_a_reload_broke_off_keeps_its_sentences_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, site: Callable[..., Site], engine: Engine, tmp_path: Path
) -> None:
    """Complaint 21. The real engine on tiny weights: what it goes on with is what it would have said."""
    monkeypatch.setattr(engine, "close", lambda: None)  # other tests go on with it
    here = site(engine, Settings(history=tmp_path / "history"))
    text = "\n".join(f"This is sentence number {word}." for word in ("one", "two", "three", "four", "five", "six"))
    page = here.visit_and_fill_in()
    unfold(page, "settings")
    field(page, "seed").fill("5")
    speak(page, text)
    wait_until_done(page)
    whole = result_of(page)
    page.locator("#speak").click()
    history = History(tmp_path / "history")
    until = time.monotonic() + 60
    while len(history.entries()) < 2 or not history.entries()[0].sentences:
        assert time.monotonic() < until
        time.sleep(0.01)
    page.reload()
    page.locator("#speak").wait_for()
    while history.entries()[0].ended is None or engine.live_streams:
        assert time.monotonic() < until
        time.sleep(0.01)
    broken = history.entries()[0]
    assert 0 < len(broken.sentences) < broken.planned  # else it was too fast to be broken off
    unfold(page, "history")
    page.get_by_text(f"{len(broken.sentences)} of {broken.planned} sentences").wait_for()
    entry_button(page, "Go on")
    wait_until_done(page)
    assert result_of(page) == whole and not history.entries()[0].resumable


def test_an_odd_sentence_is_flagged_and_said_again_in_its_place(site: Callable[..., Site], tmp_path: Path) -> None:
    engine = FakeEngine(seconds=2.0, splits=True, makes_speech=True, expects=4.0)
    page = site(engine, Settings(history=tmp_path / "history")).visit_and_fill_in()
    speak(page)
    wait_until_done(page)
    page.get_by_text("Sentences: 4 to listen to").wait_for()
    assert "too short or too long" in page.locator("#player [role=alert]").inner_text()
    engine.seconds, engine.expects = 0.7, 0.7
    page.get_by_role("button", name="Say sentence 2 again").click()
    page.get_by_text("Sentences: 3 to listen to").wait_for()
    page.get_by_text("0.7 s, said again").wait_for()
    again = engine.requests[-1]
    assert again.text == "Two is here" and again.seed != engine.requests[0].seed
    made = np.frombuffer(result_of(page), "<i2").astype(np.int32)
    first, last = to_pcm16(tone(0, RATE // 2)), to_pcm16(tone(RATE, RATE))
    expected = np.frombuffer(first + to_pcm16(tone(0, int(0.7 * RATE))) + last, "<i2").astype(np.int32)
    assert len(made) == len(expected) and np.abs(made - expected).max() <= 1


def test_all_settings_of_a_job_are_used_again(site: Callable[..., Site], tmp_path: Path) -> None:
    engine = FakeEngine(seconds=0.3)
    here = site(engine, Settings(history=tmp_path / "history"))
    page = here.visit()
    page.locator("#reference input[type=file]").set_input_files(str(AUDIO / "en_clean_24k.m4a"))
    page.locator("#part [data-ref=headline]:not(:empty)").wait_for()
    page.locator("#consent input").check()
    page.get_by_text("A text, in a certain way").click()
    field(page, "instruction").fill("softly")
    unfold(page, "settings")
    field(page, "seed").fill("11")
    page.locator("#settings-fold").get_by_label("number input for Speed").fill("1.25")
    page.locator("#settings-fold").get_by_label("number input for Temperature").fill("0.8")
    unfold(page, "tools")
    field(page, "words").fill("PyTorch = pie torch")
    speak(page, "Try PyTorch.")
    wait_until_done(page)
    page = here.visit()
    unfold(page, "history")
    entry_button(page, "Use its settings")
    page.locator("#part [data-ref=headline]:not(:empty)").wait_for()
    assert page.locator("#text textarea").input_value() == "Try PyTorch."
    page.locator("#speak").click()
    wait_until_done(page)
    first, second = engine.requests
    names = ("text", "transcript", "instruction", "seed", "speed", "normalize", "trim", "words", "sampling")
    assert [getattr(first, name) for name in names] == [getattr(second, name) for name in names]
    assert (first.seed, first.speed, first.instruction) == (11, 1.25, "softly")
    assert len(first.reference.samples) == len(second.reference.samples)
    assert np.abs(first.reference.samples - second.reference.samples).max() < 2e-4  # once through 16 bits


def test_what_was_made_in_a_visit_is_nobody_elses(site: Callable[..., Site]) -> None:
    here = site(FakeEngine(seconds=0.5))
    page = here.visit_and_fill_in()
    speak(page)
    wait_until_done(page)
    page.reload()
    unfold(page, "history")
    page.locator("#history article").wait_for()
    stranger = here.visit()
    stranger.wait_for_timeout(700)
    assert not stranger.locator("#history-fold").is_visible()


def test_a_script_is_spoken_kept_and_mended_with_its_voices(site: Callable[..., Site], tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path / "voices")
    library.add("Ada", AUDIO / "zero_shot_prompt.wav", consent="my own voice", transcript="希望你以后")
    library.add("Bob", AUDIO / "en_clean_24k.m4a", consent="my own voice")
    engine = FakeEngine(seconds=0.4, splits=True)
    page = site(engine, Settings(voices=library.folder, history=tmp_path / "history")).visit()
    unfold(page, "tools")
    page.locator("#script input").check()
    speak(page, "Ada: One. Two\n# a pause\nBob: Three")
    wait_until_done(page)
    assert [(request.text, request.transcript) for request in engine.requests] == [
        ("One. Two", "希望你以后"),
        ("Three", None),
    ]
    assert probe(page)["received"] == 1.2 * RATE  # two lines and the pause between them
    page.locator("#sentences summary").click()
    page.get_by_role("button", name="Say sentence 3 again").click()
    page.get_by_text("said again").wait_for()
    assert engine.requests[-1].text == "Three"
    assert np.array_equal(engine.requests[-1].reference.samples, library.clip("Bob").samples)
    page.reload()
    unfold(page, "history")
    entry_button(page, "Use its settings")
    unfold(page, "tools")
    page.locator("#script input:checked").wait_for()
    assert page.locator("#text textarea").input_value().startswith("Ada: One.")
