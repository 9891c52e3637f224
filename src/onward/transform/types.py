"""Types and shapes of values that a file does not state, by the inference of `onnx`."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from typing import Any

import onnx
import onnx_ir as ir
from onnx import AttributeProto, GraphProto, ModelProto, ValueInfoProto

from onward.errors import InvalidModelError, UnsupportedError, first_line
from onward.model import Model
from onward.model.functions import check_expansion
from onward.model.serde import to_proto, without_data
from onward.model.walk import ancestors, read_by
from onward.shapes import dims
from onward.standard import KERNELS
from onward.transform.attribute_words import check_equations

_HINT = "`onward check` says more"


def value_types(proto: ModelProto, *added: GraphProto) -> dict[str, ValueInfoProto]:
    """What can be said about the values of the inference graph, and of those that are added to it."""
    inference = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    inference.graph.CopyFrom(proto.graph)
    for graph in added:
        inference.graph.MergeFrom(graph)  # which puts all that there are several of behind the others
    return _infer_types(inference)


def _infer_types(proto: ModelProto) -> dict[str, ValueInfoProto]:
    check_equations(proto)
    try:
        graph = onnx.shape_inference.infer_shapes(proto, data_prop=_is_cheap_to_follow(proto)).graph
    except onnx.shape_inference.InferenceError as error:
        reason = str(error).splitlines()[0]
        raise InvalidModelError(f"the types of the model do not go together: {reason}", hint=_HINT) from error
    except onnx.checker.ValidationError as error:  # of the inliner within: more than 100 functions deep
        raise UnsupportedError(
            f"the functions of the model are nested too deep for onnx: {first_line(error)}",
            hint="inline them first: `onward inline MODEL -o plain.onnx` (`onward.transform.inline(model)`)",
        ) from error
    types = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    return types


def is_static(value: ir.Value) -> bool:
    """True if the type and all sizes of a value are known."""
    return value.type is not None and value.shape is not None and value.shape.is_static()


def is_symbolic(value: ir.Value, symbols: Container[str | None] | None = None) -> bool:
    """True if a value is typed up to symbols (default: any symbols), or onnx has no inference for its operator."""
    node = value.producer()
    if node is not None and node.domain == KERNELS:
        return True
    sizes = dims(value)
    if value.type is None or sizes is None:
        return False
    return symbols is None or all(isinstance(size, int) or size.value in symbols for size in sizes)


def fill_in_types(model: Model, values: Iterable[ir.Value], is_known: Callable[[ir.Value], bool] = is_static) -> None:
    """Infer the types and shapes of those of `values` that are not known, in place; nested graphs are left out."""
    values = list(values)
    untyped = [value for value in values if value.graph is model.graph and not is_known(value)]
    if untyped:
        _infer(model, untyped)
    for value in values:
        _check_size(value)


def _infer(model: Model, untyped: list[ir.Value]) -> None:
    part = _part(model, untyped)
    check_expansion(part)
    with without_data(model):
        types = _infer_types(to_proto(part))
    for value in untyped:
        if value.name in types and not (value.is_initializer() or value.is_graph_input()):
            with suppress(ir.serde.SerdeError):  # a type that the graph library cannot hold remains unknown
                ir.serde.deserialize_value_info_proto(types[value.name], value)


_MOST_ELEMENTS = 2**48
"""More than any machine holds; sizes that are computed of such sizes may not be numbers of 64 bits."""


def _check_size(value: ir.Value) -> None:
    shape = value.shape or ()
    if math.prod(abs(dim) for dim in shape if isinstance(dim, int)) > _MOST_ELEMENTS:
        sizes = ", ".join(map(str, shape))
        raise InvalidModelError(
            f"`{value.name}` would be a tensor of [{sizes}], which no machine can hold",
            hint="look at the sizes, pads and shapes before it: one of them is wrong",
        )


def fill_in_types_before(model: Model, ends: Iterable[ir.Value]) -> None:
    """The same for `ends` and all that is computed on the way to them."""
    nodes, read = ancestors(ends)
    fill_in_types(model, read.union(*(node.outputs for node in nodes)))


def _part(model: Model, untyped: Iterable[ir.Value]) -> Model:
    """What the types of these values follow from: the nodes that compute them, back to where all is known.

    Without functions, if it calls none: with them, inference does not follow the integers that shapes are made of.
    """
    graph = model.graph
    pending = [node for value in untyped if (node := value.producer()) is not None]
    needed = set(pending)
    read: dict[ir.Value, None] = {}
    while pending:
        fresh = {value: None for value in read_by(pending.pop()) if value not in read and value.graph is graph}
        read.update(fresh)
        before = {node for value in fresh if not _is_border(value) and (node := value.producer()) is not None}
        pending += before - needed
        needed |= before
    view: Any = ir.GraphView(
        [value for value in read if value.producer() not in needed and not value.is_initializer()],
        [value for value in graph.outputs if value.producer() in needed],
        nodes=[node for node in graph if node in needed],
        initializers=[value for value in read if value.is_initializer()],
        opset_imports=graph.opset_imports,
        name=graph.name,
    )
    calls = any(node.op_identifier() in model.functions for node in ir.traversal.RecursiveGraphIterator(view))
    functions = list(model.functions.values()) if calls else []
    return Model(ir.Model(view, ir_version=model.ir.ir_version, functions=functions))


def _is_border(value: ir.Value) -> bool:
    """Whether nothing before a value matters: its type is known in full, and it is nothing to compute shapes with."""
    if not is_static(value):
        return False
    node, shape = value.producer(), value.shape
    is_list = value.dtype is not None and value.dtype.is_integer() and shape is not None and len(shape) < 2
    return not is_list and node is not None and node.op_type != "Constant"


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
