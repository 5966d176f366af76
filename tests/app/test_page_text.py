"""Text tools in the page: the text as it will be spoken, pauses, pronunciations, the word list, scripts."""

import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from runtime import Engine, SpeechPlan, SpeechRequest
from tests.app.fake_engine import FakeEngine
from tests.app.site import Site, field, unfold, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.page]


def planned(page: Page, text: str) -> str:
    field(page, "text").fill(text)
    field(page, "text").blur()
    return page.locator("#plan").inner_text()


def test_a_text_is_shown_as_it_will_be_spoken_before_it_is(
    monkeypatch: pytest.MonkeyPatch, site: Callable[..., Site], engine: Engine
) -> None:
    """Complaints 11, 13, 15 and 16: words, pauses and readings, with the seconds that they take."""
    monkeypatch.setattr(engine, "close", lambda: None)  # other tests go on with it
    page = site(engine).visit()
    unfold(page, "tools")
    page.get_by_text("Write a text to see it here.").wait_for()
    planned(page, "It costs 5 euros. [pause 1.5s] Then {pause} PyTorch ran.")
    plan = page.locator("#plan")
    plan.get_by_text("It costs five euros.", exact=True).wait_for()
    plan.get_by_text("It costs 5 euros.").wait_for()  # beside what was written
    plan.get_by_text("pause of 1.50 s").wait_for()
    plan.get_by_text("not spoken, as the model has no such mark: {pause}").wait_for()
    plan.get_by_text("2 sentences, about").wait_for()
    field(page, "words").fill("PyTorch = pie torch")
    field(page, "words").blur()
    plan.get_by_text("Then pie torch ran.").wait_for()
    planned(page, "[hang2][zhang3] 来了。")
    plan.get_by_text("[h][áng][zh][ǎng]").wait_for()
    planned(page, "[pause 99s] no")
    plan.get_by_text("is out of bounds; a pause lasts 0.05 to 10 s").wait_for()
    planned(page, "नमस्ते")
    plan.get_by_text("does not know this writing").wait_for()


def test_the_word_list_is_kept_in_the_browser_and_reaches_the_engine(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=0.3)
    here = site(engine)
    page = here.visit_and_fill_in()
    unfold(page, "tools")
    field(page, "words").fill("PyTorch = pie torch")
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")
    assert engine.requests[0].words == {"PyTorch": "pie torch"}
    page.reload()
    unfold(page, "tools")
    page.wait_for_function("document.querySelector('#words textarea').value === 'PyTorch = pie torch'")
    stranger = here.visit()
    unfold(stranger, "tools")
    stranger.wait_for_timeout(500)
    assert field(stranger, "words").input_value() == ""


def test_a_list_or_a_script_that_cannot_be_read_is_told_with_its_line(site: Callable[..., Site]) -> None:
    engine = FakeEngine()
    page = site(engine).visit_and_fill_in()
    unfold(page, "tools")
    field(page, "words").fill("PyTorch = pie torch\nnonsense")
    page.locator("#speak").click()
    wait_for(page, "p.state === 'failed'")
    assert "line 2 of the word list" in page.locator("#player [role=alert]").inner_text()
    field(page, "words").fill("")
    page.locator("#script input").check()
    field(page, "text").fill("Nobody: Hello.")
    page.locator("#speak").click()
    wait_for(page, "p.message.includes('line 1 of the script')")
    assert "no voice is called 'Nobody'" in page.locator("#player [role=alert]").inner_text()
    assert engine.requests == []


def test_what_changes_while_a_plan_is_made_is_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch, site: Callable[..., Site]
) -> None:
    engine = FakeEngine()
    plan, waits = engine.plan, []

    def slow_plan(request: SpeechRequest) -> SpeechPlan:
        waits.append(request.text)
        time.sleep(0.7)
        return plan(request)

    monkeypatch.setattr(engine, "plan", slow_plan)
    page = site(engine).visit()
    unfold(page, "tools")
    for text in ("A first text.", "A second text.", "A third text."):
        field(page, "text").fill(text)
        field(page, "text").blur()
    page.locator("#plan").get_by_text("A third text.").wait_for(timeout=8000)
    assert len(waits) < 4  # not one for each, when they come so fast
