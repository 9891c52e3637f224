"""A fingerprint of an inference graph: has a tool changed it since its training was written?

It covers what training depends on: names, types and shapes of inputs, outputs and initializers, and how nodes connect
them. It ignores what may change without harm: the values of tensors (training changes them), where they are stored, doc
strings, metadata, the names of nodes, and the types of inner values, which shape inference adds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onward.standard import domain_of

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto, TensorShapeProto, TypeProto

FINGERPRINT = "train.fingerprint"
"""The metadata key of an algorithm that holds it."""


def fingerprint(graph: GraphProto) -> str:
    """64 hexadecimal digits; equal for graphs that a training algorithm cannot tell apart."""
    digest = hashlib.sha256()
    for part in _graph(graph):
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(b"%d:" % len(data))  # so that ("ab", "c") and ("a", "bc") differ
        digest.update(data)
    return digest.hexdigest()


def _graph(graph: GraphProto) -> Iterator[object]:
    for heading, values in (("input", graph.input), ("output", graph.output)):
        yield from (heading, len(values))
        for value in values:
            yield value.name
            yield from _type(value.type)
    yield from ("initializer", len(graph.initializer))
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):  # their order means nothing
        yield from (tensor.name, tensor.data_type, *_count_values(tensor.dims))
    yield from ("sparse_initializer", len(graph.sparse_initializer))
    for sparse in sorted(graph.sparse_initializer, key=lambda sparse: sparse.values.name):
        yield from (sparse.values.name, sparse.values.data_type, *_count_values(sparse.dims))
    yield from ("node", len(graph.node))
    for node in graph.node:
        yield from _node(node)


def _type(proto: TypeProto) -> Iterator[object]:
    if not proto.HasField("tensor_type"):
        yield proto.SerializeToString(deterministic=True)
        return
    yield proto.tensor_type.elem_type
    if proto.tensor_type.HasField("shape"):
        yield from _count_values([_dim(dim) for dim in proto.tensor_type.shape.dim])


def _dim(dim: TensorShapeProto.Dimension) -> object:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param


def _node(node: NodeProto) -> Iterator[object]:
    yield from (domain_of(node), node.op_type, node.overload)
    yield from _count_values(_without_trailing_gaps(node.input))
    yield from _count_values(_without_trailing_gaps(node.output))
    yield len(node.attribute)
    for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
        yield from _attribute(attribute)


def _attribute(attribute: AttributeProto) -> Iterator[object]:
    yield from (attribute.name, attribute.ref_attr_name, repr(attribute.f), attribute.i, attribute.s)
    for values in (attribute.floats, attribute.ints, attribute.strings):
        yield from _count_values(values)
    for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
        yield from (tensor.data_type, *_count_values(tensor.dims))
    for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
        yield from _graph(graph)


def _count_values(values: Sequence[object]) -> tuple[object, ...]:
    return len(values), *values


def _without_trailing_gaps(names: Sequence[str]) -> Sequence[str]:
    """An input or output that is left out at the end may or may not be written down."""
    end = len(names)
    while end and not names[end - 1]:
        end -= 1
    return names[:end]
