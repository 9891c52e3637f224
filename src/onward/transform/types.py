"""Types and shapes of values that a file does not state, by the inference of `onnx`."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir
from onnx import AttributeProto, GraphProto, ModelProto, ValueInfoProto

from onward.model import Model
from onward.model.serde import to_proto, without_data
from onward.transform.expansion import check_expansion


def value_types(proto: ModelProto) -> dict[str, ValueInfoProto]:
    """What can be said about the values of the inference graph."""
    inference = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    inference.graph.CopyFrom(proto.graph)
    graph = onnx.shape_inference.infer_shapes(inference, data_prop=_is_cheap_to_follow(inference)).graph
    types = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    return types


def fill_in_types(model: Model, values: Iterable[ir.Value]) -> None:
    """Give those of `values` whose type or shape is not known in full what follows from the graph, in place."""
    untyped = [value for value in values if value.type is None or not _is_static(value.shape)]
    if not untyped:
        return
    check_expansion(model)
    with without_data(model):
        types = value_types(to_proto(model))
    for value in untyped:
        if value.name in types and not (value.is_initializer() or value.is_graph_input()):
            ir.serde.deserialize_value_info_proto(types[value.name], value)


def _is_static(shape: ir.Shape | None) -> bool:
    return shape is not None and shape.is_static()


_LONGEST = 10_000


def _is_cheap_to_follow(proto: ModelProto) -> bool:
    """Whether the integers that shapes are computed with can be followed: only Concat makes longer ones of them.

    A few dozen nodes that put a list behind itself would keep the inference busy for ever.
    """
    return not proto.functions and _longest(proto.graph, {}) < _LONGEST


def _longest(graph: GraphProto, lengths: dict[str, int]) -> int:
    """A bound for the number of integers in any value of a graph, and of the graphs nested in it."""
    lengths |= {tensor.name: tensor.dims[0] if len(tensor.dims) == 1 else 1 for tensor in graph.initializer}
    longest = 1
    for node in graph.node:
        read = [lengths.get(name, 1) for name in node.input]
        length = sum(read) if node.op_type == "Concat" else max(read, default=1)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                length = max(length, _longest(attribute.g, dict(lengths)))
        longest = max(longest, length)
        lengths.update(dict.fromkeys(node.output, length))
    return longest
