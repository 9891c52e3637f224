"""Following values through a graph, and into the graphs nested in its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir


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
