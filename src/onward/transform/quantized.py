"""Quantized weights in training: floating-point numbers that each step rounds.

`w = DequantizeLinear(q, scale, zero)` becomes `DequantizeLinear(QuantizeLinear(w, scale, zero),
scale, zero)`, where `w` is trained. So training computes with the numbers of the quantized model,
and afterwards the same nodes come back with other integers.
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
"""Metadata of a QuantizeLinear: the name of the integers that it computes."""
RANGE_KEY = "train.range"
"""Metadata of a QuantizeLinear: the computation of its scale and zero point, as JSON."""
BIAS_KEY = "train.bias"
"""Metadata of a matmul or convolution: how its bias is stored as integers, as JSON: names of the integers,
of their scale, and of the DequantizeLinear."""

EXACT = (ir.DataType.INT8, ir.DataType.UINT8)
"""Types whose matmuls are computed in 32-bit integers, to which a bias can be added."""
_TYPES = (
    *EXACT, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.FLOAT8E4M3FN,
    ir.DataType.FLOAT8E5M2,
)  # fmt: skip
_MOST = 2**31 - 1


def can_be_trained(node: ir.Node, integers: ir.TensorProtocol) -> bool:
    """True if the integers of a DequantizeLinear could be trained: of a known type, read once."""
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    return integers.dtype in _TYPES and len(source.uses()) == 1 and not output.is_graph_output()


def open_weight(graph: ir.Graph, node: ir.Node, integers: ir.TensorProtocol, floats: np.ndarray) -> ir.Value:
    """Replace the integers of a DequantizeLinear by a float tensor, named after its result."""
    names = Names(value.name for value in values(graph) if value.name)
    source, scale, *zeros = node.inputs
    output = node.outputs[0]
    assert source is not None and scale is not None and source.name is not None and output.name is not None
    trained = add_initializer(graph, output.name, floats)
    output.name = names.fresh(f"{output.name}/dequantized")
    zero = zeros[0] if zeros and zeros[0] is not None else None
    if zero is None:  # without a zero point, QuantizeLinear returns uint8
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


def store_as_integers(model: Model) -> None:
    """Store trained weights and biases as integers again, in place."""
    graph = model.graph
    for node in [node for node in graph if BIAS_KEY in node.metadata_props]:
        _store_bias(graph, node)
    for rounding in [node for node in graph if STORED_KEY in node.metadata_props]:
        _store_weight(graph, rounding)
    for node in graph:
        if node.metadata_props.pop(RANGE_KEY, None) is not None:
            for value in node.inputs[1:]:
                _untag(value)


def _store_weight(graph: ir.Graph, rounding: ir.Node) -> None:
    trained, scale, zero = rounding.inputs
    rounded = rounding.outputs[0]
    (use,) = rounded.uses()
    assert trained is not None and scale is not None and zero is not None and trained.name and rounded.name
    numbers = quantize(rounding, *(_numbers(value) for value in (trained, scale, zero)))
    _untag(scale)
    use.node.replace_input_with(0, None)
    graph.remove(rounding, safe=True)
    is_read = bool(trained.uses())  # by other nodes
    if not is_read:
        graph.initializers.pop(trained.name)
    if zero not in use.node.inputs and not zero.uses():
        graph.initializers.pop(zero.name or "")
    tensor = ir.Tensor(numbers, dtype=ir.DataType.from_numpy(numbers.dtype), name=rounded.name)
    use.node.replace_input_with(0, add_initializer(graph, rounded.name, tensor))
    if not is_read:
        use.node.outputs[0].name = trained.name


def stored_weights(model: Model) -> dict[str, str]:
    """Return the names of trained tensors, with those of the integers that they round to."""
    rounding = [node for node in model.graph if STORED_KEY in node.metadata_props]
    return {node.inputs[0].name or "": node.outputs[0].name or "" for node in rounding if node.inputs[0] is not None}


def quantize(node: ir.Node, floats: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Return the result of a QuantizeLinear: rounded half to even, and saturated."""
    scale, zero = (spread(node, parameter, floats) for parameter in (scale, zero))
    dtype, levels = ir.DataType.from_numpy(zero.dtype), floats / scale
    if dtype.is_integer():
        levels = np.rint(levels) + zero.astype(np.float32)
    within = np.clip(levels, float(dtype.min), float(dtype.max))
    return (within.astype(np.int32) if dtype.is_integer() else within).astype(zero.dtype)


def spread(node: ir.Node, parameter: np.ndarray, floats: np.ndarray) -> np.ndarray:
    """Return a scale or zero point in a shape that broadcasts with its tensor."""
    if parameter.size == 1:
        return parameter.reshape(())
    axis = node.attributes.get_int("axis", 1)
    if block := node.attributes.get_int("block_size", 0):
        return np.repeat(parameter, block, axis)[tuple(map(slice, floats.shape))]
    shape = [1] * floats.ndim
    shape[axis] = -1
    return parameter.reshape(shape)


def weight_dequantizer(matmul: ir.Node) -> ir.Node | None:
    """Return the DequantizeLinear behind a weight, which may be transposed after it."""
    value = matmul.inputs[1]
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Transpose", "Identity"):
        value = node.inputs[0]
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def stored_biases(model: Model) -> dict[str, tuple[str, str]]:
    """Return the names of biases stored as integers, with those of the integers and of their scale."""
    biases = {}
    for node in model.graph:
        if BIAS_KEY in node.metadata_props and (bias := node.inputs[2]):
            fact = json.loads(node.metadata_props[BIAS_KEY])
            biases[bias.name or ""] = (fact["integers"], fact["scale"])
    return biases


def open_bias(graph: ir.Graph, matmul: ir.Node) -> ir.Value | None:
    """Replace an integer bias that one node reads by a floating-point one; None if there is none."""
    bias = matmul.inputs[2] if len(matmul.inputs) > 2 else None
    node = bias.producer() if bias is not None else None
    if bias is None or node is None or node.op_type != "DequantizeLinear" or len(bias.uses()) > 1:
        return None
    integers, scale, zero = (*node.inputs, None)[:3]
    tensor, factor = constant_tensor(integers), constant_tensor(scale)
    if tensor is None or factor is None or integers is None or scale is None or tensor.dtype != ir.DataType.INT32:
        return None
    floats = tensor.numpy().astype(np.float32) * factor.numpy().astype(np.float32)
    fact = {
        "integers": integers.name,
        "scale": scale.name,
        "shape": list(factor.shape.numpy()),
        "zero": None if zero is None else [zero.name, list(constant_tensor(zero).shape.numpy())],  # type: ignore[union-attr]
        "node": node.name,
        "axis": node.attributes.get_int("axis", None),
    }
    name = bias.name or ""
    matmul.replace_input_with(2, None)
    graph.remove(node, safe=True)
    for value in (integers, scale, zero):
        if value is not None and not value.uses():
            graph.initializers.pop(value.name or "", None)
    opened = add_initializer(graph, name, floats)
    matmul.replace_input_with(2, opened)
    matmul.metadata_props[BIAS_KEY] = json.dumps(fact)
    return opened


def _store_bias(graph: ir.Graph, matmul: ir.Node) -> None:
    """Store a bias as integers, with the scale of the integer matmul that runtimes add it to."""
    fact = json.loads(matmul.metadata_props.pop(BIAS_KEY))
    x, bias, of_weight = matmul.inputs[0], matmul.inputs[2], weight_dequantizer(matmul)
    of_x = x.producer() if x is not None else None
    assert bias is not None and bias.name and of_x is not None and of_weight is not None
    of_x_scale, weight_scale = of_x.inputs[1], of_weight.inputs[1]
    assert of_x_scale is not None and weight_scale is not None
    floats, x_scale = _numbers(bias).astype(np.float64), float(_numbers(of_x_scale).reshape(()))
    _make_room(weight_scale, np.abs(floats) / (x_scale * _MOST))
    factor: np.ndarray = np.float32(x_scale) * _numbers(weight_scale)
    numbers = np.rint(floats / factor.reshape(-1)).astype(np.int32)
    inputs: list[ir.Value] = []
    matmul.replace_input_with(2, None)
    graph.initializers.pop(bias.name)
    inputs.append(add_initializer(graph, fact["integers"], numbers))
    inputs.append(add_initializer(graph, fact["scale"], factor.reshape(fact["shape"])))
    if fact["zero"]:
        name, shape = fact["zero"]
        inputs.append(add_initializer(graph, name, np.zeros(shape, np.int32)))
    axis = [] if fact["axis"] is None else [ir.AttrInt64("axis", fact["axis"])]
    node = ir.Node("", "DequantizeLinear", inputs, axis, name=fact["node"])
    output = node.outputs[0]
    output.name, output.type, output.shape = bias.name, bias.type, bias.shape
    graph.insert_before(matmul, node)
    matmul.replace_input_with(2, output)


def _make_room(scale: ir.Value, least: np.ndarray) -> None:
    """Raise tiny scales of weights, as of a dead channel, so that the bias fits into 32 bits."""
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
    """Remove the integers that only `reader` reads."""
    producer = source.producer()
    reader.replace_input_with(0, None)
    if producer is not None:
        graph.remove(producer, safe=True)
        return
    graph.initializers.pop(source.name or "")
    if source in graph.inputs:
        graph.inputs.remove(source)
