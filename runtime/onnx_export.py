"""How a module is written as an ONNX file: front-end nets for onnxruntime, the DiT for TensorRT."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn


def export_onnx(
    net: nn.Module,
    path: Path,
    inputs: Mapping[str, Tensor],
    output: str,
    dynamic: Sequence[Mapping[int, object]],
) -> None:
    """Writes a module in evaluation mode as one ONNX file; `dynamic` names the free axes of each example input.

    Needs the packages `onnx` and `onnxscript`.
    """
    was_training = net.training
    net.eval()
    try:
        torch.onnx.export(
            net,
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=[output],
            dynamic_shapes=tuple(dynamic),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    finally:
        net.train(was_training)
    _forget_origin(path)


def _forget_origin(path: Path) -> None:
    """Takes out the exporter's notes: stack traces with paths of the machine, four times the size of a small net."""
    import onnx

    model = onnx.load(path)
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    del model.graph.value_info[:]
    del model.graph.metadata_props[:]
    onnx.save(model, path)
