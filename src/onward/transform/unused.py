"""Dropping what nothing reads."""

from __future__ import annotations

import onnx_ir as ir


def remove_unused(graph: ir.Graph) -> ir.Graph:
    """Drop the nodes whose results nothing reads, in place; the graph."""
    unused: set[ir.Node] = set()
    for node in reversed(graph):
        if not any(output.is_graph_output() or not unused.issuperset(output.consumers()) for output in node.outputs):
            unused.add(node)
    if unused:
        graph.remove(unused, safe=True)  # all at once: each call looks at all outputs of the graph
    return graph
