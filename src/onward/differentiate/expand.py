"""Replacing what has no derivative of its own: functions by their bodies, some operators by simpler ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
from onnx import defs

from onward.build import Builder, Names, declare
from onward.differentiate.path import between
from onward.model import Model
from onward.model.core import values
from onward.model.walk import nested_graphs, nodes_after
from onward.rules import Rewrite
from onward.rules.registry import apply, lookup, lookup_rewrite
from onward.transform.inline import inline_operators
from onward.transform.types import fill_in_types


def expanded(model: Model, y: str, xs: Iterable[str]) -> Model:
    """The model in which all that lies between `xs` and `y` has a rule, as far as we know how.

    Rewrites are made in place; where functions are replaced by their bodies, the result is another model.
    """
    names = list(xs)
    while True:
        nodes = _on_the_way(model, y, names)
        calls = {(node.domain, node.op_type) for node in nodes if lookup(node) is None and _is_function(model, node)}
        if any(lookup_rewrite(node) for node in nodes):
            fill_in_types(model, values(model.graph))
            if _rewrite_all(model, nodes, names):
                continue
        if calls:
            model = inline_operators(model, calls)
        else:
            return model


def _on_the_way(model: Model, y: str, xs: list[str]) -> list[ir.Node]:
    """The nodes between `xs` and `y`, and all that are nested in them."""
    known = {value.name: value for value in values(model.graph)}
    nodes = between(known[y], [known[x] for x in xs])
    return nodes + [inner for node in nodes for graph in nested_graphs(node) for inner in graph.all_nodes()]


def _is_function(model: Model, node: ir.Node) -> bool:
    if node.op_identifier() in model.functions:
        return True
    try:
        schema: Any = defs.get_schema(node.op_type, model.opset, node.domain)
    except defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _rewrite_all(model: Model, nodes: Iterable[ir.Node], xs: Sequence[str]) -> bool:
    """Make the rewrites, in order; whether there were any.

    What follows from them about types is passed on: onnx does not know all operators.
    """
    in_use = model.names()
    rewritten = False
    for node in nodes:
        rule = lookup_rewrite(node)
        if rule is not None and replace_node(model, node, rule, in_use, xs):
            rewritten = True
        else:
            declare(node, model.opset)
    return rewritten


def replace_node(model: Model, node: ir.Node, rewrite: Rewrite, names: Names, xs: Sequence[str] = ()) -> bool:
    """Put what a node is to be replaced by into its place, its outputs keeping their names; whether there is such."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    last = graph[-1]
    op = Builder(
        graph,
        opset=model.opset,
        names=names,
        functions=model.functions,
        imports=model.graph.opset_imports,
        scope=node.name or node.op_type,
    )
    results = apply(rewrite, op, node, xs=xs)
    if results is NotImplemented:
        return False
    made = nodes_after(last, graph)
    for old, new in zip(node.outputs, results if isinstance(results, tuple | list) else (results,), strict=False):
        if not old.name or new is None:
            continue
        if new.value.producer() not in made or new.value.is_graph_output():
            new = op.Identity(new)
            made.append(new.value.producer())
        name, old.name = old.name, names.fresh(f"{old.name}/replaced")
        new.value.type = old.type if old.type is not None else new.value.type
        new.value.shape = old.shape if old.shape is not None else new.value.shape
        old.replace_all_uses_with(new.value, replace_graph_outputs=True)
        new.value.name = name
    graph.remove(made)
    graph.insert_before(node, made)
    graph.remove(node, safe=True)
    return True
