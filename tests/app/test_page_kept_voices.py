"""Saved voices in the page: kept, chosen, changed, carried and deleted, and out of reach of the cache's addresses."""

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Page

from app.settings import Settings
from app.voices import VoiceLibrary
from tests.app.fake_engine import FakeEngine
from tests.app.site import AUDIO, Site, field, unfold, upload, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.page]

WORDS = "希望你以后能够做的比我还好呦。"


def keep(page: Page, name: str, recording: Path = AUDIO / "zero_shot_prompt.wav", words: str = WORDS) -> None:
    upload(page, recording)
    page.locator("#consent input").check()
    field(page, "transcript").fill(words)
    unfold(page, "keep")
    field(page, "keep-name").fill(name)
    page.locator("#keep").click()
    page.locator("#voice-card strong").wait_for()


def speak(page: Page, runs: int = 1) -> None:
    page.locator("#text textarea").fill("Hello there.")
    page.locator("#speak").click()
    wait_for(page, f"p.state === 'done' && p.log.filter(({{event}}) => event === 'end').length >= {runs}")


def test_a_kept_voice_gives_the_engine_the_same_samples_now_and_after_a_restart(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    settings = Settings(voices=tmp_path / "voices")
    engine = FakeEngine(seconds=0.3)
    page = site(engine, settings).visit()
    upload(page, AUDIO / "zero_shot_prompt.wav")
    page.locator("#consent input").check()
    field(page, "transcript").fill(WORDS)
    speak(page)
    unfold(page, "keep")
    field(page, "keep-name").fill("Ada")
    page.locator("#keep").click()
    card = page.locator("#voice-card")
    card.get_by_text("This voice is mine, or its owner agrees to being cloned").wait_for()
    assert "Ada" in card.inner_text() and WORDS in card.inner_text()
    assert not page.locator("#reference").is_visible()
    speak(page, runs=2)
    page = site(engine, settings).visit()  # another server
    assert VoiceLibrary(tmp_path / "voices").find("ada").transcript == WORDS
    page.locator("#saved input").click()
    page.get_by_role("option", name="Ada").click()
    page.locator("#voice-card strong").wait_for()
    speak(page)
    new, kept, restarted = engine.requests
    for request in (kept, restarted):
        assert np.array_equal(request.reference.samples, new.reference.samples) and request.transcript == WORDS


def test_a_voice_is_renamed_carried_and_deleted(site: Callable[..., Site], tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path / "voices")
    here = site(FakeEngine(), Settings(voices=library.folder))
    page = here.visit()
    assert not page.locator("#saved").is_visible()  # a newcomer has nothing to choose from
    keep(page, "Ada")
    unfold(page, "change")
    field(page, "change-name").fill("Ada Lovelace")
    field(page, "change-description").fill("calm")
    page.locator("#change").click()
    page.locator("#voice-card").get_by_text("Ada Lovelace").wait_for()
    assert library.find("ada lovelace").description == "calm"
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    archive = tmp_path / download.value.suggested_filename
    assert archive.name == "Ada Lovelace.zip"
    download.value.save_as(archive)
    page.locator("#voice-card").get_by_role("button", name="Delete").click()
    assert [voice.name for voice in library.voices()] == ["Ada Lovelace"]  # not at the first click
    page.get_by_role("button", name="Really delete").click()
    page.locator("#reference").wait_for()
    assert library.voices() == [] and not page.locator("#saved").is_visible()
    unfold(page, "keep")
    page.locator("#keep-fold input[type=file]").set_input_files(str(archive))
    page.locator("#voice-card").get_by_text("Ada Lovelace").wait_for()
    assert library.find("Ada Lovelace").transcript == WORDS


def test_a_name_that_is_taken_or_missing_consent_is_told(site: Callable[..., Site], tmp_path: Path) -> None:
    page = site(FakeEngine(), Settings(voices=tmp_path / "voices")).visit()
    keep(page, "Ada")
    page.locator("#saved input").click()
    page.get_by_role("option", name="A new recording").click()
    upload(page, AUDIO / "en_clean_24k.m4a")
    field(page, "keep-name").fill("ada")
    page.locator("#keep").click()
    page.get_by_text("a voice belongs to a person").wait_for()
    page.locator("#consent input").check()
    page.locator("#keep").click()
    page.get_by_text("a voice is called 'Ada' already").wait_for()


def test_nothing_of_a_voice_is_reachable_by_an_address_of_the_cache(site: Callable[..., Site], tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path / "voices")
    page = site(FakeEngine(seconds=0.3), Settings(voices=library.folder)).visit()
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    upload(page, AUDIO / "zero_shot_prompt.wav")
    uploaded = [address for address in fetched if "zero_shot_prompt" in address]
    assert uploaded and urllib.request.urlopen(uploaded[0]).status == 200  # while it is a recording on the page
    page.locator("#consent input").check()
    unfold(page, "keep")
    field(page, "keep-name").fill("Ada")
    page.locator("#keep").click()
    page.locator("#voice-card strong").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert download.value.url.startswith("blob:")
    page.get_by_role("button", name="Listen").click()
    speak(page)
    root = "{0.scheme}://{0.netloc}".format(urlsplit(page.url))
    clip = next(library.folder.glob("*/clip.*"))
    for address in [*uploaded, f"{root}/gradio_api/file={quote(str(clip))}", f"{root}/file={quote(str(clip))}"]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address)
        assert refused.value.code in (403, 404)
    made = {"result", "save-flac", "save-mp3"}  # the speech that was made may be fetched, and nothing else is offered
    links = page.evaluate(
        "[...document.querySelectorAll('a[href*=\"file=\"], audio[src*=\"file=\"]')].map(a => a.closest('[id]').id)"
    )
    assert set(links) <= made


def test_a_voice_of_a_visit_survives_a_reload_and_is_nobody_elses(site: Callable[..., Site]) -> None:
    here = site(FakeEngine(seconds=0.3))  # keeps nothing, as a Space does
    page = here.visit()
    keep(page, "Ada")
    page.reload()
    page.locator("#saved").wait_for()
    page.locator("#saved input").click()
    assert [text.strip("✓\n ") for text in page.get_by_role("option").all_inner_texts()] == ["A new recording", "Ada"]
    stranger = here.visit()
    stranger.wait_for_timeout(700)
    assert not stranger.locator("#saved").is_visible()
