"""BatchNormalization behind a convolution, made part of its weight and bias: as inference runtimes have it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.constants import add_initializer, constant_tensor
from onward.model import Model
from onward.model.state import with_metadata
from onward.recipe.constants import expose
from onward.standard import is_standard

_OUTPUT_AXIS = {"Conv": 0, "ConvTranspose": 1}


def fold_normalizations(model: Model) -> None:
    """Fold each, by its running statistics, into the convolution that only it reads, in place."""
    for node in [node for node in model.graph if node.op_type == "BatchNormalization" and is_standard(node)]:
        x = node.inputs[0]
        layer = x.producer() if x is not None else None
        if layer is not None and x is not None and _can_be_folded(layer, node, x):
            _fold(model, layer, node)


def _can_be_folded(layer: ir.Node, node: ir.Node, between: ir.Value) -> bool:
    if layer.op_type not in _OUTPUT_AXIS or layer.graph is not node.graph or len(between.uses()) > 1:
        return False
    if layer.op_type == "ConvTranspose" and layer.attributes.get_int("group", 1) > 1:
        return False  # a slice of its weight serves several channels
    weight, bias = layer.inputs[1], layer.inputs[2] if len(layer.inputs) > 2 else None
    stored = [constant_tensor(value) for value in (*layer.inputs[1:], *node.inputs[1:])]
    extra = any(output.uses() for output in node.outputs[1:])
    return (
        weight is not None
        and [use.node for use in weight.uses() if use.node.op_type != "Shape"] == [layer]
        and (bias is None or len(bias.uses()) == 1)
        and not extra
        and not between.is_graph_output()
        and not node.attributes.get_int("training_mode", 0)
        and all(tensor is not None and tensor.dtype == ir.DataType.FLOAT for tensor in stored)
    )


def _fold(model: Model, layer: ir.Node, node: ir.Node) -> None:
    graph = model.graph
    scale, shift, mean, variance = (_numbers(value) for value in node.inputs[1:5])
    factor = scale / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    weight = layer.inputs[1]
    assert weight is not None
    shape = [1] * len(constant_tensor(weight).shape)  # type: ignore[union-attr]
    shape[_OUTPUT_AXIS[layer.op_type]] = -1
    _put(expose(graph, weight), _numbers(weight) * factor.reshape(shape))
    bias = layer.inputs[2] if len(layer.inputs) > 2 else None
    if bias is not None:
        _put(expose(graph, bias), (_numbers(bias) - mean) * factor + shift)
    else:
        name = node.inputs[2].name if node.inputs[2] is not None else None
        fresh = model.names().fresh(f"{name or layer.name}/folded")
        added = add_initializer(graph, fresh, (shift - mean * factor).astype(np.float32))
        layer.resize_inputs(3)
        layer.replace_input_with(2, added)
    _take_place(graph, layer, node)


def _take_place(graph: ir.Graph, layer: ir.Node, node: ir.Node) -> None:
    """Let a layer give what the normalization behind it gave, which goes with all that only it has read."""
    old, new = node.outputs[0], layer.outputs[0]
    name, type_, dims = old.name, old.type, old.shape
    read = [value for value in node.inputs[1:] if value is not None]
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    new.name, new.type, new.shape = name, type_, dims
    for value in read:
        if not value.uses() and value.is_initializer() and value not in graph.inputs:
            graph.initializers.pop(value.name or "")


def _numbers(value: ir.Value | None) -> np.ndarray:
    tensor = constant_tensor(value)
    assert tensor is not None
    wide: np.ndarray = tensor.numpy().astype(np.float64)
    return wide


def _put(value: ir.Value, numbers: np.ndarray) -> None:
    old = value.const_value
    assert old is not None
    value.const_value = with_metadata(ir.Tensor(numbers.astype(np.float32)), dict(old.metadata_props), like=old)
