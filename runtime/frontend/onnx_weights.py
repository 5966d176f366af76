"""Takes the weights of an ONNX file into a torch net of the same architecture, whatever the file calls them.

Exporters drop names, transpose, store in half precision, and fold a batch norm into the convolution before it. What
stays is the order of computation. So both sides are read as lists of layers in that order, and each layer of the net
takes the next one of the file with the same kind and shape. Whether that was right is for the caller to find out, by a
run of both.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.errors import EngineUnavailable


@dataclass(frozen=True, slots=True, eq=False)
class OnnxLayer:
    """One layer of a file. Matrices are [out, in]."""

    kind: str  # conv, linear, layer norm, batch norm
    arrays: tuple[np.ndarray, ...]  # weight, then bias if there is one; of a batch norm mean and variance too
    geometry: Hashable = ()  # of a convolution: strides, dilations, groups
    is_normed: bool = False  # a batch norm reads the output

    @property
    def signature(self) -> Hashable:
        # A bias tells a layer apart but for a convolution, which may have got it from a batch norm.
        return self.kind, self.arrays[0].shape, self.geometry, len(self.arrays) > 1 or self.kind == "conv"


def read_layers(path: Path) -> list[OnnxLayer]:
    """Layers with weights in the order of computation. Raises EngineUnavailable when the file cannot be read."""
    try:
        import onnx
    except ImportError as missing:
        raise EngineUnavailable("the package `onnx` is not installed; install it, or choose onnxruntime") from missing
    try:
        graph = onnx.load(str(path)).graph
    except Exception as broken:  # protobuf has its own classes
        raise EngineUnavailable(f"{path.name} cannot be read ({broken})") from broken
    return _Graph(graph).layers()


class _Graph:
    def __init__(self, graph: Any) -> None:
        self._nodes = list(graph.node)
        self._stored = {value.name: value for value in graph.initializer}
        self._makers: dict[str, Any] = {}  # of what depends on stored numbers alone
        for node in self._nodes:
            if len(node.output) == 1 and all(
                not name or name in self._stored or name in self._makers for name in node.input
            ):
                self._makers[node.output[0]] = node
        self._users: dict[str, list[Any]] = defaultdict(list)
        for node in self._nodes:
            for name in node.input:
                self._users[name].append(node)

    def layers(self) -> list[OnnxLayer]:
        found = (self._READERS[node.op_type](self, node) for node in self._nodes if node.op_type in self._READERS)
        return [layer for layer in found if layer is not None]

    def _value(self, name: str) -> np.ndarray | None:
        """The value of a name that depends on stored numbers alone; None when it is computed from the input."""
        from onnx import numpy_helper
        from onnx.reference import ReferenceEvaluator

        if name in self._stored:
            return numpy_helper.to_array(self._stored[name])
        if name not in self._makers:
            return None
        node = self._makers[name]
        inputs = {each: self._value(each) for each in node.input if each}
        results: Any = ReferenceEvaluator(node).run(None, inputs)
        return np.asarray(results[0])

    def _values(self, names: list[str]) -> tuple[np.ndarray, ...] | None:
        values = [self._value(name) for name in names if name]
        known = tuple(np.asarray(value, np.float32) for value in values if value is not None)
        return known if len(known) == len(values) else None

    def _conv(self, node: Any) -> OnnxLayer | None:
        arrays = self._values(node.input[1:])
        if arrays is None:
            return None
        axes = arrays[0].ndim - 2
        attributes = {each.name: tuple(each.ints) or each.i for each in node.attribute}
        strides, dilations = (attributes.get(name, (1,) * axes) for name in ("strides", "dilations"))
        is_normed = any(user.op_type == "BatchNormalization" for user in self._users[node.output[0]])
        return OnnxLayer("conv", arrays, (strides, dilations, attributes.get("group", 1)), is_normed)

    def _gemm(self, node: Any) -> OnnxLayer | None:
        arrays = self._values(node.input[1:])
        if arrays is None:
            return None
        transposed = any(each.name == "transB" and each.i for each in node.attribute)
        return OnnxLayer("linear", (arrays[0] if transposed else arrays[0].T, *arrays[1:]))

    def _matmul(self, node: Any) -> OnnxLayer | None:
        weight = self._value(node.input[1])
        if weight is None or weight.ndim != 2:
            return None
        bias = self._added(node.output[0], weight.shape[1])
        arrays = (weight.T,) if bias is None else (weight.T, bias)
        return OnnxLayer("linear", tuple(np.asarray(array, np.float32) for array in arrays))

    def _added(self, name: str, size: int) -> np.ndarray | None:
        """What is added to a value right away, if it is a stored vector."""
        return self._operand(name, "Add", size)[0]

    def _operand(self, name: str, op: str, size: int | None = None) -> tuple[np.ndarray | None, str]:
        """Stored vector with which the only user of a value combines it, and the name of the result."""
        users = self._users[name]
        if len(users) == 1 and users[0].op_type == op:
            for other in users[0].input:
                value = None if other == name else self._value(other)
                if value is not None and value.size > 1 and value.size == max(value.shape) == (size or value.size):
                    return value.reshape(-1), users[0].output[0]
        return None, ""

    def _layer_norm(self, node: Any) -> OnnxLayer | None:
        arrays = self._values(node.input[1:])
        return None if arrays is None else OnnxLayer("layer norm", arrays)

    def _spelled_layer_norm(self, node: Any) -> OnnxLayer | None:
        """Before opset 17: the division by the deviation, times weight, plus bias."""
        weight, product = self._operand(node.output[0], "Mul")
        if weight is None:
            return None
        bias = self._added(product, len(weight))
        return None if bias is None else OnnxLayer("layer norm", (weight, bias))

    def _batch_norm(self, node: Any) -> OnnxLayer | None:
        arrays = self._values(node.input[1:])
        return None if arrays is None else OnnxLayer("batch norm", arrays)

    _READERS: dict[str, Callable[["_Graph", Any], OnnxLayer | None]] = {  # noqa: RUF012
        "Conv": _conv,
        "Gemm": _gemm,
        "MatMul": _matmul,
        "LayerNormalization": _layer_norm,
        "Div": _spelled_layer_norm,
        "BatchNormalization": _batch_norm,
    }


def fill(net: nn.Module, layers: list[OnnxLayer], run: Callable[[nn.Module], object]) -> None:
    """Gives a net on the meta device the weights of a file; it lies on the CPU afterwards.

    `run` calls the net once with example inputs, which shows the order of its layers. Raises EngineUnavailable when a
    layer on either side has no partner.
    """
    net.to_empty(device="cpu")
    for value in net.state_dict().values():
        value.fill_(torch.nan if value.is_floating_point() else 0)
    order = _trace(net, run)
    waiting: dict[Hashable, deque[OnnxLayer]] = defaultdict(deque)
    for layer in layers:
        waiting[layer.signature].append(layer)
    folded: set[nn.Module] = set()
    for name, module, norm in order:
        if module in folded:
            continue
        signature = _signature(module)
        if not waiting[signature]:
            raise EngineUnavailable(f"the file has no layer for {name} ({module})")
        layer = waiting[signature].popleft()
        _assign(module, layer)
        if norm is not None and not layer.is_normed:
            _stand_for(norm, layer.arrays[1:])
            folded.add(norm)
    left = [layer for queue in waiting.values() for layer in queue]
    if left:
        shapes = ", ".join(f"{layer.kind} {list(layer.arrays[0].shape)}" for layer in left[:5])
        raise EngineUnavailable(f"the file has {len(left)} layers more than the net: {shapes}")
    unset = [name for name, value in net.state_dict().items() if value.isnan().any()]
    if unset:
        raise EngineUnavailable(f"the file has no numbers for {', '.join(unset[:5])}")


def _trace(net: nn.Module, run: Callable[[nn.Module], object]) -> list[tuple[str, nn.Module, nn.BatchNorm1d | None]]:
    """Layers in the order of their calls, each with the batch norm that reads its very output."""
    order: list[tuple[str, nn.Module]] = []
    made: dict[int, nn.Module] = {}
    norms: dict[nn.Module, Any] = {}
    outputs: list[Tensor] = []  # kept alive, so that no two have the same id

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            order.append((name, module))
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and id(inputs[0]) in made:
                norms[made[id(inputs[0])]] = module
            made[id(output)] = module
            outputs.append(output)

        return hook

    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)
    hooks = [
        module.register_forward_hook(note(name)) for name, module in net.named_modules() if isinstance(module, kinds)
    ]
    try:
        with torch.inference_mode():
            run(net)
    finally:
        for hook in hooks:
            hook.remove()
    return [(name, module, norms.get(module)) for name, module in order]


def _signature(module: nn.Module) -> Hashable:
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return "conv", tuple(module.weight.shape), (module.stride, module.dilation, module.groups), True
    if isinstance(module, nn.Linear):
        return "linear", tuple(module.weight.shape), (), module.bias is not None
    if isinstance(module, nn.LayerNorm):
        return "layer norm", tuple(module.weight.shape), (), True
    assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
    return "batch norm", (module.num_features,), (), True


def _assign(module: nn.Module, layer: OnnxLayer) -> None:
    names = ("weight", "bias", "running_mean", "running_var")
    with torch.no_grad():
        for name, array in zip(names, layer.arrays, strict=False):
            target = getattr(module, name)
            if target is not None:
                target.copy_(_tensor(array))


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, np.float32))  # a copy: what comes out of a file may not be written to


def _stand_for(norm: nn.Module, bias: tuple[np.ndarray, ...]) -> None:
    """Makes a batch norm add a bias, if there is one, and do nothing else: it was folded into what lies before it."""
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    with torch.no_grad():
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.zero_()
        for each in bias:
            norm.running_mean.sub_(_tensor(each))
        norm.running_var.fill_(1.0 - norm.eps)
        if norm.affine:
            norm.weight.fill_(1.0)
            norm.bias.zero_()
