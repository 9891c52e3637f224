"""Cutting a graph in two: what was there, and the way back that was added to it, which reads of the first half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.differentiate.simplify import tidy
from onward.model.walk import nested_nodes, nodes_after, read_by


def split_off(
    op: Builder, last: ir.Node, dys: Sequence[ir.Value], gradients: Mapping[ir.Value, Expr], known: Sequence[ir.Value]
) -> tuple[ir.Graph, list[ir.Value]]:
    """Move the nodes after `last` into a graph of their own, with `gradients` as outputs; what that reads of the rest.

    Its inputs are what it reads, first of what is `known`, and then `dys`. Constants are not among them: they are
    copied.
    """
    graph = op.graph
    made = set(nodes_after(last, graph))
    results = [_put_out(op, made, x, gradient) for x, gradient in gradients.items()]
    added = nodes_after(last, graph)
    tidy(graph, added)

    made = set(added)
    nodes = [node for node in graph if node in made]
    inside = {*nodes, *(inner for node in nodes for inner in nested_nodes(node))}
    all_read = dict.fromkeys(value for node in nodes for value in read_by(node))
    outside = [value for value in all_read if value.graph is graph and value.producer() not in inside]
    constants = [value for value in outside if _is_constant(value)]
    others = [value for value in outside if value not in constants]
    read = [*(value for value in known if value in others), *(value for value in others if value not in known)]

    for value in results:
        graph.outputs.remove(value)
    graph.remove(nodes)
    copies = [_copy_of_constant(value) for value in constants]
    inputs = [ir.Value(name=value.name) for value in read]
    new = dict(zip((*constants, *read), (*(copy.outputs[0] for copy in copies), *inputs), strict=True))
    for old, value in new.items():
        for reader, i in tuple(old.uses()):
            if reader in inside:
                reader.replace_input_with(i, value)
    return ir.Graph([*inputs, *dys], results, nodes=[*copies, *nodes], opset_imports={}), read


def _put_out(op: Builder, made: set[ir.Node], x: ir.Value, gradient: Expr) -> ir.Value:
    """Make a gradient an output, under a name of its own; a copy of it where it is something else already."""
    is_free = gradient.value.producer() in made and not gradient.value.is_graph_output()
    result = (gradient if is_free else op.Identity(gradient)).named(f"d{x.name}").value
    op.graph.outputs.append(result)
    return result


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "Constant" and producer.domain == ""


def _copy_of_constant(value: ir.Value) -> ir.Node:
    node = cast(ir.Node, value.producer())
    copy = ir.Node("", "Constant", [], list(node.attributes.values()), name=node.name)
    copy.outputs[0].name = value.name
    return copy
