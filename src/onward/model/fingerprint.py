"""A fingerprint of an inference graph: has a tool changed it since its training was written?

It covers what training depends on: names, types and shapes of inputs, outputs and initializers, and how nodes connect
them. It ignores what may change without harm: the values of tensors (training changes them), where they are stored, doc
strings, metadata, the names of nodes, and the types of inner values, which shape inference adds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

FINGERPRINT = "train.fingerprint"
"""The metadata key of an algorithm that holds it."""


def fingerprint(graph: GraphProto) -> str:
    """64 hexadecimal digits; equal for graphs that a training algorithm cannot tell apart."""
    digest = hashlib.sha256()
    for part in _graph(graph):
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))  # so that ("ab", "c") and ("a", "bc") differ
        digest.update(data)
    return digest.hexdigest()


_Part = str | int | bytes


def _graph(graph: GraphProto) -> Iterator[_Part]:
    for heading, values in (("input", graph.input), ("output", graph.output)):
        yield from (heading, len(values))
        for value in values:
            yield from _value(value)
    yield from ("initializer", len(graph.initializer))
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):  # their order means nothing
        yield from _tensor(tensor)
    yield from ("sparse_initializer", len(graph.sparse_initializer))
    for sparse in sorted(graph.sparse_initializer, key=lambda sparse: sparse.values.name):
        yield from (sparse.values.name, sparse.values.data_type, len(sparse.dims), *sparse.dims)
    yield from ("node", len(graph.node))
    for node in graph.node:
        yield from _node(node)


def _value(value: ValueInfoProto) -> Iterator[_Part]:
    yield from (value.name, value.type.SerializeToString(deterministic=True))


def _tensor(tensor: TensorProto) -> Iterator[_Part]:
    yield from (tensor.name, tensor.data_type, len(tensor.dims), *tensor.dims)


def _node(node: NodeProto) -> Iterator[_Part]:
    domain = "" if node.domain == "ai.onnx" else node.domain
    yield from (domain, node.op_type, node.overload, len(node.input), *node.input, len(node.output), *node.output)
    yield len(node.attribute)
    for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
        yield from _attribute(attribute)


def _attribute(attribute: AttributeProto) -> Iterator[_Part]:
    yield from (attribute.name, attribute.ref_attr_name, attribute.type)
    yield from (repr(attribute.f), attribute.i, attribute.s)
    yield from (len(attribute.floats), *map(repr, attribute.floats))
    yield from (len(attribute.ints), *attribute.ints)
    yield from (len(attribute.strings), *attribute.strings)
    for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
        yield from _tensor(tensor)
    for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
        yield from _graph(graph)
