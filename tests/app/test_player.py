"""The player without Gradio: an engine of a few lines in the page sends a tone at its own pace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.app.site import probe, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.page]

APP = Path(__file__).parents[2] / "app"
RATE = 24_000
ENGINE = """
window.speak = async ({seconds, rtf, chunk = 0.2, expected = seconds, usual = null}) => {
  const job = mynahPlayer.begin();
  const sleep = (time) => new Promise((done) => setTimeout(done, 1000 * time));
  const began = performance.now() / 1000;
  mynahPlayer.take({job, state: "preparing"});
  for (let index = 0, made = 0; made < seconds - 1e-6; index++) {
    await sleep(Math.max(0, began + rtf * (made + chunk) - performance.now() / 1000));
    const pcm = Int16Array.from({length: Math.round(chunk * 24000)},
      (_, i) => 16000 * Math.sin(2 * Math.PI * 1000 * (made + i / 24000)));
    made += chunk;
    const bytes = String.fromCharCode(...new Uint8Array(pcm.buffer));
    const pace = index ? (performance.now() / 1000 - began - rtf * chunk) / (made - chunk) : usual;
    mynahPlayer.take({job, state: "speaking", index, rate: 24000, pcm: btoa(bytes), pace, expected,
      last: made > seconds - 1e-6, figures: {seconds: made}});
  }
  mynahPlayer.take({job, state: "done", message: "", figures: {seconds}});
};
"""


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    context = chromium.new_context()
    page = context.new_page()
    page.route("http://localhost/", lambda route: route.fulfill(body="<button>go</button>", content_type="text/html"))
    page.goto("http://localhost/")
    for name in ("sinks", "player", "drawings"):
        page.add_script_tag(path=APP / f"{name}.js")
    page.add_script_tag(content=ENGINE)
    yield page
    context.close()


def speak(page: Page, **how: Any) -> None:
    page.evaluate("how => { document.querySelector('button').onclick = () => speak(how); }", how)
    page.get_by_role("button").click()


def test_an_engine_faster_than_sound_leaves_no_hole(page: Page) -> None:
    speak(page, seconds=2.0, rtf=0.6)
    wait_for(page, "p.state === 'done'")
    done = probe(page)
    assert done["played"] == done["received"] == 2 * RATE and (done["underruns"], done["lost"]) == (0, 0)


def test_a_page_too_busy_to_show_each_message_loses_no_sound(page: Page) -> None:
    """Of values that arrive together Gradio shows the last: it repeats what was sent a moment ago."""
    page.evaluate("""() => {
      const job = mynahPlayer.begin();
      const pcm = btoa("\\0".repeat(4800));
      const chunk = (index) => ({index, rate: 24000, pcm, last: index === 2, pace: 0.1, expected: 0.3});
      mynahPlayer.take({job, state: "speaking", ...chunk(1), earlier: [chunk(0)]});
      mynahPlayer.take({job, state: "done", message: "", earlier: [chunk(0), chunk(1), chunk(2)]});
    }""")
    wait_for(page, "p.state === 'done'")
    done = probe(page)
    assert done["played"] == done["received"] == 3 * 2400 and done["lost"] == 0


@pytest.mark.parametrize("usual", [None, 0.6, 0.9])
def test_an_engine_that_is_not_known_to_be_slow_is_heard_at_its_first_chunk(page: Page, usual: float | None) -> None:
    speak(page, seconds=3.0, rtf=0.8, chunk=1.0, usual=usual)
    wait_for(page, "p.heard !== null")
    at = {event["event"]: event["at"] for event in probe(page)["log"]}
    assert at["heard"] - at["first chunk"] <= 150
    wait_for(page, "p.state === 'done'")
    assert probe(page)["underruns"] == 0


def test_an_engine_that_turns_out_slow_makes_its_listener_wait_once(page: Page) -> None:
    """Nobody knew its pace at the first chunk; at the first underrun it is known, and the lead lasts to the end."""
    speak(page, seconds=4.0, rtf=1.3, chunk=0.8)
    wait_for(page, "p.state === 'buffering' && p.underruns === 1")
    wait_for(page, "p.state === 'done'", seconds=12)
    done = probe(page)
    assert done["played"] == done["received"] == 4 * RATE and done["underruns"] == 1, done["log"]


def test_an_engine_that_is_known_to_be_slow_gets_a_lead_and_leaves_no_hole(page: Page) -> None:
    speak(page, seconds=4.0, rtf=1.3, chunk=0.4, usual=1.3)
    wait_for(page, "p.state === 'buffering' && p.received > 0")
    wait_for(page, "p.state === 'done'", seconds=12)
    assert probe(page)["underruns"] == 0, probe(page)["log"]


def test_an_engine_slower_than_was_thought_buffers_visibly(page: Page) -> None:
    """The text promised one second and became four: the sink runs dry, and what follows waits for more each time."""
    speak(page, seconds=4.0, rtf=1.3, expected=1.0)
    wait_for(page, "p.state === 'buffering' && p.underruns === 1")
    wait_for(page, "p.state === 'done'", seconds=12)
    done = probe(page)
    assert done["played"] == done["received"] == 4 * RATE
    assert done["underruns"] <= 3, done["log"]


def test_what_was_made_can_be_paused_sought_in_and_played_again(page: Page) -> None:
    speak(page, seconds=3.0, rtf=0.2)
    wait_for(page, "p.state === 'speaking' && p.played > 6000")
    page.evaluate("mynahPlayer.toggle()")
    paused = probe(page)
    page.wait_for_timeout(300)
    later = probe(page)
    assert later["state"] == "paused" and later["played"] == paused["played"] and later["rms"] < 0.01
    page.evaluate("mynahPlayer.seek(24000 * 2.5)")
    wait_for(page, "p.state === 'done'", seconds=3)
    assert probe(page)["played"] == probe(page)["received"] == 3 * RATE
    page.evaluate("mynahPlayer.toggle()")  # from the beginning
    wait_for(page, "p.state === 'speaking' && p.played > 0 && p.played < 24000 && p.rms > 0.1")
    wait_for(page, "p.state === 'done' && p.played === p.received")
    assert probe(page)["underruns"] == 0


def test_sound_that_is_made_meanwhile_waits_for_a_pause_to_end(page: Page) -> None:
    speak(page, seconds=2.0, rtf=0.8)
    wait_for(page, "p.played > 2000")
    page.evaluate("mynahPlayer.toggle()")
    wait_for(page, "p.received === 48000")
    assert probe(page)["state"] == "paused"
    page.evaluate("mynahPlayer.toggle()")
    wait_for(page, "p.state === 'done'")
    assert probe(page)["played"] == 2 * RATE


def test_what_was_stopped_can_still_be_played(page: Page) -> None:
    speak(page, seconds=60.0, rtf=0.5)
    wait_for(page, "p.played > 12000")
    page.evaluate("mynahPlayer.stop()")
    page.wait_for_timeout(300)
    stopped = probe(page)
    assert stopped["state"] == "stopped" and stopped["rms"] < 0.01
    page.evaluate("mynahPlayer.seek(0)")
    wait_for(page, "p.state === 'speaking' && p.rms > 0.1")
    wait_for(page, "p.state === 'stopped'")
    assert probe(page)["played"] == probe(page)["received"] == stopped["received"]


def test_volume_is_heard(page: Page) -> None:
    speak(page, seconds=3.0, rtf=0.2)
    wait_for(page, "p.rms > 0.1")
    page.evaluate("mynahPlayer.setVolume(0)")
    wait_for(page, "p.state === 'speaking' && p.rms < 0.01", seconds=1)


def test_the_timeline_tells_how_far_ahead_the_engine_is(page: Page) -> None:
    speak(page, seconds=2.0, rtf=0.3)
    wait_for(page, "p.state === 'done'")
    points = page.evaluate("mynahPlayer.timeline")
    assert points[-1]["made"] == 2 * RATE and points[-1]["played"] > 1.9 * RATE
    assert all(point["played"] <= point["made"] for point in points)
    assert max(point["made"] - point["played"] for point in points) > RATE  # at least a second ahead


def test_the_spectrum_has_the_tone_where_it_is(page: Page) -> None:
    powers = page.evaluate(
        "mynahSpectrum(Float32Array.from({length: 600}, (_, i) => Math.sin(2 * Math.PI * i * 3000 / 24000)), 0)"
    )
    assert len(powers) == 256 and powers.index(max(powers)) == 64  # 46.875 Hz a bin
    assert abs(max(powers)) < 0.1 and powers[128] < -60
