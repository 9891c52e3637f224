"""What of a model is rounded to integers, by its QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import onnx_ir as ir

from onward.constants import constant_tensor
from onward.inspect.summary_fields import Quantization, QuantizedWeights
from onward.inspect.values import dtype_name
from onward.model import Model
from onward.standard import is_standard
from onward.transform.quantized import RANGE_KEY


def describe_quantization(model: Model) -> Quantization | None:
    """Which weights and activations are rounded, and to what; None if nothing is."""
    nodes = [node for node in model.graph if is_standard(node)]
    weights: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        if (shape := _weight_shape(node)) is not None:
            weights.setdefault((_type(node), _parts(node)), []).append(math.prod(shape))
    activations: dict[str, int] = {}
    for node in nodes:
        if node.op_type == "QuantizeLinear" and constant_tensor(node.inputs[0]) is None:
            activations[_type(node)] = activations.get(_type(node), 0) + 1
    if not weights and not activations:
        return None
    return Quantization(
        tuple(QuantizedWeights(kind, parts, len(sizes), sum(sizes)) for (kind, parts), sizes in weights.items()),
        activations,
        tuple(dict.fromkeys(_ranges(nodes))),
    )


def _weight_shape(node: ir.Node) -> tuple[int, ...] | None:
    """The shape of the weight that a DequantizeLinear gives, stored or trained; biases do not count."""
    if node.op_type != "DequantizeLinear" or not node.inputs:
        return None
    stored = constant_tensor(node.inputs[0])
    before = node.inputs[0].producer() if node.inputs[0] is not None else None
    if stored is None and before is not None and before.op_type == "QuantizeLinear":
        stored = constant_tensor(before.inputs[0])
    is_weight = stored is not None and stored.dtype != ir.DataType.INT32 and len(stored.shape) > 1
    return tuple(stored.shape.numpy()) if stored is not None and is_weight else None


def _type(node: ir.Node) -> str:
    zero = constant_tensor((*node.inputs, None, None)[2])
    first = node.inputs[0]
    rounded = node.outputs[0] if node.op_type == "QuantizeLinear" else first
    dtype = zero.dtype if zero is not None else rounded.dtype if rounded is not None else None
    return dtype_name(dtype or ir.DataType.UINT8)


def _parts(node: ir.Node) -> str:
    """What has a scale of its own."""
    if block := node.attributes.get_int("block_size", 0):
        return f"block of {block}"
    scale = constant_tensor(node.inputs[1])
    return "channel" if scale is not None and scale.size > 1 else "tensor"


def _ranges(nodes: list[ir.Node]) -> Iterator[str]:
    for node in nodes:
        if text := node.metadata_props.get(RANGE_KEY):
            yield str(json.loads(text)["ranges"])
