"""Following values through a graph, and into the graphs nested in its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import onnx_ir as ir
from onnx import defs

from onward.build import RANDOM


def nested_graphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs in the attributes of a node: branches of an If, the body of a Loop or Scan."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, through the graphs nested in it too."""
    for reader in (node, *(inner for graph in nested_graphs(node) for inner in graph.all_nodes())):
        yield from (value for value in reader.inputs if value is not None)


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
    found: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items()}
    standard = node.domain in ("", "ai.onnx")
    try:
        schema = defs.get_schema(node.op_type, opset if standard else 1, "" if standard else node.domain)
    except defs.SchemaError:
        return found
    for name, attribute in schema.attributes.items():
        if name not in found:
            default = attribute.default_value
            found[name] = ir.serde.deserialize_attribute(default).value if default.name else None
    return found
