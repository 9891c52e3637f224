"""An index over one graph: what each name is, who computes it, and who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from onnx import AttributeProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto

from onward.checker.findings import bare
from onward.model.core import TRAINING_DOMAIN
from onward.model.protos import bodies, captured_names
from onward.standard import domain_of

SLOTS = {"Adagrad": 1, "Momentum": 1, "Adam": 2}
"""The optimizer operators, and how many slots each keeps for a tensor. Inputs: R, T, then X.., G.., and each slot's."""


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
    """A node, on top or in a subgraph, and where it stands. The place is spelt out only for those that are reported."""

    holder: str
    number: int
    node: NodeProto
    depth: int

    @property
    def place(self) -> str:
        return node_place(self.holder, self.number, self.node)


def walk(nodes: Iterable[NodeProto], holder: str, depth: int = 0) -> Iterator[Site]:
    """All nodes, those in subgraphs after the node that holds them, one deeper."""
    for i, node in enumerate(nodes):
        site = Site(holder, i, node, depth)
        yield site
        for name, graph in subgraphs(node):
            yield from walk(graph.node, f"{site.place}/{name}", depth + 1)


class Node:
    """A node of a top-level graph."""

    __slots__ = ("args", "domain", "graph", "index", "op", "outputs", "proto", "reads")

    def __init__(self, graph: Graph, index: int, proto: NodeProto):
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
        """How many tensors an optimizer operator updates; None for other nodes and where the arity is wrong."""
        if not self.is_training(*SLOTS):
            return None
        slots = SLOTS[self.op]
        number, rest = divmod(len(self.args) - 2, 2 + slots)
        fits = number > 0 and rest == 0 and len(self.outputs) == number * (1 + slots)
        return number if fits else None

    def behind(self, output: int) -> tuple[str, ...]:
        """The inputs that an output depends on: all, but for the optimizers, which treat each tensor by itself."""
        number = self.tuples
        if number is None:
            return self.reads
        own = range(2 + output % number, len(self.args), number)
        return tuple(name for name in (*self.args[:2], *(self.args[i] for i in own)) if name)

    def updates(self, output: int) -> str | None:
        """The input of an optimizer of which an output is the new value: X for X', a slot for the new slot."""
        number = self.tuples
        if number is None:
            return None
        return self.args[2 + output if output < number else 2 + output + number]


class Graph:
    """One graph of the file. `place` is its name in findings: `graph`, `training_info[0].algorithm` ..."""

    def __init__(self, proto: GraphProto, place: str):
        self.proto, self.place = proto, place
        self.inputs: dict[str, ValueInfoProto] = {value.name: value for value in proto.input}
        self.initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in proto.initializer}
        self.sparse: dict[str, SparseTensorProto] = {tensor.values.name: tensor for tensor in proto.sparse_initializer}
        self.outputs = tuple(value.name for value in proto.output)
        self.nodes = [Node(self, i, node) for i, node in enumerate(proto.node)]
        self.producers: dict[str, tuple[Node, int]] = {}
        for node in self.nodes:
            for i, name in enumerate(node.outputs):
                if name:
                    self.producers.setdefault(name, (node, i))

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        readers: dict[str, list[Node]] = {}
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
        """Every name that the graph defines, once."""
        yield from dict.fromkeys((*self.inputs, *self.initializers, *self.sparse, *self.producers))

    @cached_property
    def sites(self) -> list[Site]:
        """All nodes, those in subgraphs included."""
        return list(walk(self.proto.node, self.place))
