"""Replacement of nodes without a rule: functions by their bodies, some operators by simpler ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from onward.build import declare
from onward.model import Model
from onward.model.core import values, visible
from onward.model.walk import between, is_random, nested_nodes, nodes_after
from onward.rules import Rewrite
from onward.rules.quantization import ROUNDED
from onward.rules.registry import apply, lookup, lookup_rewrite
from onward.transform.context import Context
from onward.transform.inline import has_body, inline_operators


def expand(
    context: Context,
    y: str,
    xs: Iterable[str],
    *,
    keep_functions: bool = False,
    scope_in: Callable[[Model], Sequence[ir.Graph]] = lambda model: (model.graph,),
) -> None:
    """Rewrite the nodes between `xs` and `y` until each has a rule, as far as possible.

    `scope_in` returns the graphs in which the names are looked up, the outermost first. Inlining
    functions gives the context another model. With `keep_functions`, functions that can be
    differentiated as such stay.
    """
    names = list(xs)
    while True:
        model = context.model
        scope = scope_in(model)
        known_values = visible(scope)
        nodes = between(known_values[y], [known_values[x] for x in names], scope)
        nodes += [inner for node in nodes for inner in nested_nodes(node)]
        unknown = [node for node in nodes if lookup(node) is None]
        answers: dict[ir.OperatorIdentifier, bool] = {}
        kept_calls = {node for node in unknown if keep_functions and _can_stay(model, node, answers)}
        calls = {
            (node.domain, node.op_type)
            for node in unknown
            if node not in kept_calls
            and (node.op_identifier() in model.functions or has_body(node.op_type, model.opset, node.domain))
        }
        if any(lookup_rewrite(node) for node in nodes):
            context.fill_in_types_before(value for value in values(model.graph) if value.name == y)
            if _rewrite_all(context, nodes, names):
                continue
        if not calls:
            return
        context.continue_with(inline_operators(model, calls))


def _can_stay(model: Model, node: ir.Node, answers: dict[ir.OperatorIdentifier, bool]) -> bool:
    """True if a node calls a function that can be differentiated as one. `answers` is a cache.

    Quantized values must not cross the border of a function: their gradient needs the node that rounded them.
    """
    function = model.functions.get(node.op_identifier())
    if function is None or _is_rounded(*node.inputs, *function.outputs):
        return False
    if node.op_identifier() not in answers:
        answers[node.op_identifier()] = _is_self_contained(model, function, answers)
    return answers[node.op_identifier()]


def _is_self_contained(model: Model, function: ir.Function, answers: dict[ir.OperatorIdentifier, bool]) -> bool:
    """True if all calls in a function can stay, and none of its nodes draws random numbers."""
    inner = list(function.all_nodes())
    calls = (node for node in inner if node.op_identifier() in model.functions)
    return not any(map(is_random, inner)) and all(_can_stay(model, call, answers) for call in calls)


def _is_rounded(*values: ir.Value | None) -> bool:
    producers = (value.producer() for value in values if value is not None)
    return any(producer is not None and producer.op_type in ROUNDED for producer in producers)


def _rewrite_all(context: Context, nodes: Iterable[ir.Node], xs: Sequence[str]) -> bool:
    """Apply the rewrites, in order; return True if any applied.

    The types are declared along the way, since onnx does not know all operators.
    """
    rewritten = False
    for node in nodes:
        rule = lookup_rewrite(node)
        if rule is not None and replace_node(context, node, rule, xs):
            rewritten = True
        else:
            declare(node, context.model.opset)
    if rewritten:
        context.forget_types()
    return rewritten


def replace_node(context: Context, node: ir.Node, rewrite: Rewrite, xs: Sequence[str] = ()) -> bool:
    """Replace a node by the results of its rewrite; return False if the rewrite does not apply."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    last = graph[-1]
    op = context.builder(graph, scope=node.name or node.op_type)
    results = apply(rewrite, op, node, xs=xs)
    if results is NotImplemented:
        return False
    added = nodes_after(last, graph)
    for old, new in zip(node.outputs, results if isinstance(results, tuple | list) else (results,), strict=False):
        if not old.name or new is None:
            continue
        if new.value.producer() not in added or new.value.is_graph_output():
            new = op.Identity(new)
            added.append(new.value.producer())
        context.replace(old, new)
    graph.remove(added)
    graph.insert_before(node, added)
    graph.remove(node, safe=True)
    return True
