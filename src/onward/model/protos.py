"""Walking graphs as they are in a file: nested ones, and the names that they define and read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from onnx import GraphProto, NodeProto


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes, and those in graphs nested in them."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def with_nested(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and all that are nested in it."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from with_nested(body)


def replace_entries(field: Any, entries: Iterable[Any]) -> None:
    """Give a repeated field other entries, of which some may be in it already."""
    entries = list(entries)
    del field[:]
    field.extend(entries)


def definitions(graph: GraphProto) -> Iterator[str]:
    """Every name that a graph defines, as often as it does; an initializer may share its name with an input."""
    inputs = {value.name for value in graph.input}
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer if tensor.name not in inputs)
    yield from (tensor.values.name for tensor in graph.sparse_initializer if tensor.values.name not in inputs)
    yield from (name for node in graph.node for name in node.output if name)


def names_within(graph: GraphProto) -> set[str]:
    """What a graph and those nested in it define."""
    return {name for inner in with_nested(graph) for name in definitions(inner)}


def captured_names(*graphs: GraphProto) -> list[str]:
    """The names that graphs read or return without defining them: they are of what is around."""
    found: dict[str, None] = {}
    for graph in graphs:
        _collect_captured(graph, (), found)
    return list(found)


def _collect_captured(graph: GraphProto, around: tuple[set[str], ...], found: dict[str, None]) -> None:
    inside = (*around, set(definitions(graph)))
    reads = [name for node in graph.node for name in node.input] + [output.name for output in graph.output]
    for name in reads:
        if name and not any(name in names for names in inside):
            found[name] = None
    for node in graph.node:
        for body in bodies(node):
            _collect_captured(body, inside, found)
