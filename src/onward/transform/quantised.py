"""Weights that are stored as integers, while they are trained: as floating-point numbers that each step rounds.

`w = DequantizeLinear(q, scale, zero)` becomes `DequantizeLinear(QuantizeLinear(w, scale, zero), scale, zero)`, where
`w` is what is trained. So training computes with the numbers that the model will have, and what was given comes back:
the same nodes, and other integers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.build import Names
from onward.constants import add_initializer
from onward.model import Model
from onward.model.core import values

STORED_KEY = "train.stored"
"""In the metadata of a QuantizeLinear: the name of the integers that it stands for."""

_TYPES = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)


def can_be_trained(node: ir.Node, integers: ir.TensorProtocol) -> bool:
    """Whether what a DequantizeLinear reads could be trained: what rounds to it, and only it, is known."""
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    return (
        integers.dtype in _TYPES
        and not node.attributes.get_int("block_size", 0)
        and len(source.uses()) == 1
        and not output.is_graph_output()
    )


def open_up(graph: ir.Graph, node: ir.Node, integers: ir.TensorProtocol, floats: np.ndarray) -> ir.Value:
    """Put a floating-point tensor, under the name of what a DequantizeLinear makes, in the place of its integers."""
    names = Names(value.name for value in values(graph) if value.name)
    source, scale, *zeros = node.inputs
    output = node.outputs[0]
    assert source is not None and scale is not None and source.name is not None and output.name is not None
    trained = add_initializer(graph, output.name, floats)
    output.name = names.fresh(f"{output.name}/dequantized")
    zero = zeros[0] if zeros and zeros[0] is not None else None
    if zero is None:  # without one, QuantizeLinear makes uint8
        shape = () if scale.shape is None else tuple(scale.shape.numpy())
        zero = add_initializer(graph, names.fresh(f"{source.name}/zero"), np.zeros(shape, integers.dtype.numpy()))
    axis = [node.attributes["axis"]] if "axis" in node.attributes else []
    rounding = ir.Node("", "QuantizeLinear", [trained, scale, zero], axis)
    rounding.name = names.fresh(f"{source.name}/QuantizeLinear")
    rounding.metadata_props[STORED_KEY] = source.name
    _forget(graph, source, node)
    rounded = rounding.outputs[0]
    rounded.name, rounded.type, rounded.shape = source.name, ir.TensorType(integers.dtype), trained.shape
    graph.insert_before(node, rounding)
    node.replace_input_with(0, rounded)
    return trained


def put_away(model: Model) -> None:
    """Undo that, in place: the integers that the trained numbers round to."""
    graph = model.graph
    for rounding in [node for node in graph if STORED_KEY in node.metadata_props]:
        trained, scale, zero = rounding.inputs
        rounded = rounding.outputs[0]
        (use,) = rounded.uses()
        assert trained is not None and scale is not None and zero is not None and trained.name and rounded.name
        numbers = quantise(rounding, *(_numbers(value) for value in (trained, scale, zero)))
        graph.initializers.pop(trained.name)
        use.node.replace_input_with(0, None)
        graph.remove(rounding, safe=True)
        if zero not in use.node.inputs and not zero.uses():
            graph.initializers.pop(zero.name or "")
        use.node.replace_input_with(0, add_initializer(graph, rounded.name, numbers))
        use.node.outputs[0].name = trained.name


def stored_as_integers(model: Model) -> dict[str, str]:
    """The names of trained tensors -> those of the integers that they round to."""
    rounding = [node for node in model.graph if STORED_KEY in node.metadata_props]
    return {node.inputs[0].name or "": node.outputs[0].name or "" for node in rounding if node.inputs[0] is not None}


def quantise(node: ir.Node, floats: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """What a QuantizeLinear makes: rounded half to even, and saturated."""
    if scale.ndim and scale.size > 1:
        shape = [1] * floats.ndim
        shape[node.attributes.get_int("axis", 1)] = -1
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    limits = np.iinfo(zero.dtype)
    levels = np.rint(floats / scale) + zero.astype(np.float32)
    rounded: np.ndarray = np.clip(levels, limits.min, limits.max).astype(zero.dtype)
    return rounded


def _numbers(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None, value.name
    return value.const_value.numpy()


def _forget(graph: ir.Graph, source: ir.Value, reader: ir.Node) -> None:
    """Remove the integers, which only `reader` has read."""
    producer = source.producer()
    reader.replace_input_with(0, None)
    if producer is not None:
        graph.remove(producer, safe=True)
        return
    graph.initializers.pop(source.name or "")
    if source in graph.inputs:
        graph.inputs.remove(source)
