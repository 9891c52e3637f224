"""Types and shapes of values that a file does not state, by the inference of `onnx`."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir
from onnx import ModelProto, ValueInfoProto

from onward.model import Model
from onward.model.serde import to_proto, without_data
from onward.transform.expansion import check_expansion


def value_types(proto: ModelProto) -> dict[str, ValueInfoProto]:
    """What can be said about the values of the inference graph."""
    inference = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    inference.graph.CopyFrom(proto.graph)
    graph = onnx.shape_inference.infer_shapes(inference).graph
    types = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    return types


def fill_in_types(model: Model, values: Iterable[ir.Value]) -> None:
    """Give those of `values` that have no type the one that follows from the graph, in place."""
    untyped = [value for value in values if value.type is None or value.shape is None]
    if not untyped:
        return
    check_expansion(model)
    with without_data(model):
        types = value_types(to_proto(model))
    for value in untyped:
        if value.name in types:
            ir.serde.deserialize_value_info_proto(types[value.name], value)
