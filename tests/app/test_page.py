"""Speaking in the page: what is sent is heard, at once and whole, and Stop means stop."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile

from app.audio_format import to_pcm16
from app.settings import Settings
from runtime import Engine
from tests.app.fake_engine import RATE, FakeEngine, tone
from tests.app.site import INSECURE_HOST, Site, probe, result_of, wait_for

pytestmark = pytest.mark.browser

AT_ONCE = 0.3  # seconds from the click on Stop to an idle engine


def test_sound_is_heard_before_the_request_has_ended_and_every_sample_of_it(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=3.0, rtf=0.5, chunk_seconds=0.2)
    here = site(engine)
    page = here.visit()
    assert probe(page)["context"] == "none"  # a context made before a gesture would stay suspended
    page.close()
    page = here.visit_and_fill_in()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'speaking' && p.rms > 0.1")
    before = probe(page)
    page.wait_for_timeout(500)
    after = probe(page)
    assert engine.streams[0].stats.ended is None  # it is still being made
    assert after["context"] == "running" and after["rms"] > 0.1
    assert 0.3 < after["currentTime"] - before["currentTime"] < 0.9
    assert 0.3 * RATE < after["played"] - before["played"] < 0.9 * RATE
    wait_for(page, "p.state === 'done'")
    page.wait_for_timeout(200)
    done = probe(page)
    assert done["sink"] == "worklet" and done["rms"] < 0.01
    assert done["played"] == done["received"] == 3 * RATE
    assert (done["underruns"], done["lost"]) == (0, 0)
    first_pcm = next(event["at"] for event in done["log"] if event["event"] == "first chunk")
    heard = next(event["at"] for event in done["log"] if event["event"] == "heard")
    assert heard - first_pcm < 400  # ms, on a machine that may be busy; the wait for a second chunk included
    assert page.locator("#player [data-mynah=tokens]").text_content() == "75"
    assert result_of(page) == to_pcm16(tone(0, 3 * RATE))


def test_a_click_is_heard_soon_after_the_engines_first_chunk(site: Callable[..., Site]) -> None:
    """Complaint 1: the median of five clicks, from the engine's first chunk to the first sample that is heard."""
    engine = FakeEngine(seconds=0.8, rtf=0.3)
    page = site(engine).visit_and_fill_in()
    waits = []
    for _ in range(5):
        page.locator("#speak").click()
        wait_for(page, "p.heard !== null")
        wait_for(page, "p.state === 'done'")
        done = probe(page)
        clicked_at = [event["at"] for event in done["log"] if event["event"] == "begin"][-1] / 1000
        waits.append(clicked_at + done["heard"] - (engine.streams[-1].first_at or 0))
    assert sorted(waits)[2] <= 0.15, waits


def test_stop_ends_the_engine_at_once_and_keeps_what_was_made(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=60.0, rtf=0.5)
    here = site(engine)
    page = here.visit_and_fill_in()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'speaking' && p.played > 4000")
    page.locator("#stop").click()
    wait_for(page, "p.state === 'stopped' && p.rms < 0.01")
    clicked_at = next(event["at"] for event in probe(page)["log"] if event["event"] == "stop") / 1000
    assert engine.streams[0].closed_at is not None and engine.streams[0].closed_at - clicked_at < AT_ONCE
    made = result_of(page)
    assert len(made) == 2 * engine.streams[0].stats.samples > 0
    page.locator("#speak").click()  # and it speaks again
    wait_for(page, "p.state === 'speaking' && p.rms > 0.1")


def test_a_closed_tab_ends_its_stream(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=60.0, rtf=0.5)
    here = site(engine)
    page = here.visit_and_fill_in()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'speaking'")
    closed_at = time.time()
    page.close()
    while engine.streams[0].closed_at is None and time.time() - closed_at < 5:
        time.sleep(0.02)
    assert engine.streams[0].closed_at is not None and engine.streams[0].closed_at - closed_at < 1


def test_every_format_can_be_saved(site: Callable[..., Site], tmp_path: Path) -> None:
    page = site(FakeEngine(seconds=0.5)).visit_and_fill_in()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")
    for name in ("flac", "mp3"):
        with page.expect_download() as download:
            page.locator(f"#save-{name}").click()
        download.value.save_as(tmp_path / f"x.{name}")
        with soundfile.SoundFile(tmp_path / f"x.{name}") as file:
            assert file.frames == 0.5 * RATE and "Generated speech" in file.copy_metadata()["comment"]


def test_a_missing_voice_is_told_on_the_page(site: Callable[..., Site]) -> None:
    engine = FakeEngine()
    here = site(engine)
    page = here.visit()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'failed'")
    assert "voice first" in page.locator("#player [role=alert]").inner_text()
    assert engine.streams == []


def test_an_unforeseen_error_ends_the_job_without_telling_paths(site: Callable[..., Site]) -> None:
    engine = FakeEngine(fails_after=1, failure=RuntimeError("/home/somebody"))
    page = site(engine).visit_and_fill_in()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'failed'")
    assert "reload" in page.locator("#player [role=alert]").inner_text()
    assert "/home" not in page.content()
    assert engine.streams[0].closed_at is not None


def test_a_broken_recording_is_told_when_it_arrives(site: Callable[..., Site], tmp_path: Path) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF and nothing else")
    here = site(FakeEngine())
    page = here.visit()
    page.locator("#reference input[type=file]").set_input_files(str(broken))
    told = page.locator("#part [data-level=bad] strong:not(:empty)")
    told.wait_for()
    assert "broken.wav" in told.inner_text() and str(tmp_path) not in told.inner_text()


def test_an_engine_slower_than_sound_rebuffers_instead_of_stuttering(site: Callable[..., Site]) -> None:
    here = site(FakeEngine(seconds=3.0, rtf=1.3, chunk_seconds=0.2))
    page = here.visit_and_fill_in()
    page.locator("#speak").click()
    page.get_by_text("The engine is slower than the sound").wait_for()  # it buffers where one can see it
    wait_for(page, "p.state === 'done'", seconds=12)
    done = probe(page)
    assert done["played"] == done["received"] == 3 * RATE
    assert done["underruns"] <= 1, done["log"]


def test_a_page_without_a_certificate_plays_through_scheduled_buffers(site: Callable[..., Site]) -> None:
    here = site(FakeEngine(seconds=1.5, rtf=0.4, chunk_seconds=0.2))
    page = here.visit_and_fill_in(INSECURE_HOST)
    assert page.get_by_text("No microphone here").is_visible()
    page.locator("#speak").click()
    wait_for(page, "p.rms > 0.1")
    wait_for(page, "p.state === 'done'")
    done = probe(page)
    assert done["sink"] == "scheduled"
    assert done["played"] == done["received"] == 1.5 * RATE
    assert (done["underruns"], done["lost"]) == (0, 0)


def test_a_burst_of_chunks_loses_none(site: Callable[..., Site]) -> None:
    here = site(FakeEngine(seconds=2.0, chunk_seconds=0.02))
    page = here.visit_and_fill_in()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")
    done = probe(page)
    assert done["played"] == done["received"] == 2 * RATE
    assert done["lost"] == 0


@pytest.mark.page
def test_two_tabs_equal_their_solo_runs(
    monkeypatch: pytest.MonkeyPatch, site: Callable[..., Site], engine: Engine
) -> None:
    """Inputs 19 and 26: the same seed gives the same samples alone and in company."""
    monkeypatch.setattr(engine, "close", lambda: None)  # other tests go on with it
    stream, asked = engine.stream, []
    monkeypatch.setattr(engine, "stream", lambda request: asked.append(request) or stream(request))
    here = site(engine)
    tabs = [here.visit_and_fill_in() for _ in range(2)]
    for page in tabs:
        page.get_by_text("More settings").click()
        page.locator("#seed").locator("input, textarea").fill("5")
    tabs[0].locator("#speak").click()
    wait_for(tabs[0], "p.state === 'done'", seconds=40)
    alone = result_of(tabs[0])
    for page in tabs:
        page.locator("#speak").click()
    for page, runs in zip(tabs, (2, 1), strict=True):
        ends = f"p.log.filter(({{event}}) => event === 'end').length === {runs}"
        wait_for(page, f"p.state === 'done' && {ends}", seconds=40)
    assert [request.seed for request in asked] == [5, 5, 5]
    assert len({request.reference.samples.tobytes() for request in asked}) == 1
    for page in tabs:
        assert result_of(page) == alone


@pytest.mark.page
def test_a_tab_that_has_to_wait_sees_its_place(site: Callable[..., Site]) -> None:
    here = site(FakeEngine(seconds=1.5, rtf=1.0), Settings(page_streams=2))
    tabs = [here.visit_and_fill_in() for _ in range(3)]
    for page in tabs:
        page.locator("#speak").click()
    tabs[2].get_by_text("Waiting for a free place: place 1 of 1").wait_for(timeout=5000)
    assert probe(tabs[2])["state"] == "waiting"
    for page in tabs:
        wait_for(page, "p.state === 'done'")
        assert result_of(page) == to_pcm16(tone(0, int(1.5 * RATE)))


def test_the_page_speaks_with_a_real_engine(
    monkeypatch: pytest.MonkeyPatch, site: Callable[..., Site], engine: Engine
) -> None:
    monkeypatch.setattr(engine, "close", lambda: None)  # other tests go on with it
    here = site(engine)
    page = here.visit_and_fill_in()
    page.get_by_text("weights are untrained").wait_for()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'", seconds=40)
    done = probe(page)
    assert done["played"] == done["received"] > 0 and done["lost"] == 0
    assert len(result_of(page)) == 2 * done["received"]
    assert done["received"] == 960 * int(page.locator("#player [data-mynah=tokens]").text_content() or 0)
