"""Putting other nodes into the place of some: what the passes share."""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

from onward.model.core import strings
from onward.model.gradient_names import gradients_in, visible
from onward.model.walk import read_by
from onward.standard import is_standard


def made_by(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The node that computes a value, if it is one of some operators of the standard."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in operators and is_standard(node) else None


def only_made_by(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The same, if nothing else reads what it computes."""
    node = made_by(value, *operators)
    if node is None or value is None or value.is_graph_output() or len({use.node for use in value.uses()}) != 1:
        return None
    return node


def with_gradient(graph: ir.Graph) -> Container[ir.Value | None]:
    """What depends on variables of a Gradient, by more than its shape and type."""
    reached: set[ir.Value | None] = set()
    for node, scope in gradients_in(graph):
        known = visible(scope)
        reached.update(known[x] for x in strings(node, "xs"))
    for node in graph:
        read = node.inputs[:1] if node.op_type == "CastLike" else read_by(node)
        if any(value in reached for value in read):
            reached.update(v for v in node.outputs if v.dtype is None or v.dtype.is_floating_point())
    return reached
