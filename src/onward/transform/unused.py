"""Dropping what nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from onward.model import Model
from onward.model.core import tie, untie
from onward.model.walk import ancestors, nested_nodes


def remove_unused(graph: ir.Graph) -> ir.Graph:
    """Drop the nodes whose results nothing reads, in place; the graph."""
    unused: list[ir.Node] = []
    dead: set[ir.Node] = set()
    for node in reversed(graph):
        if not any(output.is_graph_output() or not dead.issuperset(output.consumers()) for output in node.outputs):
            unused.append(node)
            dead.update([node], _nested_nodes(node))
    if unused:
        remove(graph, unused)  # all at once: each removal looks at all outputs of the graph
    return graph


def keep_only(model: Model, outputs: Iterable[ir.Value]) -> None:
    """Make these the outputs, and drop what is not needed for them, inputs included, in place."""
    graph, wanted = model.graph, list(outputs)
    tie(graph)  # a Gradient needs what it names
    needed, read = ancestors(wanted)
    graph.outputs.clear()
    remove(graph, [node for node in graph if node not in needed])
    graph.outputs.extend(wanted)
    for value in [value for value in graph.inputs if value not in read]:
        graph.inputs.remove(value)
    for name in [name for name, value in graph.initializers.items() if value not in read]:
        del graph.initializers[name]
    untie(graph)


def remove(graph: ir.Graph, nodes: Collection[ir.Node]) -> None:
    """Drop nodes that nothing else reads. What is nested in them does not read anything any more, either."""
    for node in nodes:
        for inner in _nested_nodes(node):
            for i in range(len(inner.inputs)):
                inner.replace_input_with(i, None)
    graph.remove(nodes, safe=True)


def _nested_nodes(node: ir.Node) -> list[ir.Node]:
    return list(nested_nodes(node))
