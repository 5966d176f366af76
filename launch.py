"""Starts Mynah: flags -> Settings -> Engine -> the page, or one command. Only this file reads the environment."""

import gc
import os
import socket
import sys
import time
import webbrowser
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from platformdirs import user_data_path

# Read by torch's OpenMP on Linux when it is loaded. A thread that waits for work spins for about 20 us instead of the
# usual 3 ms: long enough from one operation to the next, and other programs keep their cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from app.cli import build_parser, engine_settings, read_requests, say, tell
from app.figures import notice
from app.settings import FIRST_PORT, SPACE, Settings
from app.voice_commands import run_voice_command
from app.voices import VoiceLibrary
from runtime import Engine, RequestError, SpeechError, resolve_checkpoint

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(
    argv: list[str], environment: Mapping[str, str], open_engine: Callable[[Settings], Engine] | None = None
) -> int:
    """Runs the command line and returns its exit code."""
    args = build_parser().parse_args(argv)
    try:
        settings = read_settings(args, environment)
        library = None if settings.voices is None else VoiceLibrary(settings.voices)
        if args.command == "voices":
            return run_voice_command(args, library)
        if args.command == "say":
            requests = read_requests(args, library)
            with closing((open_engine or load_engine)(settings)) as engine:
                return say(args, requests, engine)
        listener = listen(settings.host, settings.port)
        with closing((open_engine or load_engine)(settings)) as engine:
            serve(engine, settings, listener)
        return 0
    except SpeechError as error:
        tell(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        tell("interrupted")
        return 130


def read_settings(args: Namespace, environment: Mapping[str, str]) -> Settings:
    """Flags over what the place needs (a Space, or somebody's own machine) over the defaults."""
    names = ("model", "lm", "source", "host", "port", "open_browser", "voices", "history", "transcription")
    place: dict[str, Any]
    if "SPACE_ID" in environment:  # its visitors are strangers to each other, so it keeps neither voices nor jobs
        place = SPACE | {"model": environment.get("MYNAH_MODEL", "demo")}  # it starts without flags
    elif vars(args).get("host", "127.0.0.1") not in LOOPBACK:
        place = {}  # nor do people who only share a network; --voices and --history name folders for all of them
    else:
        place = {name: user_data_path("Mynah", appauthor=False) / name for name in ("voices", "history")}
    given = {name: value for name, value in vars(args).items() if name in names}
    return Settings(**(place | given), engine=engine_settings(args))


def load_engine(settings: Settings) -> Engine:
    tell(f"loading {settings.model} ({settings.lm}) ...")
    began = time.monotonic()
    checkpoint = resolve_checkpoint(settings.model, lm_name=settings.lm, source=settings.source)
    engine = Engine(checkpoint, settings.engine)
    gc.freeze()  # to look through all that was loaded for garbage takes 0.2 s, in the middle of a sentence
    for name, value in engine.describe().items():
        tell(f"  {name}: {value}")
    tell(f"ready after {time.monotonic() - began:.1f} s")
    return engine


def listen(host: str, port: int | None) -> socket.socket:
    """Takes the port before the model is loaded, so that a busy one shows at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(FIRST_PORT, FIRST_PORT + 20) if port is None else (port,):
        try:
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            failed = error
    wanted = f"{host}:{port}" if port else f"{host}, ports {FIRST_PORT} to {FIRST_PORT + 19}"
    raise RequestError(f"cannot listen on {wanted} ({failed.strerror}); choose another --port or --host")


def serve(engine: Engine, settings: Settings, listener: socket.socket) -> None:
    """Serves the page until Ctrl-C."""
    from app.server import Server, build_app  # Gradio takes seconds to import, and `say` does without it

    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    if told := notice(engine.checkpoint):
        tell(f"note: {told}")
    tell(f"the page is at {url} (Ctrl-C ends it)")
    if settings.open_browser:
        show(url)
    Server(build_app(engine, settings), engine).run(sockets=[listener])


def show(url: str) -> None:
    """Opens the page where there is a browser with a window; text browsers would take the terminal."""
    try:
        if type(webbrowser.get()) is not webbrowser.GenericBrowser:
            webbrowser.open(url)
    except webbrowser.Error:
        tell("no browser was found here; open the address yourself")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
