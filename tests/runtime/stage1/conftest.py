"""ONNX files of the tiny flow's estimator, written once for all tests of this folder: an export takes seconds."""

from pathlib import Path

import onnx
import pytest
from onnx import helper

from runtime.settings import EngineSettings
from runtime.stage1.dit_onnx import export_dit
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


@pytest.fixture(scope="session")
def released_onnx(tiny_onnx: Path, exports: Path) -> Path:
    """Our graph behind the inputs of the released file (spec 7): a mask of padding, no chunks, two rows."""
    path, model = exports / "flow.decoder.estimator.fp32.onnx", onnx.load(tiny_onnx)
    graph = model.graph
    wide = [2, 80, "seq_len"]
    inputs = {"x": wide, "mask": [2, 1, "seq_len"], "mu": wide, "t": [2], "spks": [2, 80], "cond": wide}
    take_mask = [
        helper.make_node("Identity", ["spks"], ["speaker"]),
        helper.make_node("Shape", ["mask"], ["sizes"]),
        helper.make_node("Constant", [], ["rows_and_frames"], value_ints=[0, 2]),
        helper.make_node("Gather", ["sizes", "rows_and_frames"], ["flat"]),
        helper.make_node("Constant", [], ["over_frames"], value_ints=[2]),
        helper.make_node("ReduceSum", ["mask", "over_frames"], ["real"], keepdims=0),  # [2, 1]
        helper.make_node("Cast", ["real"], ["counted"], to=onnx.TensorProto.INT32),
        helper.make_node("Expand", ["counted", "flat"], ["horizon"]),
    ]
    nodes = [*take_mask, *graph.node, helper.make_node("Identity", ["velocity"], ["estimator_out"])]
    sized = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (*inputs.items(), ("estimator_out", wide))
    ]
    released = helper.make_graph(nodes, "released", sized[:-1], sized[-1:], graph.initializer)
    onnx.save(helper.make_model(released, opset_imports=model.opset_import, ir_version=model.ir_version), path)
    return path
