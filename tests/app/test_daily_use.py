"""A day with the bundled voice, in the page and by command: keep a voice, mend a text, hear it again, let two speak.

The other tests of these rooms look closely, with an engine that plays tones; this one walks through all of them with
the real thing.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pysubs2
import pytest
import soundfile
import soxr
from playwright.sync_api import Page

import launch
from app import history_handlers
from app.history import History
from app.settings import Settings
from app.voices import VoiceLibrary
from benchmarks.words import RATE, recogniser, word_errors
from runtime import Engine, resolve_checkpoint
from runtime.silence import QUIET
from tests.app.site import Site, field, result_of, unfold, upload, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.page, pytest.mark.timeout(400)]

VOICES = Path(__file__).parents[2] / "assets" / "voices"
TEXT = "PyTorch needs 5 minutes. [pause 1.5s] I will see you tomorrow."
DUE = "pie torch needs five minutes i will see you tomorrow"
PAUSE = 1.5


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine(resolve_checkpoint("demo")) as engine:
        yield engine


@pytest.fixture(scope="module")
def read() -> Callable[[np.ndarray], str]:
    whisper = recogniser(1)
    return lambda samples: whisper(soxr.resample(samples, 24_000, RATE).astype(np.float32))


def words_of(voice: str) -> str:
    return (VOICES / f"{voice}.txt").read_text(encoding="utf-8").strip()


def longest_quiet(samples: np.ndarray) -> float:
    """Seconds between two loud samples that lie furthest apart."""
    loud = np.flatnonzero(np.abs(samples) > QUIET * np.abs(samples).max())
    return float(np.diff(loud).max()) / 24_000


def heard(page: Page, runs: int) -> np.ndarray:
    wait_for(page, f"p.state === 'done' && p.log.filter(({{event}}) => event === 'end').length >= {runs}", seconds=120)
    return result(page)


def result(page: Page) -> np.ndarray:
    return np.frombuffer(result_of(page), "<i2").astype(np.float32) / 32768


def test_a_day_with_the_page(
    monkeypatch: pytest.MonkeyPatch,
    site: Callable[..., Site],
    demo: Engine,
    read: Callable[[np.ndarray], str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(demo, "close", lambda: None)  # the other test goes on with it
    monkeypatch.setattr(history_handlers, "secrets", SimpleNamespace(randbits=lambda bits: 4))  # how a take begins
    library = VoiceLibrary(tmp_path / "voices")
    library.add("Rook", VOICES / "rook.wav", consent="synthetic", transcript=words_of("rook"))
    here = site(demo, Settings(voices=library.folder, history=tmp_path / "history"))

    page = here.visit()  # a new voice is kept
    upload(page, VOICES / "heron.wav")
    page.locator("#consent input").check()
    field(page, "transcript").fill(words_of("heron"))
    unfold(page, "keep")
    field(page, "keep-name").fill("Heron")
    page.locator("#keep").click()
    page.locator("#voice-card strong").wait_for()

    unfold(page, "tools")  # a word that would be read wrongly, and a pause
    field(page, "words").fill("PyTorch = pie torch")
    field(page, "text").fill(TEXT)
    field(page, "text").blur()
    page.locator("#plan").get_by_text("pie torch needs five minutes.").wait_for()
    unfold(page, "settings")
    field(page, "seed").fill("3")
    page.locator("#speak").click()
    first = heard(page, runs=1)
    assert word_errors(DUE, said := read(first))[0] <= 2, said
    assert abs(longest_quiet(first) - PAUSE) < 0.05

    page.locator("#sentences summary").click()  # one sentence again, the other as it was
    page.get_by_role("button", name="Say sentence 2 again").click()
    page.get_by_text("said again").wait_for(timeout=60_000)
    second = result(page)
    assert word_errors(DUE, said := read(second))[0] <= 2, said
    speech = np.flatnonzero(first)[: 24_000 // 2]
    assert np.abs(second[speech] - first[speech]).max() < 0.5 * np.abs(first).max()  # the level may have moved
    assert abs(longest_quiet(second) - PAUSE) < 0.05

    page = here.visit()  # another day: it is still there, with its subtitles
    unfold(page, "history")
    entry = page.locator("#history article").first
    entry.get_by_text("PyTorch needs").wait_for()
    entry.get_by_role("button", name="Play").click()
    assert np.array_equal(heard(page, runs=1), second)
    with page.expect_download() as download:
        entry.get_by_role("button", name="Save subtitles as SRT").click()
    download.value.save_as(tmp_path / "made.srt")
    lines = pysubs2.load(str(tmp_path / "made.srt"))
    assert [line.plaintext for line in lines] == ["PyTorch needs 5 minutes.", "I will see you tomorrow."]
    assert lines[1].end <= 1000 * len(second) / 24_000 + 1 and lines[1].start - lines[0].end >= 1000 * (PAUSE - 0.5)

    unfold(page, "tools")  # two voices
    page.locator("#script input").check()
    field(page, "text").fill("Heron: Good morning, my friend.\nRook: It is a lovely day.")
    page.locator("#speak").click()
    both = heard(page, runs=2)
    assert word_errors("good morning my friend it is a lovely day", said := read(both))[0] <= 2, said
    assert [entry.planned for entry in History(tmp_path / "history").entries()] == [2, 2]


def test_a_day_with_the_command(
    monkeypatch: pytest.MonkeyPatch, demo: Engine, read: Callable[[np.ndarray], str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "close", lambda: None)

    def run(*flags: object) -> int:
        return launch.main([*map(str, flags)], {}, lambda settings: demo)

    kept = ("--voices", tmp_path / "voices")
    for name in ("heron", "rook"):
        flags = ("--transcript", words_of(name), "--consent", "synthetic", *kept)
        assert run("voices", "add", name.title(), VOICES / f"{name}.wav", *flags) == 0
    words = tmp_path / "words.txt"
    words.write_text("PyTorch = pie torch\n", encoding="utf-8")
    out, subtitles = tmp_path / "out.wav", tmp_path / "out.vtt"
    flags = ("--text", TEXT, "--words", words, "--subtitles", subtitles, "--seed", 3, "--out", out)
    assert run("say", "--voice", "Heron", *kept, *flags) == 0
    samples, rate = soundfile.read(out, dtype="float32")
    assert rate == 24_000 and word_errors(DUE, said := read(samples))[0] <= 2, said
    assert abs(longest_quiet(samples) - PAUSE) < 0.05
    assert [line.plaintext for line in pysubs2.load(str(subtitles))] == [
        "PyTorch needs 5 minutes.",
        "I will see you tomorrow.",
    ]
    script = tmp_path / "script.txt"
    script.write_text("Heron: Good morning, my friend.\nRook: It is a lovely day.\n", encoding="utf-8")
    assert run("say", "--script", script, *kept, "--seed", 3, "--out", out) == 0
    samples, _ = soundfile.read(out, dtype="float32")
    assert word_errors("good morning my friend it is a lovely day", said := read(samples))[0] <= 2, said
