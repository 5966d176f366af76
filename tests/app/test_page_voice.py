"""The place for a voice in the page: every way in, the verdict, the part that is used, and words that went stale."""

import base64
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from playwright.sync_api import Page, expect

from app.examples import load_examples
from app.settings import Settings
from benchmarks.words import whisper_base, word_errors
from runtime import load_clip
from tests.app.fake_engine import FakeEngine
from tests.app.site import AUDIO, Site, field, probe, upload, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.page]

HEADLINE = "#part [data-ref=headline]"


def told(page: Page) -> str:
    return page.locator(HEADLINE).inner_text()


def speak(page: Page) -> None:
    page.locator("#text textarea").fill("Hello there.")
    page.locator("#consent input").check()
    page.locator("#speak").click()


def test_an_m4a_is_a_voice_like_any_other(site: Callable[..., Site]) -> None:
    """Input 17: browsers preview it, libsndfile does not open it."""
    engine = FakeEngine(seconds=0.3)
    page = site(engine).visit()
    upload(page, AUDIO / "en_clean_24k.m4a")
    assert told(page) == "A good recording."
    speak(page)
    wait_for(page, "p.state === 'done'")
    assert engine.requests[0].reference.seconds == pytest.approx(4.91, abs=0.05)  # the proposed part


def test_what_takes_longer_is_told_later_and_leaves_the_chosen_part(site: Callable[..., Site]) -> None:
    page = site(FakeEngine()).visit()
    upload(page, AUDIO / "two_voices_16k_stereo.wav")
    page.locator("#part [data-ref=whole]").click()
    page.get_by_text("Its two channels hold different voices").wait_for()
    assert "Used: 0.0 to 5.0 s" in page.locator("#part [data-ref=part]").inner_text()


def test_the_lit_part_is_what_is_used(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=0.3)
    page = site(engine).visit()
    upload(page, AUDIO / "multilingual_60s_24k.mp3")
    assert "longer than 30 s" in page.locator("#part [data-ref=remarks]").inner_text()
    page.locator("#part [data-ref=begin]").evaluate("edge => { edge.value = 35; edge.oninput(); }")
    page.locator("#part [data-ref=end]").focus()
    page.keyboard.press("ArrowLeft")  # by hand, and by keyboard
    assert "Used: 35.0 to 41.7 s" in page.locator("#part [data-ref=part]").inner_text()
    speak(page)
    wait_for(page, "p.state === 'done'")
    assert engine.requests[0].reference.seconds == pytest.approx(6.68, abs=0.02)
    page.locator("#part [data-ref=proposed]").click()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done' && p.log.filter(({event}) => event === 'end').length > 1")
    assert engine.requests[1].reference.seconds == pytest.approx(10.0, abs=0.02)


def test_a_change_of_the_clip_makes_its_words_stale(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=0.3)
    page = site(engine).visit()
    upload(page, AUDIO / "zero_shot_prompt.wav")
    words = page.locator("#transcript textarea")
    words.fill("希望你以后能够做的比我还好呦。")
    stale = page.locator("#part [data-ref=stale]")
    assert not stale.is_visible()
    page.locator("#part [data-ref=whole]").click()
    stale.wait_for()
    speak(page)
    wait_for(page, "p.state === 'asked'")
    assert "has changed" in page.locator("#player [role=alert]").inner_text() and engine.requests == []
    words.fill("希望你以后能够做的比我还好。")
    assert not stale.is_visible()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")
    assert engine.requests[0].transcript == "希望你以后能够做的比我还好。"
    page.locator("#reference").get_by_label("Clear").click()
    upload(page, AUDIO / "fr_44k1_mono.aiff")  # another clip altogether
    stale.wait_for()


def test_words_that_do_not_fit_are_questioned_before_the_engine_starts(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=0.3)
    page = site(engine).visit()
    upload(page, AUDIO / "zero_shot_prompt.wav")
    page.locator("#transcript textarea").fill("These are far too many words for a recording of three seconds. " * 4)
    speak(page)
    wait_for(page, "p.state === 'asked'")
    assert "too many" in page.locator("#player [role=alert]").inner_text() and engine.requests == []
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")


def test_words_of_a_long_recording_are_questioned_when_a_part_of_it_is_used(
    site: Callable[..., Site], tmp_path: Path
) -> None:
    """Input 11: 28 s whose words are the text as well. The part that is lit, with its own words, speaks all of it."""
    voices = load_examples()
    clips = [load_clip(voice.sound) for voice in voices * 2]
    samples = np.concatenate([clip.samples for clip in clips])[: 28 * clips[0].sample_rate]
    long = tmp_path / "long.wav"
    soundfile.write(long, samples, clips[0].sample_rate)
    text = " ".join(voice.transcript for voice in voices * 2)
    engine = FakeEngine(seconds=0.3)
    page = site(engine, Settings(transcription=str(whisper_base()))).visit()
    upload(page, long)
    field(page, "transcript").fill(text)
    page.locator("#text textarea").fill(text)
    page.locator("#consent input").check()
    page.locator("#speak").click()
    wait_for(page, "p.state === 'asked'")
    assert "too many" in page.locator("#player [role=alert]").inner_text() and engine.requests == []
    page.locator("#write").click()
    expect(field(page, "transcript")).not_to_have_value(text, timeout=30_000)
    page.locator("#speak").click()
    wait_for(page, "p.state === 'done'")
    (request,) = engine.requests
    assert 3 < request.reference.seconds <= 15 and request.text == text
    assert len(request.transcript or "") < len(text) / 2


def test_the_sound_of_a_video_is_taken_by_button_and_by_drop(site: Callable[..., Site], tmp_path: Path) -> None:
    video = tmp_path / "a film.mp4"
    video.write_bytes((AUDIO / "en_clean_24k.m4a").read_bytes())
    here = site(FakeEngine())
    page = here.visit()
    page.locator("#reference-video-box input[type=file]").set_input_files(str(video))
    page.locator(f"{HEADLINE}:not(:empty)").wait_for()
    assert told(page) == "A good recording."
    page = here.visit()
    page.evaluate(
        """bytes => {
          const data = new DataTransfer();
          const content = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
          data.items.add(new File([content], "a film.mp4", {type: "video/mp4"}));
          const drop = new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true});
          document.querySelector("#reference").firstElementChild.dispatchEvent(drop);
        }""",
        base64.b64encode(video.read_bytes()).decode(),
    )
    page.locator(f"{HEADLINE}:not(:empty)").wait_for()
    assert told(page) == "A good recording."


def test_a_voice_is_recorded_by_the_microphone(site: Callable[..., Site]) -> None:
    engine = FakeEngine(seconds=0.3)
    page = site(engine).visit(permissions=["microphone"])
    page.locator("#reference").get_by_label("Record audio").click()
    page.locator("#reference").get_by_role("button", name="Record", exact=True).click()
    page.wait_for_timeout(4500)
    page.locator("#reference").get_by_role("button", name="Stop", exact=False).first.click()
    page.locator(f"{HEADLINE}:not(:empty)").wait_for(timeout=10_000)
    assert "Not usable" not in told(page)
    speak(page)
    wait_for(page, "p.state === 'done'")
    assert engine.requests[0].reference.seconds > 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("zero bytes.wav", b""),
        ("random.mp3", bytes(range(7, 256)) * 80),
        ("half a header.wav", b"RIFF\x24\x00\x00\x00WAVEfm"),
        ("only a header.wav", (AUDIO / "en_u8_44k1_mono.wav").read_bytes()[:44]),
    ],
    ids=("zero", "random", "half", "header"),
)
def test_a_broken_file_is_one_sentence_and_the_page_goes_on(
    site: Callable[..., Site], tmp_path: Path, name: str, content: bytes
) -> None:
    """Input 18."""
    broken = tmp_path / name
    broken.write_bytes(content)
    engine = FakeEngine(seconds=0.3)
    page = site(engine).visit()
    upload(page, broken)
    assert name in told(page) and str(tmp_path) not in page.content()
    speak(page)
    wait_for(page, "p.state === 'failed'")
    assert name in page.locator("#player [role=alert]").inner_text() and "/" not in probe(page)["message"]
    page.locator("#reference").get_by_label("Clear").click()
    upload(page, AUDIO / "en_clean_24k.m4a")
    speak(page)
    wait_for(page, "p.state === 'done'")
    assert len(engine.requests) == 1


def test_aac_under_the_name_of_a_wav_is_judged_by_its_content(site: Callable[..., Site], tmp_path: Path) -> None:
    """Input 18: the content decides."""
    lying = tmp_path / "really aac.wav"
    lying.write_bytes((AUDIO / "en_clean_24k.m4a").read_bytes())
    page = site(FakeEngine()).visit()
    upload(page, lying)
    assert told(page) == "A good recording."


def test_words_that_were_just_written_down_are_not_stale(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Whisper:
        def __init__(self, *_: object, **__: object) -> None: ...

        def transcribe(self, *_: object, **__: object) -> tuple[list[SimpleNamespace], None]:
            return [SimpleNamespace(text="希望你以后能够做的比我还好呦。")], None

    monkeypatch.setitem(sys.modules, "faster_whisper", SimpleNamespace(WhisperModel=Whisper))
    page = site(FakeEngine()).visit()
    upload(page, AUDIO / "zero_shot_prompt.wav")
    words = page.locator("#transcript textarea")
    words.fill("希望你以后能够做的比我还好呦。")
    page.locator("#part [data-ref=whole]").click()
    page.locator("#part [data-ref=stale]").wait_for()
    page.locator("#write").click()
    page.locator("#part [data-ref=stale]").wait_for(state="hidden")
    assert words.input_value() == "希望你以后能够做的比我还好呦。"


def test_a_button_fills_in_what_a_real_model_hears(site: Callable[..., Site]) -> None:
    page = site(FakeEngine(), Settings(transcription=str(whisper_base()))).visit()
    heron = load_examples()[0]
    upload(page, heron.sound)
    page.locator("#write").click()
    written = field(page, "transcript")
    expect(written).to_have_value(re.compile("straightforward policy"), timeout=30_000)
    assert word_errors(heron.transcript, written.input_value())[0] <= 1
    assert not page.locator("#part [data-ref=stale]").is_visible()


def test_writing_the_words_down_says_what_is_missing(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faster_whisper", None)
    page = site(FakeEngine()).visit()
    upload(page, AUDIO / "en_clean_24k.m4a")
    page.locator("#write").click()
    page.get_by_text("needs the extra `asr`").wait_for()
