"""Reads the golden fixtures: tensors of the official modules at a tiny width, and notes about them."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent / "golden"


def load(name: str) -> dict[str, Tensor]:
    """Tensors of `golden/<name>.safetensors`."""
    return load_file(FOLDER / f"{name}.safetensors")


def meta(name: str) -> Any:
    """Content of `golden/<name>.json`."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
