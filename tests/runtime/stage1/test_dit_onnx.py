"""The exported graph against the torch estimator, through onnxruntime."""

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from runtime.errors import EngineUnavailable
from runtime.settings import EngineSettings
from runtime.stage1 import dit_onnx
from runtime.stage1.dit import DiT, chunk_mask
from runtime.stage1.dit_onnx import OnnxDiT, export_dit, export_path, horizon
from tests.runtime.stage1.tiny_flow import CPU, tiny_flow

CASES = (  # lengths of the rows, padded to the longest; chunked or not
    ([60, 60], False),
    ([131, 131], True),
    ([99, 99, 51, 51, 50, 50, 49, 49, 1, 1], True),
    ([70, 70, 1, 1], False),
)
FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


def inputs(lengths: list[int], padding: float = 0.0) -> tuple[dict[str, Tensor], Tensor]:
    """Seeded inputs of the estimator, and where they are real [R, 1, N]; the rest is filled with `padding`."""
    rows, frames = len(lengths), max(lengths)
    generator = torch.Generator().manual_seed(sum(lengths))
    x, mu, cond = torch.randn(3, rows, 80, frames, generator=generator)
    mask = (torch.arange(frames) < torch.tensor(lengths)[:, None])[:, None]
    x, mu, cond = (part.masked_fill(~mask, padding) for part in (x, mu, cond))
    t, speaker = torch.rand(rows, generator=generator), torch.randn(rows, 80, generator=generator)
    return {"x": x, "mu": mu, "t": t, "speaker": speaker, "cond": cond}, mask


def in_onnx(path: Path, given: dict[str, Tensor], lengths: list[int], chunked: bool) -> Tensor:
    seen = horizon(lengths, max(lengths), 50 if chunked else None, CPU)
    named = {name: part.numpy() for name, part in (given | {"horizon": seen}).items()}
    (velocity,) = onnxruntime.InferenceSession(path).run(None, named)
    assert velocity.dtype == np.float32
    return torch.from_numpy(velocity)


@torch.inference_mode()
def deviation(path: Path, dit: DiT, lengths: list[int], chunked: bool, padding: float = 0.0) -> float:
    """Largest difference on real frames."""
    given, mask = inputs(lengths, padding)
    truth = dit(**given, mask=mask, chunked=chunked).float()
    found = in_onnx(path, given, lengths, chunked)
    return float((found - truth).masked_fill(~mask, 0).abs().max())


@pytest.mark.parametrize(("lengths", "chunked"), CASES)
def test_the_graph_gives_the_velocity_of_torch(tiny_onnx: Path, lengths: list[int], chunked: bool) -> None:
    assert deviation(tiny_onnx, tiny_flow().estimator, lengths, chunked) < 1e-4


@pytest.mark.parametrize(("lengths", "chunked"), CASES)
def test_the_graph_in_half_precision_stays_near_float32(half_onnx: Path, lengths: list[int], chunked: bool) -> None:
    """30 dB, and no further from the truth than torch in half precision is."""
    exact, half = tiny_flow().estimator, tiny_flow(EngineSettings(flow_precision="float16")).estimator
    given, mask = inputs(lengths)
    with torch.inference_mode():
        truth = exact(**given, mask=mask, chunked=chunked).masked_fill(~mask, 0)
        errors = [
            float((found.float().masked_fill(~mask, 0) - truth).norm() / truth.norm())
            for found in (in_onnx(half_onnx, given, lengths, chunked), half(**given, mask=mask, chunked=chunked))
        ]
    assert errors[0] < min(10 ** (-30 / 20), 1.5 * errors[1])


@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e30])
def test_what_padding_holds_does_not_reach_the_row(tiny_onnx: Path, padding: float) -> None:
    """Trap 43."""
    lengths = [99, 99, 51, 51]
    clean, poisoned = (in_onnx(tiny_onnx, inputs(lengths, fill)[0], lengths, True) for fill in (0.0, padding))
    assert torch.equal(poisoned, clean)


def test_hidden_frames_weigh_exactly_nothing_however_large_the_logits() -> None:
    """Trap 42: logits of a million, of which float16 holds none, and a change in what is hidden changes no bit."""
    dit = tiny_flow(EngineSettings(flow_precision="float16")).estimator
    with torch.no_grad():
        for block in dit.transformer_blocks:
            block.attn.to_q.weight *= 200
            block.attn.to_k.weight *= 200
    graph, (given, _) = OnnxDiT(dit), inputs([100, 100])
    changed = given | {"x": torch.cat((given["x"][:, :, :50], 3 * given["x"][:, :, 50:]), dim=-1)}
    seen = horizon([100, 100], 100, 50, CPU)
    with torch.inference_mode():
        first, second = graph(**given, horizon=seen), graph(**changed, horizon=seen)
        u = torch.randn(1, 100, dit.proj_out.in_features, generator=torch.Generator().manual_seed(1)).half()
        attention = dit.transformer_blocks[0].attn
        q, k = (part.float().unflatten(-1, (attention.heads, -1)) for part in (attention.to_q(u), attention.to_k(u)))
        assert torch.einsum("rnhk,rmhk->rhnm", q, k).abs().max() > torch.finfo(torch.float16).max
    assert torch.isfinite(first).all() and torch.isfinite(second).all()
    assert torch.equal(first[:, :, :50], second[:, :, :50])
    assert not torch.equal(first[:, :, 50:], second[:, :, 50:])


def test_a_horizon_is_the_chunk_mask_and_the_padding_in_one() -> None:
    seen = horizon([130, 60], 130, 50, CPU)
    visible = torch.arange(130) < seen[:, :, None]
    assert torch.equal(visible[0], chunk_mask(130, 50, CPU))
    assert torch.equal(visible[1, :60], chunk_mask(130, 50, CPU)[:60] & (torch.arange(130) < 60))
    assert horizon([130, 60], 130, None, CPU).tolist() == [[130] * 130, [60] * 130]


def test_lengths_may_be_tensors_that_stay_on_their_device() -> None:
    as_tensors = torch.tensor([130, 60]).unbind()
    assert torch.equal(horizon(as_tensors, 130, 50, CPU), horizon([130, 60], 130, 50, CPU))


def test_norms_softmax_and_mish_are_float32_in_a_half_graph_and_products_of_weights_are_not(half_onnx: Path) -> None:
    """TensorRT takes the types of a strongly typed graph as they are; its Mish knows no bfloat16."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(half_onnx)).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    types |= {weight.name: weight.data_type for weight in graph.initializer}
    kinds: dict[str, set[int]] = {}
    for node in graph.node:
        kinds.setdefault(node.op_type, set()).add(types[node.input[0]])
    assert kinds["LayerNormalization"] == kinds["Softmax"] == kinds["Mish"] == {FLOAT}
    assert kinds["Conv"] == kinds["Gemm"] == {HALF} and HALF in kinds["MatMul"]
    half = sum(len(weight.raw_data) for weight in graph.initializer if weight.data_type == HALF)
    assert half > 0.95 * sum(len(weight.raw_data) for weight in graph.initializer)


def test_rows_and_frames_are_free_and_inputs_and_output_float32(half_onnx: Path) -> None:
    graph = onnx.load(half_onnx).graph
    told = {
        value.name: (value.type.tensor_type.elem_type, [size.dim_param for size in value.type.tensor_type.shape.dim])
        for value in (*graph.input, *graph.output)
    }
    wide = (FLOAT, ["rows", "", "frames"])
    assert told == {
        **dict.fromkeys(("x", "mu", "cond", "velocity"), wide),
        "t": (FLOAT, ["rows"]),
        "speaker": (FLOAT, ["rows", ""]),
        "horizon": (onnx.TensorProto.INT32, ["rows", "frames"]),
    }


def test_an_export_is_found_again_by_its_content(
    tiny_onnx: Path, exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dit_onnx, "write_onnx", None)  # calling it would fail
    dit = tiny_flow().estimator
    assert export_dit(dit, exports) == tiny_onnx
    with torch.no_grad():
        dit.proj_out.bias[0] += 1e-3
    assert export_path(dit, exports) != tiny_onnx
    assert export_path(tiny_flow(EngineSettings(flow_precision="bfloat16")).estimator, exports) != tiny_onnx


def test_an_export_that_breaks_off_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_off(dit: DiT, path: Path) -> None:
        path.write_bytes(b"half a graph")
        raise OSError("no space left on device")

    monkeypatch.setattr(dit_onnx, "write_onnx", breaks_off)
    with pytest.raises(OSError, match="no space"):
        export_dit(tiny_flow().estimator, tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_the_packages_for_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dit_onnx, "find_spec", lambda name: None if name == "onnx" else importlib.util.find_spec(name))
    with pytest.raises(EngineUnavailable, match="onnx cannot be found; install the `tensorrt` extra"):
        export_dit(tiny_flow().estimator, tmp_path)
