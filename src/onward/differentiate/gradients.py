"""Replacement of the standard's `Gradient` operator by plain nodes.

`xs` and `zs` name the independent variables of a subgraph, and `y` names its result. The inputs of the node are values
for the variables, usually these tensors themselves. Then the existing forward pass is differentiated; otherwise a copy
of it that reads the inputs.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onward.build import Builder, copy_node
from onward.differentiate.expand import expand
from onward.differentiate.recompute import Choice, recomputation
from onward.differentiate.sweep import RuleLookup, nodes_to_differentiate, pull_back, renamable
from onward.errors import InvalidModelError, UnsupportedError
from onward.model import Model
from onward.model.core import gradients_in, is_gradient, names_of, string, strings, visible
from onward.model.walk import ancestors, between, graphs_of, nodes_after, nodes_of
from onward.rules.nested import copy_graph, fill_in_types_of
from onward.rules.registry import lookup
from onward.transform.context import Context
from onward.transform.inline import inline_calls


def lower_gradients(context: Context, *, recompute: Choice = None, find: RuleLookup = lookup) -> Model:
    """Replace every `Gradient` of a model without steps, in order, also nested ones; return the model.

    Functions that contain one are replaced by their bodies. `find` looks up the rules.
    """
    if not has_gradients(context.model):
        return context.model
    inline_calls(context.model, _functions_with_gradients(context.model), context.names)
    while (match := next(gradients_in(context.graph), None)) is not None:
        node, scope = match
        xs, y = strings(node, "xs"), string(node, "y")
        _check_names(node, scope)
        _fill_in_types_inside(context, scope, y)
        expand(context, y, xs, scope_in=lambda model: next(gradients_in(model.graph))[1])
        _lower(context, *next(gradients_in(context.graph)), recompute, find)
    return context.model


def has_gradients(model: Model) -> bool:
    """True if the main graph or a function has a Gradient."""
    return any(map(is_gradient, nodes_of(model)))


def check_gradients_of(model: Model) -> None:
    """Raise if a Gradient of a graph or function names a missing value, or depends on itself."""
    for graph in graphs_of(model):
        needs: dict[ir.Node, set[ir.Node]] = {}
        for node, scope in gradients_in(graph):
            _check_names(node, scope)
            before, _ = ancestors([visible(scope)[string(node, "y")]])
            needs[node] = {other for other in before if is_gradient(other)}
        try:
            graphlib.TopologicalSorter(needs).prepare()
        except graphlib.CycleError as error:
            node = error.args[1][0]
            raise InvalidModelError(
                f"`{string(node, 'y')}` depends on its own gradient, `{node.name}`",
                hint="differentiate a value that is computed before the gradient, such as the loss",
            ) from error


def _functions_with_gradients(model: Model) -> list[str]:
    """Return the functions that have a Gradient, or call one that has."""
    calls = {key: {node.op_identifier() for node in function.all_nodes()} for key, function in model.functions.items()}
    keys = {key for key, function in model.functions.items() if any(map(is_gradient, function.all_nodes()))}
    while callers := {key for key in calls.keys() - keys if calls[key] & keys}:
        keys |= callers
    return [f"{domain}.{name}" for domain, name, _ in keys]


def _check_names(node: ir.Node, scope: Sequence[ir.Graph]) -> None:
    known_values = visible(scope)
    names = names_of(node)
    missing = [name for name in names if name not in known_values]
    input_count = sum(value is not None for value in node.inputs)
    if missing or len(names) - 1 != input_count:
        raise InvalidModelError(
            f"the Gradient `{node.name}` names `{missing[0]}`, which does not exist"
            if missing
            else f"the Gradient `{node.name}` has {input_count} inputs for {len(names) - 1} variables",
            hint="`onward check` says more",
        )


def _fill_in_types_inside(context: Context, scope: Sequence[ir.Graph], y: str) -> None:
    """Fill in types before `y` in nested graphs: a file states few of them there."""
    if len(scope) == 1:
        return
    target = visible(scope)[y]
    context.fill_in_types_before((target,))
    needed, _ = ancestors([target])
    for graph in scope[1:]:
        fill_in_types_of(context.builder(graph, share=True), [node for node in graph if node in needed])


def _lower(context: Context, node: ir.Node, scope: Sequence[ir.Graph], recompute: Choice, find: RuleLookup) -> None:
    graph, known_values = scope[-1], visible(scope)
    xs, y = strings(node, "xs"), string(node, "y")
    inputs = [value for value in node.inputs if value is not None]
    variables, target = [known_values[name] for name in (*xs, *strings(node, "zs"))], known_values[y]
    context.fill_in_types_before((target, *inputs))
    _fill_in_types_inside(context, scope, y)
    op = context.builder(graph, share=True)
    if inputs != variables:
        variables, target = _at(op, target, dict(zip(variables, inputs, strict=True)), scope)
    sources = variables[: len(xs)]
    nodes = nodes_to_differentiate(target, sources, find, scope, cut=set(variables))
    if target.dtype is None:
        raise UnsupportedError(f"the type of `{y}` is not known", hint="add it to the `value_info` of the file")
    last = graph[-1]
    copies = recomputation(recompute, nodes, sources)
    seeds = {target: op.filled_like(target, 1)}
    gradients = pull_back(op, nodes, seeds, sources, cut=set(variables), recomputation=copies, find=find)
    added = set(nodes_after(last, graph))
    for x, output in zip(sources, node.outputs, strict=False):
        if output.name:
            result = gradients[x] if x in gradients else op.filled_like(x, 0)
            context.replace(output, renamable(op, result, added))
    graph.remove(node, safe=True)
    context.graph.sort()


def _at(
    op: Builder, y: ir.Value, substitutes: dict[ir.Value, ir.Value], scope: Sequence[ir.Graph]
) -> tuple[list[ir.Value], ir.Value]:
    """Copy the subgraph from the variables to `y` with substitutes; return these and the new `y`."""
    new = dict(substitutes)
    for node in between(y, list(substitutes), scope):
        if all(output in substitutes for output in node.outputs):
            continue
        copy = copy_node(
            node, [new.get(value, value) if value is not None else None for value in node.inputs], op.names, "{}/at"
        )
        for name, attribute in copy.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                copy.attributes[name] = ir.AttrGraph(name, _nested_at(op, attribute.as_graph(), new))
        new |= {old: output for old, output in zip(node.outputs, copy.outputs, strict=True) if old not in substitutes}
        op.graph.append(copy)
    return [new[value] for value in substitutes], new.get(y, y)


def _nested_at(op: Builder, graph: ir.Graph, new: Mapping[ir.Value, ir.Value]) -> ir.Graph:
    copy = copy_graph(op, graph)
    for node in copy.all_nodes():
        for i, value in enumerate(node.inputs):
            if value is not None and value in new:
                node.replace_input_with(i, new[value])
    return copy
