"""Replacing operators by others: those for training, which no runtime implements, and what somebody lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onward.differentiate.expand import replace_node
from onward.errors import Error
from onward.lowering.standard_operators import LOWERINGS, Lowering
from onward.model import Model
from onward.model.core import all_names
from onward.model.walk import attributes, graphs_in, graphs_of
from onward.rules.registry import lookup_body
from onward.transform.context import Context
from onward.transform.inline import has_body, inline_operators


def expand(
    context: Context,
    lowerings: Mapping[tuple[str, str], Lowering] = LOWERINGS,
    is_meant: Callable[[ir.Node], bool] = lambda node: True,
) -> None:
    """Replace every node that has a lowering and is meant, in nested graphs and functions too, in place."""
    model = context.model

    def wanted(graph: ir.Graph | ir.Function) -> bool:
        return any((node.domain, node.op_type) in lowerings and is_meant(node) for node in graph.all_nodes())

    for key in [key for key, function in model.functions.items() if wanted(function)]:
        model.functions[key] = model.functions[key].clone()  # another model may have it, too
        context.names.take(all_names(model.functions[key].graph))
    for graph in [inner for outer in graphs_of(model) for inner in graphs_in(outer)]:
        for node in list(graph):
            if (lowering := lowerings.get((node.domain, node.op_type))) and is_meant(node):
                _replace(context, graph, node, lowering)


def _replace(context: Context, graph: ir.Graph, node: ir.Node, lowering: Lowering) -> None:
    with context.before(node) as op:
        inputs = [op(value) if value is not None else None for value in node.inputs]
        results = lowering(op, inputs, attributes(node, op.opset), len(node.outputs))
    for old, new in zip(node.outputs, results, strict=False):
        if not old.name:  # nobody wants it
            continue
        value = new.value
        value.type, value.shape = old.type or value.type, old.shape
        name, old.name = old.name, context.names.fresh(f"{old.name}/replaced")
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        value.name = name
    graph.remove(node, safe=True)


# ---- operators that someone lacks, by others -------------------------------------------------------------------------


def replace_unknown(
    model: Model, unknown_in: Callable[[Model], list[ir.Node]], refusal: Callable[[list[ir.Node]], Error]
) -> Model:
    """The model without unknown nodes. What cannot be expressed is named all at once."""
    while unknown := unknown_in(model):
        for replaced in (_by_lowerings, _by_rewrites, _by_functions):
            if (result := replaced(model, unknown)) is not None:
                model = result
                break
        else:
            raise refusal(unknown)
    return model


def _by_lowerings(model: Model, unknown: list[ir.Node]) -> Model | None:
    found = {key: LOWERINGS[key] for node in unknown if (key := (node.domain, node.op_type)) in LOWERINGS}
    if not found:
        return None
    expand(Context(model), found)
    return model


def _by_rewrites(model: Model, unknown: list[ir.Node]) -> Model | None:
    found = {node: body for node in unknown if (body := lookup_body(node)) is not None}
    if not found:
        return None
    context = Context(model)
    context.fill_in_types()
    replaced = [replace_node(context, node, rule) for node, rule in found.items()]
    return model if any(replaced) else None


def _by_functions(model: Model, unknown: list[ir.Node]) -> Model | None:
    """As the standard, or the model, defines them."""
    imports = {**model.graph.opset_imports, "": model.opset, "ai.onnx": model.opset}
    bodies = (node for node in unknown if has_body(node.op_type, imports.get(node.domain, 1), node.domain))
    calls = {(node.domain, node.op_type) for node in bodies}
    if not calls:
        return None
    result = inline_operators(model, calls)
    left = {(node.domain, node.op_type) for node in result.graph.all_nodes()}
    return None if calls <= left else result  # some bodies are for newer versions of the standard than the model's
