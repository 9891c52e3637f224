"""Traversal of values and nodes in a graph and its nested graphs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx import defs

from onward.build import RANDOM
from onward.standard import domain_of, is_standard

if TYPE_CHECKING:
    from onward.model.core import Model

Reads = Callable[[ir.Node], Iterable[ir.Value]]
"""The values that a node depends on."""

_NEWEST = defs.onnx_opset_version()  # at least as new as the newest of every other domain


def nested_graphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Return the graphs in the attributes of a node: branches of If, bodies of Loop and Scan."""
    for attribute in node.attributes.data.values():  # called for every node: iterating over the dict is fastest
        if attribute.type is ir.AttributeType.GRAPH and not attribute.is_ref():
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from attribute.as_graphs()


def graphs_in(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Return a graph and all graphs nested in it."""
    yield graph
    for node in graph:
        for inner in nested_graphs(node):
            yield from graphs_in(inner)


def graphs_of(model: Model | ir.Model) -> list[ir.Graph]:
    """Return the inference graph and those of functions, without nested ones."""
    return [model.graph, *(function.graph for function in model.functions.values())]


def nodes_of(model: Model | ir.Model) -> Iterator[ir.Node]:
    """Return all nodes of the inference graph and of functions, with nested ones."""
    return (node for graph in graphs_of(model) for node in graph.all_nodes())


def nested_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """Return the nodes of the graphs nested in a node, at any depth."""
    for graph in nested_graphs(node):
        yield from graph.all_nodes()


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """Return the values that a node reads, also through its nested graphs."""
    yield from (value for value in node.inputs if value is not None)
    for inner in nested_nodes(node):
        yield from (value for value in inner.inputs if value is not None)


def captured_values(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """Return the values that nodes read, nested graphs included, and do not define."""
    nodes = list(nodes)
    inside = {value for node in nodes for value in node.outputs}
    for graph in (graph for node in nodes for outer in nested_graphs(node) for graph in graphs_in(outer)):
        inside.update(graph.inputs, graph.initializers.values(), *(node.outputs for node in graph))
    return [v for v in dict.fromkeys(v for node in nodes for v in read_by(node)) if v not in inside]


def is_random(node: ir.Node) -> bool:
    """True if a node draws random numbers: a second copy would give other results."""
    drops = node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None
    return drops or node.op_type in RANDOM


def nodes_after(last: ir.Node | None, graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes of a graph after `last` (None: all), in order."""
    return [*itertools.takewhile(lambda node: node is not last, reversed(graph))][::-1]


def ancestors(
    values: Iterable[ir.Value], *, known: Container[ir.Value] = (), reads: Reads = read_by
) -> tuple[set[ir.Node], set[ir.Value]]:
    """Return the nodes that compute `values` from `known`, and all values on the way."""
    nodes: set[ir.Node] = set()
    reached = set(values)
    pending = list(reached)
    while pending:
        value = pending.pop()
        node = None if value in known else value.producer()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        fresh = [value for value in reads(node) if value not in reached]
        reached.update(fresh)
        pending += fresh
    return nodes, reached


def between(
    y: ir.Value,
    xs: Iterable[ir.Value],
    scope: Sequence[ir.Graph] = (),
    *,
    known: Container[ir.Value] = (),
    reads: Reads = read_by,
) -> list[ir.Node]:
    """Return the nodes on paths from `xs` to `y` that avoid `known`, in the order of the graphs."""
    producer = y.producer()
    if producer is None or producer.graph is None:
        return []
    needed, _ = ancestors([y], known=known, reads=reads)
    reached = set(xs)
    nodes = []
    for node in (node for graph in scope or (producer.graph,) for node in graph if node in needed):
        if any(value in reached for value in reads(node)):
            reached.update(node.outputs)
            nodes.append(node)
    return nodes


_RESHAPING = {"Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze"}
"""Operators whose output is their first input in another shape or type."""


def source_of(value: ir.Value | None, through: Container[str] = _RESHAPING) -> ir.Value | None:
    """Return the value before operators that only reshape or cast their first input."""
    seen: set[ir.Value] = set()
    while value is not None and value not in seen:
        seen.add(value)
        node = value.producer()
        if node is None or node.op_type not in through or not node.inputs:
            return value
        value = node.inputs[0]
    return value


def descendants(graph: ir.Graph, values: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the values computed from `values` in a graph, with `values`."""
    reached = set(values)
    for node in graph:
        if any(value in reached for value in read_by(node)):
            reached.update(node.outputs)
    return reached


def attributes(node: ir.Node, opset: int) -> dict[str, Any]:
    """Return the attributes of a node by name, with the schema's defaults, else None."""
    defaults = _defaults(domain_of(node), node.op_type, opset if is_standard(node) else _NEWEST)
    return {**defaults, **{name: attribute.value for name, attribute in node.attributes.items()}}


@functools.cache
def _defaults(domain: str, op_type: str, version: int) -> Mapping[str, Any]:
    try:
        schema = defs.get_schema(op_type, version, domain)
    except defs.SchemaError:
        return {}
    defaults = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    return {name: ir.serde.deserialize_attribute(a).value if a.name else None for name, a in defaults.items()}
