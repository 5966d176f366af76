"""A voice file for page and command, and a browser for the page."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from app.audio_format import to_pcm16, wav_file
from app.settings import Settings
from runtime import Engine
from tests.app.fake_engine import RATE, FakeEngine, tone
from tests.app.site import FLAGS, INSECURE_HOST, Site


@pytest.fixture(scope="session", autouse=True)
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gradio keeps an upload under its hash in one folder for all processes; one that ends takes another's away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        yield


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    path = tmp_path / "a voice.wav"
    with wav_file(path, RATE) as file:
        file.writeframes(to_pcm16(tone(0, 2 * RATE)))
    return path


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    flags = [*FLAGS, f"--host-resolver-rules=MAP {INSECURE_HOST} 127.0.0.1"]
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    with sync_playwright() as playwright:
        program = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(program).exists():
            pytest.fail(
                "no Chromium here; install your system's chromium or run `playwright install chromium`, "
                "or leave these tests out with -m 'not browser'"
            )
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def site(chromium: Browser, reference: Path) -> Iterator[Callable[..., Site]]:
    opened: list[Site] = []

    def open_site(engine: FakeEngine | Engine, settings: Settings | None = None) -> Site:
        opened.append(Site(chromium, reference, engine, settings or Settings()))
        return opened[-1]

    yield open_site
    for one in opened:
        one.close()
