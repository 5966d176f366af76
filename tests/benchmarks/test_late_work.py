"""Work after the engine was ready is seen, and only while somebody counts."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import late_work
from benchmarks.late_work import counted


def test_captures_and_compilations_are_counted_and_still_done(monkeypatch: pytest.MonkeyPatch):
    began, runtime = [], SimpleNamespace(jit_post_compile_hook=None)
    triton = ModuleType("triton")
    triton.knobs = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(late_work, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda graph, pool: began.append(pool))
    graph = SimpleNamespace()
    with counted() as late:
        torch.cuda.CUDAGraph.capture_begin(graph, "a pool")
        runtime.jit_post_compile_hook(key="a kernel")
        runtime.jit_post_compile_hook(key="another")
    torch.cuda.CUDAGraph.capture_begin(graph, "later")
    assert (late.captures, late.compilations) == (1, 2)
    assert began == ["a pool", "later"] and runtime.jit_post_compile_hook is None


def test_without_triton_there_is_nothing_to_compile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(late_work, "find_spec", lambda name: None)
    with counted() as late:
        pass
    assert (late.captures, late.compilations) == (0, 0)
