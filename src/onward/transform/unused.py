"""Dropping what nothing reads."""

from __future__ import annotations

import onnx_ir as ir


def remove_unused(graph: ir.Graph) -> ir.Graph:
    """Drop the nodes whose results nothing reads, in place; the graph."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    return graph
