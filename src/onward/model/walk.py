"""Following values through a graph, and into the graphs nested in its nodes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx_ir as ir
from onnx import defs

from onward.build import RANDOM
from onward.standard import is_standard

_NEWEST = defs.onnx_opset_version()  # at least as new as the newest of every other domain


def nested_graphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs in the attributes of a node: branches of an If, the body of a Loop or Scan."""
    for attribute in node.attributes.data.values():  # of all nodes, often: the dictionary itself is the quickest
        if attribute.type is ir.AttributeType.GRAPH and not attribute.is_ref():
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from attribute.as_graphs()


def graphs_in(graph: ir.Graph) -> Iterator[ir.Graph]:
    """A graph and all that are nested in it."""
    yield graph
    for node in graph:
        for inner in nested_graphs(node):
            yield from graphs_in(inner)


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, through the graphs nested in it too."""
    yield from (value for value in node.inputs if value is not None)
    for graph in nested_graphs(node):
        for inner in graph.all_nodes():
            yield from (value for value in inner.inputs if value is not None)


def is_random(node: ir.Node) -> bool:
    """Whether a node draws numbers: the same node once more would not give the same."""
    drops = node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None
    return drops or node.op_type in RANDOM


def nodes_after(last: ir.Node | None, graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph that come after one of them (None: all), in order."""
    return [*itertools.takewhile(lambda node: node is not last, reversed(graph))][::-1]


def ancestors(values: Iterable[ir.Value]) -> tuple[set[ir.Node], set[ir.Value]]:
    """The nodes that are needed to compute `values`, and all values on the way, `values` among them."""
    nodes: set[ir.Node] = set()
    reached = set(values)
    pending = list(reached)
    while pending:
        node = pending.pop().producer()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        fresh = [value for value in read_by(node) if value not in reached]
        reached.update(fresh)
        pending += fresh
    return nodes, reached


def descendants(graph: ir.Graph, values: Iterable[ir.Value]) -> set[ir.Value]:
    """What is computed from `values` in a graph, `values` among them."""
    reached = set(values)
    for node in graph:
        if any(value in reached for value in read_by(node)):
            reached.update(node.outputs)
    return reached


def attributes(node: ir.Node, opset: int) -> dict[str, Any]:
    """The attributes of a node by name, with the schema's defaults for those that it leaves out, else None."""
    standard = is_standard(node)
    defaults = _defaults("" if standard else node.domain, node.op_type, opset if standard else _NEWEST)
    return {**defaults, **{name: attribute.value for name, attribute in node.attributes.items()}}


@functools.cache
def _defaults(domain: str, op_type: str, version: int) -> Mapping[str, Any]:
    """The attributes that a schema knows, with their default values, else None."""
    try:
        schema = defs.get_schema(op_type, version, domain)
    except defs.SchemaError:
        return {}
    defaults = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    return {name: ir.serde.deserialize_attribute(a).value if a.name else None for name, a in defaults.items()}
