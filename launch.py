"""Starts Mynah: flags -> Settings -> Engine -> the page, or one command. The environment is read here and nowhere else."""

import os
import socket
import sys
import time
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import closing

import uvicorn

from app.cli import build_parser, engine_settings, read_request, say, tell
from app.figures import NOISE_NOTICE
from app.server import build_app
from app.settings import FIRST_PORT, Settings
from runtime import Engine, GenerationError, RequestError, SpeechError, resolve_checkpoint


def main(argv: list[str], environment: Mapping[str, str], open_engine: "Callable[[Settings], Engine] | None" = None) -> int:
    """Runs the command line and returns its exit code."""
    args = build_parser().parse_args(argv)
    try:
        settings = read_settings(vars(args), environment, engine_settings(args))
        request = read_request(args) if args.command == "say" else None
        with closing((open_engine or load_engine)(settings)) as engine:
            return say(args, request, engine) if request else serve(engine, settings)
    except SpeechError as error:
        tell(f"error: {error}")
        return 1 if isinstance(error, GenerationError) else 2
    except KeyboardInterrupt:
        tell("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
