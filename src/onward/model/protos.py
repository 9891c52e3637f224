"""Graphs as protobuf messages: traversal, and the fields that `onnx_ir` drops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from onward.errors import InvalidModelError, UnsupportedError


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """Return the graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, and those in graphs nested in them."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def with_nested(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and all graphs nested in it."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from with_nested(body)


def replace_entries(field: Any, entries: Iterable[Any]) -> None:
    """Replace the entries of a repeated field by others, which may include present ones."""
    entries = list(entries)
    del field[:]
    field.extend(entries)


def open_sizes(proto: ModelProto, change: bool = True) -> list[str]:
    """Return inputs and outputs with negative sizes, which exporters of PaddlePaddle write for open ones; open them."""
    names: dict[str, None] = {}
    for _, graph in graphs(proto):
        for values in (graph.input, graph.output, graph.value_info):
            for value in values:
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_value < 0:
                        names |= {} if values is graph.value_info else {value.name: None}
                        if change:
                            dim.ClearField("dim_value")
    return list(names)


def definitions(graph: GraphProto) -> Iterator[str]:
    """Return every name that a graph defines, with repetitions."""
    inputs = {value.name for value in graph.input}
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer if tensor.name not in inputs)
    yield from (tensor.values.name for tensor in graph.sparse_initializer if tensor.values.name not in inputs)
    yield from (name for node in graph.node for name in node.output if name)


def names_within(graph: GraphProto) -> set[str]:
    """Return the names that a graph and its nested graphs define."""
    return {name for inner in with_nested(graph) for name in definitions(inner)}


def captured_names(*graphs: GraphProto) -> list[str]:
    """Return the names that graphs read or return without defining them."""
    captured: dict[str, None] = {}
    for graph in graphs:
        _collect_captured(graph, (), captured)
    return list(captured)


def _collect_captured(graph: GraphProto, around: tuple[set[str], ...], captured: dict[str, None]) -> None:
    inside = (*around, set(definitions(graph)))
    reads = [name for node in graph.node for name in node.input] + [output.name for output in graph.output]
    for name in reads:
        if name and not any(name in names for names in inside):
            captured[name] = None
    for node in graph.node:
        for body in bodies(node):
            _collect_captured(body, inside, captured)


# ---- fields that onnx_ir drops ---------------------------------------------------------------------------------------


# `onnx_ir` drops sparse tensors, map and opaque types, and fields that a newer or a vendor's schema added. So that
# a file loses nothing, `set_aside` takes them out of a ModelProto before `onnx_ir` sees it, `attach` stores them in
# the `meta` of the objects that they belong to, and `put_back` merges them into the written file. In `meta`, they
# follow renames and copies.

_REST = "onward.rest"
_DENSE_LIMIT = 1 << 31
"""Limit in bytes for expanding a sparse initializer: a hostile file may claim any dimensions."""


MessagePath = tuple[object, ...]
"""Path of a message in a model: ("graph",), ("algorithm", 0, 3, "then_branch", 0)."""


class Residue:
    """Content that was removed from one ModelProto, by the path of its message."""

    def __init__(self) -> None:
        self.rest: dict[MessagePath, bytes] = {}
        self.sparse: dict[MessagePath, onnx.SparseTensorProto] = {}


def unknown_fields(message: Message) -> bytes:
    """Return the fields of `message` that its schema does not know, serialized."""
    if not UnknownFieldSet(message):
        return b""
    rest = type(message)()
    rest.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return rest.SerializeToString()


def set_aside(proto: ModelProto) -> Residue:
    """Remove from `proto`, in place, the content that `onnx_ir` would refuse or drop."""
    residue = Residue()
    if rest := unknown_fields(proto):
        residue.rest["model",] = rest
    for path, graph in graphs(proto):
        _set_aside_graph(graph, path, residue)
    for i, function in enumerate(proto.functions):
        if rest := unknown_fields(function):
            residue.rest["function", i] = rest
        _set_aside_nodes(function.node, ("function", i), residue)
        _set_aside_values(function.value_info, ("function", i), residue)
    return residue


def graphs(proto: ModelProto) -> Iterator[tuple[MessagePath, GraphProto]]:
    """Yield every graph of a model, nested ones too, with its path."""
    yield from _nested_graphs(("graph",), proto.graph)
    for i, step in enumerate(proto.training_info):
        yield from _nested_graphs(("algorithm", i), step.algorithm)
        yield from _nested_graphs(("initialization", i), step.initialization)
    for i, function in enumerate(proto.functions):
        yield from _nested_in_nodes(("function", i), function.node)


def _nested_graphs(path: MessagePath, graph: GraphProto) -> Iterator[tuple[MessagePath, GraphProto]]:
    yield path, graph
    yield from _nested_in_nodes(path, graph.node)


def _nested_in_nodes(path: MessagePath, nodes: Any) -> Iterator[tuple[MessagePath, GraphProto]]:
    for i, node in enumerate(nodes):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nested_graphs((*path, i, attribute.name, 0), attribute.g)
            elif attribute.type == AttributeProto.GRAPHS:
                for k, graph in enumerate(attribute.graphs):
                    yield from _nested_graphs((*path, i, attribute.name, k), graph)


def _set_aside_graph(graph: GraphProto, path: MessagePath, residue: Residue) -> None:
    if rest := _orphans(graph):
        residue.rest[path] = rest
    for sparse in graph.sparse_initializer:
        residue.sparse[*path, sparse.values.name] = sparse
        graph.initializer.append(_stand_in(sparse))
    _set_aside_nodes(graph.node, path, residue)
    for infos in (graph.input, graph.output, graph.value_info):
        _set_aside_values(infos, path, residue)


def _set_aside_nodes(nodes: Any, path: MessagePath, residue: Residue) -> None:
    for i, node in enumerate(nodes):
        if rest := unknown_fields(node) + _pop_sparse_attributes(node):
            residue.rest[*path, "node", i] = rest


def _set_aside_values(infos: Any, path: MessagePath, residue: Residue) -> None:
    for info in infos:
        rest = unknown_fields(info)
        if _beyond_ir(info.type):
            rest += onnx.ValueInfoProto(type=info.type).SerializeToString()
            info.ClearField("type")
        if rest:
            residue.rest[*path, "value", info.name] = rest


def _orphans(graph: GraphProto) -> bytes:
    """Return unknown fields and notes on values that the graph lacks, which `onnx_ir` drops."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    names |= {name for node in graph.node for name in node.output}
    rest = GraphProto()
    rest.value_info.extend(info for info in graph.value_info if info.name not in names and "::" not in info.name)
    rest.quantization_annotation.extend(a for a in graph.quantization_annotation if a.tensor_name not in names)
    return unknown_fields(graph) + rest.SerializeToString()


def _stand_in(sparse: onnx.SparseTensorProto) -> TensorProto:
    tensor = TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="sparse")
    return tensor


def _pop_sparse_attributes(node: onnx.NodeProto) -> bytes:
    kinds = (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS)
    sparse = [attribute for attribute in node.attribute if attribute.type in kinds]
    if not sparse:
        return b""
    rest = onnx.NodeProto(attribute=sparse).SerializeToString()
    for attribute in sparse:
        node.attribute.remove(attribute)
    return rest


def _beyond_ir(type_: TypeProto) -> bool:
    field = type_.WhichOneof("value")
    if field in ("sequence_type", "optional_type"):
        return _beyond_ir(getattr(type_, field).elem_type)
    return field in ("map_type", "opaque_type")


def attach(residue: Residue, path: MessagePath, graph: ir.Graph) -> None:
    """Attach the removed content of the graph at `path` to the graph, its nodes and values."""
    if residue.rest or residue.sparse:
        for inner_path, inner in _ir_graphs(path, graph):
            _attach_graph(residue, inner_path, inner)


def _attach_graph(residue: Residue, path: MessagePath, graph: ir.Graph) -> None:
    if rest := residue.rest.get(path):
        graph.meta[_REST] = rest
    values = {value.name: value for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    for i, node in enumerate(graph):
        if rest := residue.rest.get((*path, "node", i)):
            node.meta[_REST] = rest
        values.update((value.name, value) for value in node.outputs)
    for key, rest in residue.rest.items():
        if key[:-1] == (*path, "value") and key[-1] in values:
            values[key[-1]].meta[_REST] = rest
    for key, sparse in residue.sparse.items():
        if key[:-1] == path:
            if key[-1] not in graph.initializers:
                raise InvalidModelError("a sparse initializer has no name", hint="`onward check MODEL` locates it")
            graph.initializers[str(key[-1])].const_value = SparseTensor(sparse)


def attach_model(residue: Residue, model: ir.Model) -> None:
    if rest := residue.rest.get(("model",)):
        model.meta[_REST] = rest
    for i, function in enumerate(model.functions.values()):
        attach(residue, ("function", i), function.graph)
        if rest := function.graph.meta.pop(_REST, None):
            function.meta[_REST] = rest


def put_back(proto: Message, owner: ir.Model | ir.Graph | ir.Function) -> None:
    """Merge the removed content of `owner` and of everything inside into the written `proto`."""
    _merge(proto, owner.meta)
    if isinstance(owner, ir.Model):
        put_back(proto.graph, owner.graph)  # type: ignore[attr-defined]
        for function_proto, function in zip(proto.functions, owner.functions.values(), strict=True):  # type: ignore[attr-defined]
            put_back(function_proto, function)
        return
    for node_proto, node in zip(proto.node, owner, strict=True):  # type: ignore[attr-defined]
        for attribute in node_proto.attribute:
            if attribute.type == AttributeProto.GRAPH:
                put_back(attribute.g, node.attributes[attribute.name].as_graph())
            elif attribute.type == AttributeProto.GRAPHS:
                graphs = node.attributes[attribute.name].as_graphs()
                for graph_proto, graph in zip(attribute.graphs, graphs, strict=True):
                    put_back(graph_proto, graph)
        _merge(node_proto, node.meta)
    _put_back_values(proto, owner.graph if isinstance(owner, ir.Function) else owner)


def _put_back_values(proto: Any, graph: ir.Graph) -> None:
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    rests = {value.name: value.meta for value in values if value.meta and _REST in value.meta}
    if rests:
        ends = (proto.input, proto.output) if isinstance(proto, GraphProto) else ()
        declared = (*ends, proto.value_info)
        written = {info.name: info for infos in declared for info in infos}
        for name, meta in rests.items():
            _merge(written[name] if name in written else proto.value_info.add(name=name), meta)
    sparse = {n: v.const_value for n, v in graph.initializers.items() if isinstance(v.const_value, SparseTensor)}
    if sparse:
        for name, tensor in sparse.items():
            proto.sparse_initializer.add().CopyFrom(tensor.sparse)
            proto.sparse_initializer[-1].values.name = name
        replace_entries(proto.initializer, (tensor for tensor in proto.initializer if tensor.name not in sparse))


def _merge(proto: Message, meta: Any) -> None:
    if meta and _REST in meta:
        proto.MergeFromString(meta[_REST])


def _ir_graphs(path: MessagePath, graph: ir.Graph) -> Iterator[tuple[MessagePath, ir.Graph]]:
    yield path, graph
    for i, node in enumerate(graph):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                yield from _ir_graphs((*path, i, attribute.name, 0), attribute.as_graph())
            elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
                for k, inner in enumerate(attribute.as_graphs()):
                    yield from _ir_graphs((*path, i, attribute.name, k), inner)


class SparseTensor(ir.ExternalTensor):
    """A sparse initializer, written unchanged and expanded only when its values are read."""

    def __init__(self, sparse: onnx.SparseTensorProto):
        super().__init__(
            "sparse",
            offset=None,
            length=None,
            dtype=ir.DataType(sparse.values.data_type),
            shape=ir.Shape(sparse.dims),
            name=sparse.values.name,
            base_dir="",
        )
        self.sparse = sparse

    def numpy(self) -> np.ndarray:
        return _dense(self.sparse)

    def tobytes(self) -> bytes:
        return self.numpy().tobytes()


def _dense(sparse: onnx.SparseTensorProto) -> np.ndarray:
    values, indices = onnx.numpy_helper.to_array(sparse.values), onnx.numpy_helper.to_array(sparse.indices)
    size = int(np.prod([float(d) for d in sparse.dims]))
    if size * values.dtype.itemsize > _DENSE_LIMIT:
        raise UnsupportedError(
            f"sparse initializer `{sparse.values.name}` would take {size * values.dtype.itemsize} bytes when expanded",
            hint="remove the nodes that read it as a dense tensor",
        )
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if indices.ndim == 2:
            dense[tuple(indices.T)] = values
        else:
            dense.reshape(-1)[indices] = values
    except (IndexError, ValueError) as error:
        raise InvalidModelError(f"sparse initializer `{sparse.values.name}` is damaged: {error}") from error
    return dense
