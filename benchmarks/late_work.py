"""What an engine should have done before it was ready: kernels compiled and graphs captured afterwards, counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch


@dataclass(slots=True)
class LateWork:
    """So far. A kernel that comes from the cache on disk counts as compiled: it is loaded while somebody waits."""

    compilations: int = 0
    captures: int = 0


@contextmanager
def counted() -> Iterator[LateWork]:
    """Counts while it is open, on all threads."""
    work = LateWork()
    begin = torch.cuda.CUDAGraph.capture_begin

    def capture_begin(graph: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
        work.captures += 1
        begin(graph, *args, **options)

    def compiled(*_: Any, **__: Any) -> None:
        work.compilations += 1

    with patch.object(torch.cuda.CUDAGraph, "capture_begin", capture_begin):
        if find_spec("triton") is None:
            yield work
            return
        from triton import knobs

        with patch.object(knobs.runtime, "jit_post_compile_hook", compiled):
            yield work
