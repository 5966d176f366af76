"""The web server: the page, whether it is well, and how it ends."""

import asyncio
import socket

import gradio as gr
import uvicorn
from fastapi import FastAPI
from gradio.routes import App
from starlette.routing import Mount

from app.settings import Settings
from app.ui import STYLE, build_page, scripts, theme
from runtime import Engine


def build_app(engine: Engine, settings: Settings) -> FastAPI:
    """An ASGI app around an engine that is ready. The caller owns the engine."""
    app = FastAPI(title="Mynah", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "memory": engine.memory(), **engine.describe()}

    return gr.mount_gradio_app(
        app,
        build_page(engine, settings),
        path="/",
        head="".join(f"<script>{script}</script>" for script in scripts()),
        css_paths=STYLE,
        theme=theme(),
        show_error=False,  # an unforeseen error may hold paths; the ones we foresee are raised as gr.Error
        allowed_paths=[],
        max_file_size=settings.largest_upload,
        ssr_mode=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=["settings"],
    )


class Server(uvicorn.Server):
    """Serves an app until Ctrl-C, and then ends at once.

    Uvicorn would wait until the last tab is closed: each holds a heartbeat, and those that listen hold a stream.
    """

    def __init__(self, app: FastAPI, engine: Engine) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        self._pages = [route.app for route in app.routes if isinstance(route, Mount) and isinstance(route.app, App)]
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._engine.close)  # ends every stream; their pages are told why
        for page in self._pages:
            page.stop_event.set()
        await super().shutdown(sockets)
