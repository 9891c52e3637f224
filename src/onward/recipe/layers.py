"""Layers of a graph: a matmul or convolution with a stored weight, and its bias."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from onward.constants import constant_tensor
from onward.errors import UnknownNameError, suggest
from onward.model import Model
from onward.standard import is_standard

_TORCH_SCOPES = "pkg.torch.onnx.name_scopes"
_PRODUCTS = {"MatMul", "Gemm", "Conv"}
_ON_THE_WAY = {"Identity", "Transpose", "Cast", "QuantizeLinear", "DequantizeLinear"}
# Operators that may stand between the logits, which they read as first input, and an output.
_AFTER_LOGITS = {
    "ArgMax", "AveragePool", "Cast", "Clip", "Dropout", "Flatten", "Gather", "GlobalAveragePool", "GlobalMaxPool",
    "Identity", "LogSoftmax", "NegativeLogLikelihoodLoss", "ReduceMax", "ReduceMean", "Relu", "Reshape", "Resize",
    "Sigmoid", "Slice", "Softmax", "SoftmaxCrossEntropyLoss", "Squeeze", "TopK", "Transpose", "Unsqueeze", "Upsample",
}  # fmt: skip
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div"}


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A MatMul, Gemm or Conv whose second input is a stored weight."""

    node: ir.Node
    weight: ir.Value
    """The stored weight; `path` are the nodes between it and the operator: Transpose, Cast, ..."""
    path: tuple[ir.Node, ...]

    @property
    def is_convolution(self) -> bool:
        return self.node.op_type == "Conv"

    @property
    def is_quantized(self) -> bool:
        return any(node.op_type == "DequantizeLinear" for node in self.path)

    @property
    def output(self) -> ir.Value:
        return self.node.outputs[0]

    @property
    def _tensor(self) -> ir.TensorProtocol:
        tensor = constant_tensor(self.weight)
        assert tensor is not None
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape.numpy())

    @property
    def dtype(self) -> ir.DataType:
        """Type in which the layer computes, which may differ from that of the stored weight."""
        dtype = self._tensor.dtype
        for node in self.path:
            if node.op_type == "Cast":
                dtype = ir.DataType(node.attributes.get_int("to", dtype.value))
            elif node.op_type == "DequantizeLinear" and (scale := node.inputs[1]) is not None:
                dtype = scale.dtype or ir.DataType.FLOAT
        return dtype

    @property
    def units_first(self) -> bool:
        """True if the weight is stored as [out, in, ...] and not as [in, out]."""
        turns = sum(node.op_type == "Transpose" for node in self.path)
        return self.is_convolution or (turns + self.node.attributes.get_int("transB", 0)) % 2 == 1

    @property
    def units(self) -> int:
        """Number of outputs."""
        return self.shape[0 if self.units_first else -1]

    @property
    def module(self) -> str:
        """Name of the module that owns the weight.

        A transposed weight has an arbitrary name (`val_54`, `onnx::MatMul_97`). Then the name comes
        from the exporter's note, the node's name (`/layers.0/query/MatMul`) or the bias.
        """
        name, bias = self.weight.name or "", self.bias()
        if name.endswith(".weight"):
            return name.removesuffix(".weight")
        scopes = re.findall(r"'([^']*)'", self.node.metadata_props.get(_TORCH_SCOPES, ""))
        if len(scopes) > 1 and scopes[-2]:
            return str(scopes[-2])
        if path := (self.node.name or "").strip("/").split("/")[:-1]:
            return ".".join(path)
        return (bias[0].name or "").removesuffix(".bias") if bias and (bias[0].name or "").endswith(".bias") else name

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the weight in the order of preference."""
        return tuple(dict.fromkeys((self.module, f"{self.module}.weight", self.weight.name or "")))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layer in the order of preference."""
        candidates = (*self.weight_names, self.node.name, self.output.name)
        return tuple(dict.fromkeys(name for name in candidates if name))

    def bias(self) -> tuple[ir.Value, ir.Node, int] | None:
        """Return the stored bias, the node that reads it and the index of the input."""
        if self.node.op_type != "MatMul":
            value = self.node.inputs[2] if len(self.node.inputs) > 2 else None
            return (value, self.node, 2) if value is not None and constant_tensor(value) is not None else None
        readers = tuple(self.output.uses())
        if len(readers) == 1 and not self.output.is_graph_output():
            node, index = readers[0]
            other = node.inputs[1 - index] if node.op_type == "Add" else None
            if other is not None and constant_tensor(other) is not None:
                return other, node, 1 - index
        return None


def layers(graph: ir.Graph) -> list[Layer]:
    """Return the layers of a graph in order, with those of nested graphs that use its weights."""
    candidates = (_layer(node, graph) for node in graph.all_nodes() if is_standard(node))
    return [layer for layer in candidates if layer is not None]


def _layer(node: ir.Node, graph: ir.Graph) -> Layer | None:
    if node.op_type not in _PRODUCTS or len(node.inputs) < 2:
        return None
    value, path = node.inputs[1], []
    while value is not None and constant_tensor(value) is None:
        producer = value.producer()
        if producer is None or producer.op_type not in _ON_THE_WAY:
            return None
        path.append(producer)
        value = producer.inputs[0]
    if value is None or value.graph is not graph:
        return None
    layer = Layer(node, value, tuple(reversed(path)))
    rank, turns = len(layer.shape), any(step.op_type == "Transpose" for step in path)
    fits = rank >= 3 and not turns if layer.is_convolution else rank == 2
    return layer if fits else None


def find_head(model: Model, name: str | None = None) -> Layer:
    """Return the layer that computes the logits: by name, or the last one before an output."""
    candidates = layers(model.graph)
    if name is not None:
        named = [layer for layer in candidates if name in layer.names]
        if len(named) != 1:
            problem = f"no layer `{name}`" if not named else f"`{name}` is the name of {len(named)} layers"
            names = [other for layer in candidates for other in layer.names]
            raise UnknownNameError(problem, hint=suggest(name, names) or listing(candidates))
        return named[0]
    by_node = {layer.node: layer for layer in candidates}
    heads = dict.fromkeys(head for output in model.outputs if (head := _before(output, by_node)) is not None)
    if len(heads) == 1:
        return next(iter(heads))
    problem = f"{len(heads)} layers may give the logits" if heads else "no layer gives the logits of an output"
    raise UnknownNameError(problem, hint=listing(heads or candidates, "name it with `layer`; "))


def _before(output: ir.Value, by_node: dict[ir.Node, Layer]) -> Layer | None:
    value: ir.Value | None = output
    while value is not None and (node := value.producer()) is not None:
        if node in by_node:
            return by_node[node]
        if node.op_type in _AFTER_LOGITS:
            value = node.inputs[0]
        elif node.op_type in _ELEMENTWISE:
            computed = [v for v in node.inputs if v is not None and constant_tensor(v) is None]
            value = computed[0] if len(computed) == 1 else None
        else:
            return None
    return None


def listing(candidates: Iterable[Layer], before: str = "") -> str:
    """Return a hint that lists layers, the last ones first."""
    names = list(dict.fromkeys(layer.names[0] for layer in candidates))[::-1]
    if not names:
        return "inline functions first (`onward inline`): no MatMul, Gemm or Conv has a stored weight"
    return f"{before}there are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def downstream(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that depend on a value, with those in nested graphs."""
    pending, seen = [value], set()
    while pending:
        current = pending.pop(0)
        for node in current.consumers():
            if node not in seen:
                seen.add(node)
                pending += node.outputs
                yield node
