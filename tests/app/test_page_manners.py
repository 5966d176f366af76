"""Manners of the page: accessible, in two languages, on a phone, by keyboard, asking for consent."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from app.examples import load_examples
from app.settings import Settings
from tests.app.fake_engine import FakeEngine
from tests.app.site import AUDIO, Site, field, probe, upload, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.page]

APP = Path(__file__).parents[2] / "app"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def unfold(page: Page) -> None:
    folds = ("[data-mynah=more] summary", "[data-mynah=spectrum] summary", "#status summary", "#sentences summary")
    for fold in (*folds, *(f"#{name}-fold > button" for name in ("keep", "settings", "tools", "history"))):
        if page.locator(fold).is_visible():
            page.locator(fold).click()


def serious(page: Page) -> list[tuple[str, str]]:
    """What axe has to say against the page: the rule, and the element that breaks it."""
    return [
        (one["id"], node["html"][:120])
        for one in Axe().run(page).response["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{}, PHONE], ids=("wide", "phone"))
def test_axe_finds_nothing_serious(site: Callable[..., Site], scheme: str, size: dict[str, Any]) -> None:
    """With every fold open, with a new voice and then with a saved one."""
    page = site(FakeEngine(seconds=0.5)).visit_and_fill_in(color_scheme=scheme, **size)
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")
    unfold(page)
    page.locator("#history article").wait_for()
    page.wait_for_timeout(400)  # folds slide
    assert serious(page) == []
    field(page, "keep-name").fill("Ada")
    page.locator("#keep").click()
    page.locator("#voice-card strong").wait_for()
    page.locator("#change-fold > button").click()
    page.wait_for_timeout(400)
    assert page.locator("#change").is_visible() and page.locator("#words").is_visible()
    assert serious(page) == []


def test_a_failure_is_as_accessible_as_a_success(site: Callable[..., Site]) -> None:
    page = site(FakeEngine()).visit()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'failed'")
    assert serious(page) == []


def english(page: Page) -> list[str]:
    """Texts on the page that hold English words, but for names."""
    texts: list[str] = page.evaluate(
        """() => {
          const walker = document.createTreeWalker(document.querySelector(".gradio-container"), NodeFilter.SHOW_TEXT);
          const found = [];
          while (walker.nextNode()) {
            const {parentElement, data} = walker.currentNode;
            const others = "textarea, code, kbd, h1, dd, #language, [translate=no]";
            if (parentElement.checkVisibility() && !parentElement.closest(others)) found.push(data.trim());
          }
          for (const place of document.querySelectorAll("[placeholder]")) found.push(place.placeholder);
          return found;
        }"""
    )
    return [text for text in texts if re.search(r"[A-Za-z]{3,}", text) and not re.search("[\u4e00-\u9fff]", text)]


def test_the_page_speaks_chinese_from_head_to_foot(site: Callable[..., Site]) -> None:
    page = site(FakeEngine(seconds=6.0, rtf=0.5)).visit_and_fill_in()
    assert page.get_by_role("button", name="Speak").count() == 1
    page.locator("#language").click()
    assert page.locator("#speak").inner_text() == "朗读" and page.locator("html").get_attribute("lang") == "zh-CN"
    unfold(page)
    page.locator("#speak").click()
    page.get_by_text("正在朗读").wait_for()
    page.get_by_text(re.compile("第 1 句，共 1 句")).wait_for()
    allowed = {"FLAC", "MP3", "SRT", "VTT", "fake", "Top-p", "Top-k"}
    allowed |= {"Heron", "Linnet", "Robin", "Rook", "Wren", "PyTorch = pie torch"}
    names = {"model", "device"}  # of what is running, as the engine says them
    assert [text for text in english(page) if text not in allowed | names and "fake" not in text] == []
    wait_for(page, "p.state === 'done'", seconds=15)
    page.locator("#history-fold > button").click()
    page.locator("#history article").wait_for()
    page.locator("#sentences summary").click()
    field(page, "keep-name").fill("小明")
    page.locator("#keep").click()
    page.locator("#voice-card strong").wait_for()
    page.locator("#change-fold > button").click()
    assert [text for text in english(page) if text not in allowed | names and "fake" not in text] == []
    page.reload()
    page.locator("#speak").wait_for()
    assert page.locator("#speak").inner_text() == "朗读"  # it is remembered
    page.locator("#language").click()
    assert page.locator("#speak").inner_text() == "Speak" and page.get_by_text("What to speak").count() == 1


def test_a_chinese_browser_gets_chinese_and_is_told_of_errors_in_it(site: Callable[..., Site]) -> None:
    page = site(FakeEngine()).visit(locale="zh-CN")
    page.locator("#speak").click()
    page.get_by_text("请先添加声音：上传或录制几秒钟的说话声").wait_for()


def test_the_table_keeps_every_blank() -> None:
    table = json.loads((APP / "chinese.json").read_text(encoding="utf-8"))
    assert [key for key, said in table.items() if key.count("{}") != said.count("{}")] == []


def test_keys_speak_stop_and_play(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=30.0, rtf=0.3)
    page = site(engine).visit_and_fill_in()
    page.locator("#text textarea").press("Control+Enter")
    wait_for(page, "p.state === 'speaking' && p.rms > 0.1")
    page.locator("body").click(position={"x": 5, "y": 5})
    page.keyboard.press("Space")
    wait_for(page, "p.state === 'paused'")
    page.keyboard.press("Space")
    wait_for(page, "p.state === 'speaking'")
    page.keyboard.press("Escape")
    wait_for(page, "p.state === 'stopped'")
    page.locator("#text textarea").press("Space")  # a blank in a text is a blank
    assert probe(page)["state"] == "stopped"


@pytest.mark.parametrize("locale", ["en", "zh-CN"])
def test_a_phone_needs_no_sideways_scrolling(site: Callable[..., Site], locale: str) -> None:
    page = site(FakeEngine(seconds=0.5)).visit_and_fill_in(locale=locale, **PHONE)
    page.locator("#speak").tap()
    wait_for(page, "p.state === 'done'")
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert probe(page)["played"] == probe(page)["received"] > 0


def test_nothing_is_cloned_without_consent(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=0.3)
    page = site(engine).visit()
    page.locator("#text textarea").fill("Hello there.")
    upload(page, AUDIO / "en_clean_24k.m4a")
    page.locator("#speak").click()
    wait_for(page, "p.state === 'failed'")
    assert "belongs to a person" in page.locator("#player [role=alert]").inner_text() and engine.requests == []
    page.locator("#consent input").check()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")


def test_the_seed_is_shown_and_used_again(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=0.3)
    page = site(engine).visit_and_fill_in()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")
    unfold(page)
    assert page.locator("[data-mynah=seed]").inner_text() == "7"
    page.locator("[data-mynah=reuse]").click()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done' && p.log.filter(({event}) => event === 'end').length > 1")
    assert [request.seed for request in engine.requests] == [None, 7]


def test_a_language_that_the_model_does_not_know_is_told_before_it_speaks(site: Callable[..., Site]) -> None:
    page = site(FakeEngine()).visit()
    page.locator("#text textarea").fill("नमस्ते")
    page.locator("#text textarea").blur()
    page.get_by_text("never learned Devanagari letters").wait_for()


def test_examples_need_no_upload(site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    voices = tmp_path / "voices"
    voices.mkdir()
    (voices / "ada.wav").write_bytes((AUDIO / "zero_shot_prompt.wav").read_bytes())
    words = "希望你以后能够做的比我还好呦。"
    (voices / "ada.txt").write_text(words, encoding="utf-8")
    engine = FakeEngine(seconds=0.3)
    monkeypatch.setattr("app.ui.load_examples", lambda: [])
    assert site(engine).visit().locator("#examples").count() == 0  # nothing to try, no row
    monkeypatch.setattr("app.ui.load_examples", lambda: load_examples(voices))
    page = site(engine).visit()
    page.get_by_text("Ada").click()
    page.get_by_text("A good recording.").wait_for()
    assert page.locator("#transcript textarea").input_value() == words
    assert not page.locator("#part [data-ref=stale]").is_visible()
    page.locator("#text textarea").fill("你好。")
    page.locator("#speak").click()  # its owner has agreed already
    wait_for(page, "p.state === 'done'")
    assert engine.requests[0].transcript == words
    page.locator("#reference").get_by_label("Clear").click()
    upload(page, AUDIO / "en_clean_24k.m4a")
    assert not page.locator("#consent input").is_checked()  # another voice is another person's


def test_the_status_line_tells_what_runs_and_its_memory(site: Callable[..., Site]) -> None:
    engine = FakeEngine()
    engine.memory = lambda: "7.5 GB"  # type: ignore[method-assign]
    page = site(engine, Settings()).visit()
    assert "fake" in page.locator("#status summary").inner_text()
    page.get_by_text("7.5 GB").wait_for()
