"""ONNX files of the tiny flow's estimator, written once for all tests of this folder: an export takes seconds."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from runtime.frontend.onnx_file import export_onnx
from runtime.settings import EngineSettings
from runtime.stage1.dit import DiT
from runtime.stage1.dit_onnx import OnnxDiT, export_dit
from tests.runtime.stage1.tiny_flow import tiny_flow


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="session")
def tiny_onnx(exports: Path) -> Path:
    """In float32."""
    return export_dit(tiny_flow().estimator, exports)


@pytest.fixture(scope="session")
def half_onnx(exports: Path) -> Path:
    """In float16, which onnxruntime can run on a CPU, unlike bfloat16; the casts are the same."""
    return export_dit(tiny_flow(EngineSettings(flow_precision="float16")).estimator, exports)


class ReleasedGraph(nn.Module):
    """The inputs of flow.decoder.estimator.fp32.onnx (spec 7): a mask of padding, no chunks, two rows."""

    def __init__(self, dit: DiT) -> None:
        super().__init__()
        self._own = OnnxDiT(dit)

    def forward(self, x: Tensor, mask: Tensor, mu: Tensor, t: Tensor, spks: Tensor, cond: Tensor) -> Tensor:
        seen = mask.sum(-1).to(torch.int32).expand(-1, x.shape[-1])
        return self._own(x, mu, t, spks, cond, seen)


@pytest.fixture(scope="session")
def released_onnx(exports: Path) -> Path:
    path, frames = exports / "flow.decoder.estimator.fp32.onnx", Dim("seq_len")
    x, mu, cond = (torch.zeros(2, 80, 60) for _ in range(3))
    inputs = {"x": x, "mask": torch.ones(2, 1, 60), "mu": mu, "t": torch.zeros(2), "spks": torch.zeros(2, 80)}
    free: list[dict[int, object]] = [{2: frames}, {2: frames}, {2: frames}, {}, {}, {2: frames}]
    export_onnx(ReleasedGraph(tiny_flow().estimator), path, inputs | {"cond": cond}, "estimator_out", free)
    return path
