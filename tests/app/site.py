"""A page of ours in a real browser: a server around an engine, and what the player tells of itself.

Clicks are real ones, because browsers start sound only after a gesture. The player's probe tells the clock of its audio
context, the level at the analyser, and samples received and played.
"""

import socket
import threading
import urllib.request
import wave
from io import BytesIO
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Locator, Page

from app.server import Server, build_app
from app.settings import Settings
from runtime import Engine
from tests.app.fake_engine import FakeEngine

AUDIO = Path(__file__).parents[1] / "audio"
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking"]
FLAGS += [  # a microphone that hears a recording
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    f"--use-file-for-fake-audio-capture={AUDIO / 'en_noisy_48k_mono.wav'}",
]
INSECURE_HOST = "lan.example"  # a name without a certificate, as in a home network: no AudioWorklet there


class Site:
    """Pages of one server around an engine, on a free port. Leaving it closes the pages first, then the server."""

    def __init__(self, chromium: Browser, reference: Path, engine: FakeEngine | Engine, settings: Settings) -> None:
        self._chromium, self._reference = chromium, reference
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = Server(build_app(engine, settings), engine)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()
        self._contexts: list[BrowserContext] = []
        self._errors: list[object] = []

    def visit(self, host: str = "127.0.0.1", before: str = "", **context_options: Any) -> Page:
        """`before` is a script that runs before those of the page."""
        context = self._chromium.new_context(**context_options)
        self._contexts.append(context)
        context.add_init_script(before)
        page = context.new_page()
        page.on("pageerror", lambda error: self._errors.append(error))
        page.goto(f"http://{host}:{self._listener.getsockname()[1]}")
        page.locator("#speak").wait_for()
        # The page has been answered once: it shows what it keeps for the visit.
        page.wait_for_function("document.querySelector('#visit input, #visit textarea').value")
        return page

    def visit_and_fill_in(self, host: str = "127.0.0.1", **context_options: Any) -> Page:
        page = self.visit(host, **context_options)
        page.locator("#text textarea").fill("A text of some length, that takes about three seconds.")
        upload(page, self._reference)
        page.locator("#consent input").check()
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        self._server.should_exit = True
        self._thread.join(20)
        self._listener.close()
        assert self._errors == []  # of the page's own scripts
        assert not self._thread.is_alive()


def probe(page: Page) -> dict[str, Any]:
    return page.evaluate("mynahPlayer.probe()")


def wait_for(page: Page, condition: str, seconds: float = 8.0) -> None:
    try:
        page.wait_for_function(
            f"(() => {{ const p = mynahPlayer.probe(); return {condition}; }})()", timeout=1000 * seconds
        )
    except Exception as late:
        raise AssertionError(f"{condition} never held: {probe(page)}") from late


def result_of(page: Page) -> bytes:
    """Samples of the finished file, as the page offers it for download."""
    link = page.locator("#result a[download]")
    link.wait_for()
    with urllib.request.urlopen(str(link.get_attribute("href"))) as answer, wave.open(BytesIO(answer.read())) as file:
        return file.readframes(file.getnframes())


def upload(page: Page, recording: Path) -> None:
    """Gives the page a voice and waits for the verdict."""
    page.locator("#reference input[type=file]").set_input_files(str(recording))
    page.locator("#part [data-ref=headline]:not(:empty)").wait_for()


def field(page: Page, name: str) -> Locator:
    """Where one writes into a field of the page."""
    return page.locator(f"#{name}").locator("input, textarea")


def unfold(page: Page, name: str) -> None:
    page.locator(f"#{name}-fold > button").click()
    page.wait_for_timeout(300)  # Gradio empties a field that is written in the moment its fold opens; people are slower
