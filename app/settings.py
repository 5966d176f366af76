"""Settings of the whole program, built once in launch.py and passed down."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runtime import EngineSettings, RequestError

FIRST_PORT = 7860
SPACE = {  # what a public place needs otherwise: reached from outside, shared by strangers, nothing kept
    "host": "0.0.0.0",
    "port": FIRST_PORT,
    "open_browser": False,
    "page_streams": 2,
    "page_waiting": 16,
    "largest_upload": "20mb",
    "cache_seconds": 600,
    "longest_text": 600,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Which model, who may reach it, and what one page may ask for."""

    model: str = "demo"  # demo, a folder in the released layout, or a hub id
    lm: str = "llm"  # which file of the checkpoint holds the language model
    source: Literal["hub", "modelscope"] = "hub"
    host: str = "127.0.0.1"
    port: int | None = None  # None is 7860, or the next free one
    open_browser: bool = True
    voices: Path | None = None  # where named voices are kept; None keeps them for a visit only
    history: Path | None = None  # where finished jobs are kept, likewise
    page_streams: int = 4  # requests of pages that are spoken at the same time; further ones see their place in line
    page_waiting: int = 64
    largest_upload: str = "100mb"
    cache_seconds: int = 3600  # how long uploads and results stay on disk
    longest_text: int = 20_000  # characters of one request of the page
    transcription: str = "small"  # a size of Whisper, or a folder with one for CTranslate2
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65536:
            raise RequestError(f"port is {self.port}; choose one from 1 to 65535")
