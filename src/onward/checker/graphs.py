"""Index of one graph: definitions, producers, readers, and known types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from onnx import AttributeProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, TypeProto, ValueInfoProto

from onward.checker.codes import bare
from onward.model.core import TRAINING_DOMAIN
from onward.model.protos import bodies, captured_names
from onward.standard import domain_of

SLOTS = {"Adagrad": 1, "Momentum": 1, "Adam": 2}
"""Optimizer operator -> its number of slots. Inputs: R, T, then X.., G.., and those of each slot."""


def attribute(node: NodeProto, name: str) -> AttributeProto | None:
    return next((a for a in node.attribute if a.name == name), None)


def subgraphs(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    for attr in node.attribute:
        if attr.HasField("g"):
            yield attr.name, attr.g
        for i, graph in enumerate(attr.graphs):
            yield f"{attr.name}[{i}]", graph


def node_place(place: str, index: int, node: NodeProto) -> str:
    name = f' "{bare(node.name)}"' if node.name else ""
    return f"{place}/node[{index}] {bare(node.op_type)}{name}"


class Site(NamedTuple):
    """A node, in a graph or subgraph, with its path, which is written out only if reported."""

    holder: str
    number: int
    node: NodeProto
    depth: int

    @property
    def place(self) -> str:
        return node_place(self.holder, self.number, self.node)


def walk(nodes: Iterable[NodeProto], holder: str, depth: int = 0) -> Iterator[Site]:
    """Yield all nodes; those in subgraphs follow the node that holds them, one level deeper."""
    for i, node in enumerate(nodes):
        site = Site(holder, i, node, depth)
        yield site
        for name, graph in subgraphs(node):
            yield from walk(graph.node, f"{site.place}/{name}", depth + 1)


class NodeView:
    """A node of a top-level graph."""

    __slots__ = ("args", "domain", "graph", "index", "op", "outputs", "proto", "reads")

    def __init__(self, graph: GraphIndex, index: int, proto: NodeProto):
        self.graph, self.index, self.proto = graph, index, proto
        self.domain, self.op = domain_of(proto), proto.op_type
        self.args, self.outputs = tuple(proto.input), tuple(proto.output)
        self.reads = tuple(dict.fromkeys(name for name in (*self.args, *captured_names(*bodies(proto))) if name))

    @property
    def place(self) -> str:
        return node_place(self.graph.place, self.index, self.proto)

    def is_training(self, *ops: str) -> bool:
        return self.domain == TRAINING_DOMAIN and self.op in ops

    @property
    def tuples(self) -> int | None:
        """Return the number of tensors that an optimizer updates; None for others or a wrong arity."""
        if not self.is_training(*SLOTS):
            return None
        slots = SLOTS[self.op]
        number, rest = divmod(len(self.args) - 2, 2 + slots)
        fits = number > 0 and rest == 0 and len(self.outputs) == number * (1 + slots)
        return number if fits else None

    def behind(self, output: int) -> tuple[str, ...]:
        """Return the inputs that an output depends on: of optimizers, only those of its tensor."""
        number = self.tuples
        if number is None:
            return self.reads
        own = range(2 + output % number, len(self.args), number)
        return tuple(name for name in (*self.args[:2], *(self.args[i] for i in own)) if name)

    def updates(self, output: int) -> str | None:
        """Return the input of an optimizer that an output replaces: X for X', a slot for the new."""
        number = self.tuples
        if number is None:
            return None
        return self.args[2 + output if output < number else 2 + output + number]


class GraphIndex:
    """Index of one graph; `place` is its path in findings, such as `training_info[0].algorithm`."""

    def __init__(self, proto: GraphProto, place: str):
        self.proto, self.place = proto, place
        self.inputs: dict[str, ValueInfoProto] = {value.name: value for value in proto.input}
        self.initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in proto.initializer}
        self.sparse: dict[str, SparseTensorProto] = {tensor.values.name: tensor for tensor in proto.sparse_initializer}
        self.outputs = tuple(value.name for value in proto.output)
        self.nodes = [NodeView(self, i, node) for i, node in enumerate(proto.node)]
        self.producers: dict[str, tuple[NodeView, int]] = {}
        for node in self.nodes:
            for i, name in enumerate(node.outputs):
                if name:
                    self.producers.setdefault(name, (node, i))

    @cached_property
    def readers(self) -> dict[str, list[NodeView]]:
        readers: dict[str, list[NodeView]] = {}
        for node in self.nodes:
            for name in node.reads:
                readers.setdefault(name, []).append(node)
        return readers

    @property
    def is_empty(self) -> bool:
        return not (self.nodes or self.inputs or self.outputs or self.initializers or self.sparse)

    def defines(self, name: str) -> bool:
        return name in self.producers or name in self.inputs or self.is_initializer(name)

    def is_initializer(self, name: str) -> bool:
        return name in self.initializers or name in self.sparse

    def names(self) -> Iterator[str]:
        """Yield every name that the graph defines, once."""
        yield from dict.fromkeys((*self.inputs, *self.initializers, *self.sparse, *self.producers))

    @cached_property
    def sites(self) -> list[Site]:
        """Return all nodes, including those in subgraphs."""
        return list(walk(self.proto.node, self.place))


# ---- types and shapes ------------------------------------------------------------------------------------------------


FLOATING = frozenset(
    getattr(TensorProto, name)
    for name in ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "COMPLEX64", "COMPLEX128")
    + ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
)


def type_name(elem: int) -> str:
    is_known = elem in TensorProto.DataType.values()
    return TensorProto.DataType.Name(elem).lower() if is_known else f"type {elem}"


@dataclass(frozen=True, slots=True)
class TensorType:
    elem: int
    dims: tuple[int | None, ...] | None = None
    """None if the rank is unknown; None in it for symbolic or unknown dimensions."""

    def __str__(self) -> str:
        if self.dims is None:
            return type_name(self.elem)
        return f"{type_name(self.elem)}[{','.join('?' if d is None else str(d) for d in self.dims)}]"

    @property
    def is_floating(self) -> bool:
        return self.elem in FLOATING

    @property
    def is_scalar(self) -> bool | None:
        """True if the rank is 0; None if it is unknown."""
        return None if self.dims is None else not self.dims

    @property
    def has_one_element(self) -> bool | None:
        return None if self.dims is None else all(d == 1 for d in self.dims)

    def fits(self, other: TensorType) -> bool:
        """True if the shapes can be equal; unknown sizes fit all."""
        if self.dims is None or other.dims is None:
            return True
        pairs = zip(self.dims, other.dims, strict=False)
        return len(self.dims) == len(other.dims) and all(a is None or b is None or a == b for a, b in pairs)


def of_tensor(tensor: TensorProto) -> TensorType:
    return TensorType(tensor.data_type, tuple(tensor.dims))


def of_type(proto: TypeProto) -> TensorType | None:
    """Return the type; None unless it is that of a tensor with an element type."""
    if not proto.HasField("tensor_type") or not proto.tensor_type.elem_type:
        return None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type)
    dims = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in tensor.shape.dim)
    return TensorType(tensor.elem_type, dims)


def of_values(values: Iterable[ValueInfoProto]) -> dict[str, TensorType]:
    types = ((value.name, of_type(value.type)) for value in values)
    return {name: tensor_type for name, tensor_type in types if tensor_type is not None}


def declared_types(graph: GraphProto) -> dict[str, TensorType]:
    """Return the types that a graph declares; initializers have precedence."""
    return {
        **of_values(graph.value_info),
        **of_values(graph.output),
        **of_values(graph.input),
        **{t.values.name: TensorType(t.values.data_type, tuple(t.dims)) for t in graph.sparse_initializer},
        **{tensor.name: of_tensor(tensor) for tensor in graph.initializer},
    }


_UNCOUNTABLE = 1 << 64


def count(dims: Sequence[int]) -> int:
    """Return the number of elements, bounded; -1 for negative dimensions."""
    if any(d < 0 for d in dims):
        return -1
    total = 0 if 0 in dims else 1
    for d in dims:
        total *= d
        if total > _UNCOUNTABLE:
            return _UNCOUNTABLE
    return total
