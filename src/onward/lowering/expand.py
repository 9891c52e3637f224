"""Replacing the standard's training operators, which no runtime implements, by plain operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onward.build import Builder, Names
from onward.lowering import losses, optimizers
from onward.lowering.losses import Lowering
from onward.model.walk import attributes, graphs_in, graphs_of

LOWERINGS: Mapping[tuple[str, str], Lowering] = {**losses.LOWERINGS, **optimizers.LOWERINGS}


def expand(
    model: ir.Model,
    lowerings: Mapping[tuple[str, str], Lowering] = LOWERINGS,
    is_meant: Callable[[ir.Node], bool] = lambda node: True,
) -> None:
    """Replace every node that has a lowering and is meant, in nested graphs and functions too, in place."""
    for graph in [inner for outer in graphs_of(model) for inner in graphs_in(outer)]:
        names = Names(value.name for node in graph.all_nodes() for value in node.outputs if value.name)
        names.take(value.name for value in (*graph.inputs, *graph.initializers.values()) if value.name)
        for node in list(graph):
            if (lowering := lowerings.get((node.domain, node.op_type))) and is_meant(node):
                _replace(graph, node, lowering, names, model.opset_imports[""], model.functions)


def _replace(
    graph: ir.Graph,
    node: ir.Node,
    lowering: Lowering,
    names: Names,
    opset: int,
    functions: dict[ir.OperatorIdentifier, ir.Function],
) -> None:
    scratch = ir.Graph([], [], nodes=[], name="lowered")
    op = Builder(scratch, opset=opset, names=names, functions=functions, scope=node.name or node.op_type)
    inputs = [op(value) if value is not None else None for value in node.inputs]
    results = lowering(op, inputs, attributes(node, opset), len(node.outputs))
    nodes = list(scratch)
    scratch.remove(nodes)
    node.prepend(nodes)
    for old, new in zip(node.outputs, results, strict=False):
        if not old.name:  # nobody wants it
            continue
        value = new.value
        value.type, value.shape = old.type or value.type, old.shape
        name = old.name
        old.name = names.fresh(f"{name}/replaced")
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        value.name = name
    graph.remove(node, safe=True)
