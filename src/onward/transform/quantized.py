"""Weights that are stored as integers, while they are trained: as floating-point numbers that each step rounds.

`w = DequantizeLinear(q, scale, zero)` becomes `DequantizeLinear(QuantizeLinear(w, scale, zero), scale, zero)`, where
`w` is what is trained. So training computes with the numbers that the model will have, and what was given comes back:
the same nodes, and other integers.
"""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir

from onward.build import Names
from onward.constants import add_initializer, constant_tensor
from onward.model import Model
from onward.model.core import values
from onward.model.state import without_tags

STORED_KEY = "train.stored"
"""In the metadata of a QuantizeLinear: the name of the integers that it stands for."""
RANGE_KEY = "train.range"
"""In the metadata of a QuantizeLinear: how its scale and zero point come about, as JSON."""
BIAS_KEY = "train.bias"
"""In the metadata of a product: what becomes of its bias when its weight is stored as integers, as JSON: names of the
integers, of their scale, and of the node that makes floating-point numbers of them."""

EXACT = (ir.DataType.INT8, ir.DataType.UINT8)
"""Types of which products are computed in integers of 32 bits, to which a bias can be added."""
_TYPES = (
    *EXACT, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.FLOAT8E4M3FN,
    ir.DataType.FLOAT8E5M2,
)  # fmt: skip
_MOST = 2**31 - 1


def can_be_trained(node: ir.Node, integers: ir.TensorProtocol) -> bool:
    """Whether what a DequantizeLinear reads could be trained: what rounds to it, and only it, is known."""
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    return integers.dtype in _TYPES and len(source.uses()) == 1 and not output.is_graph_output()


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
        nothing = ir.Tensor(np.zeros(shape, integers.dtype.numpy()), dtype=integers.dtype)
        zero = add_initializer(graph, names.fresh(f"{source.name}/zero"), nothing)
    settings = [node.attributes[name] for name in ("axis", "block_size") if name in node.attributes]
    rounding = ir.Node("", "QuantizeLinear", [trained, scale, zero], settings)
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
    for node in [node for node in graph if BIAS_KEY in node.metadata_props]:
        _put_bias_away(graph, node)
    for rounding in [node for node in graph if STORED_KEY in node.metadata_props]:
        _put_weight_away(graph, rounding)
    for node in graph:
        if node.metadata_props.pop(RANGE_KEY, None) is not None:
            for value in node.inputs[1:]:
                _untag(value)


def _put_weight_away(graph: ir.Graph, rounding: ir.Node) -> None:
    trained, scale, zero = rounding.inputs
    rounded = rounding.outputs[0]
    (use,) = rounded.uses()
    assert trained is not None and scale is not None and zero is not None and trained.name and rounded.name
    numbers = quantise(rounding, *(_numbers(value) for value in (trained, scale, zero)))
    _untag(scale)
    use.node.replace_input_with(0, None)
    graph.remove(rounding, safe=True)
    is_read = bool(trained.uses())  # by others, as it is
    if not is_read:
        graph.initializers.pop(trained.name)
    if zero not in use.node.inputs and not zero.uses():
        graph.initializers.pop(zero.name or "")
    tensor = ir.Tensor(numbers, dtype=ir.DataType.from_numpy(numbers.dtype), name=rounded.name)
    use.node.replace_input_with(0, add_initializer(graph, rounded.name, tensor))
    if not is_read:
        use.node.outputs[0].name = trained.name


def stored_as_integers(model: Model) -> dict[str, str]:
    """The names of trained tensors -> those of the integers that they round to."""
    rounding = [node for node in model.graph if STORED_KEY in node.metadata_props]
    return {node.inputs[0].name or "": node.outputs[0].name or "" for node in rounding if node.inputs[0] is not None}


def quantise(node: ir.Node, floats: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """What a QuantizeLinear makes: rounded half to even, and saturated."""
    scale, zero = (_spread(node, parameter, floats) for parameter in (scale, zero))
    dtype, levels = ir.DataType.from_numpy(zero.dtype), floats / scale
    if dtype.is_integer():
        levels = np.rint(levels) + zero.astype(np.float32)
    within = np.clip(levels, float(dtype.min), float(dtype.max))
    return (within.astype(np.int32) if dtype.is_integer() else within).astype(zero.dtype)


def _spread(node: ir.Node, parameter: np.ndarray, floats: np.ndarray) -> np.ndarray:
    """A scale or zero point in a shape that broadcasts with what it is for."""
    if parameter.size == 1:
        return parameter.reshape(())
    axis = node.attributes.get_int("axis", 1)
    if block := node.attributes.get_int("block_size", 0):
        return np.repeat(parameter, block, axis)[tuple(map(slice, floats.shape))]
    shape = [1] * floats.ndim
    shape[axis] = -1
    return parameter.reshape(shape)


def pair_of_weight(product: ir.Node) -> ir.Node | None:
    """The DequantizeLinear behind the weight of a product, which may be transposed after it."""
    value = product.inputs[1]
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Transpose", "Identity"):
        value = node.inputs[0]
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def stored_biases(model: Model) -> dict[str, tuple[str, str]]:
    """The names of biases that will be stored as integers -> those of the integers, and of their scale."""
    facts = (
        (node, json.loads(node.metadata_props[BIAS_KEY])) for node in model.graph if BIAS_KEY in node.metadata_props
    )
    return {node.inputs[2].name or "": (fact["integers"], fact["scale"]) for node, fact in facts if node.inputs[2]}


def open_bias_up(graph: ir.Graph, product: ir.Node) -> ir.Value | None:
    """Put a floating-point bias in the place of integers that only one product reads; None if it has no such bias."""
    bias = product.inputs[2] if len(product.inputs) > 2 else None
    node = bias.producer() if bias is not None else None
    if bias is None or node is None or node.op_type != "DequantizeLinear" or len(bias.uses()) > 1:
        return None
    integers, scale, zero = (*node.inputs, None)[:3]
    tensor, factor = constant_tensor(integers), constant_tensor(scale)
    if tensor is None or factor is None or integers is None or scale is None or tensor.dtype != ir.DataType.INT32:
        return None
    floats = tensor.numpy().astype(np.float32) * factor.numpy().astype(np.float32)
    described = {
        "integers": integers.name,
        "scale": scale.name,
        "shape": list(factor.shape.numpy()),
        "zero": None if zero is None else [zero.name, list(constant_tensor(zero).shape.numpy())],  # type: ignore[union-attr]
        "node": node.name,
        "axis": node.attributes.get_int("axis", None),
    }
    name = bias.name or ""
    product.replace_input_with(2, None)
    graph.remove(node, safe=True)
    for value in (integers, scale, zero):
        if value is not None and not value.uses():
            graph.initializers.pop(value.name or "", None)
    opened = add_initializer(graph, name, floats)
    product.replace_input_with(2, opened)
    product.metadata_props[BIAS_KEY] = json.dumps(described)
    return opened


def _put_bias_away(graph: ir.Graph, product: ir.Node) -> None:
    """Make integers of a bias, of the scale that the product of integers has, which runtimes add it to."""
    fact = json.loads(product.metadata_props.pop(BIAS_KEY))
    x, bias, of_weight = product.inputs[0], product.inputs[2], pair_of_weight(product)
    of_x = x.producer() if x is not None else None
    assert bias is not None and bias.name and of_x is not None and of_weight is not None
    of_x_scale, weight_scale = of_x.inputs[1], of_weight.inputs[1]
    assert of_x_scale is not None and weight_scale is not None
    floats, x_scale = _numbers(bias).astype(np.float64), float(_numbers(of_x_scale).reshape(()))
    _make_room(weight_scale, np.abs(floats) / (x_scale * _MOST))
    factor: np.ndarray = np.float32(x_scale) * _numbers(weight_scale)
    numbers = np.rint(floats / factor.reshape(-1)).astype(np.int32)
    inputs: list[ir.Value] = []
    product.replace_input_with(2, None)
    graph.initializers.pop(bias.name)
    inputs.append(add_initializer(graph, fact["integers"], numbers))
    inputs.append(add_initializer(graph, fact["scale"], factor.reshape(fact["shape"])))
    if fact["zero"]:
        name, shape = fact["zero"]
        inputs.append(add_initializer(graph, name, np.zeros(shape, np.int32)))
    axis = [] if fact["axis"] is None else [ir.AttrInt64("axis", fact["axis"])]
    made = ir.Node("", "DequantizeLinear", inputs, axis, name=fact["node"])
    made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = bias.name, bias.type, bias.shape
    graph.insert_before(product, made)
    product.replace_input_with(2, made.outputs[0])


def _make_room(scale: ir.Value, least: np.ndarray) -> None:
    """Raise scales of weights that are so small, as those of a dead channel, that 32 bits would not hold the bias."""
    old = _numbers(scale)
    needed = least.reshape(old.shape) if least.size == old.size else np.full(old.shape, least.max())
    if (needed > old).any():
        raised = np.maximum(old, needed * 1.001).astype(np.float32)
        scale.const_value = ir.Tensor(raised, name=scale.name, metadata_props=dict(scale.const_value.metadata_props))  # type: ignore[union-attr]


def _untag(value: ir.Value | None) -> None:
    if value is not None and value.const_value is not None:
        value.const_value = without_tags(value.const_value)


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
