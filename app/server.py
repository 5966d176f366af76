"""The web server: the page, and whether it is well."""

import gradio as gr
from fastapi import FastAPI

from app.settings import Settings
from app.ui import SCRIPTS, STYLE, build_page, theme
from runtime import Engine


def build_app(engine: Engine, settings: Settings) -> FastAPI:
    """An ASGI app around an engine that is ready. The caller owns the engine and closes it after the server."""
    app = FastAPI(title="Mynah", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", **engine.describe()}

    return gr.mount_gradio_app(
        app,
        build_page(engine, settings),
        path="/",
        head="".join(f"<script>{script.read_text(encoding='utf-8')}</script>" for script in SCRIPTS),
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
