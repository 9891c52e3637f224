"""Replacing the standard's `Gradient` operator by what it computes.

`xs` and `zs` name the independent variables of a subgraph and `y` its result; the inputs of the node are values for the
variables, usually these tensors themselves. Then the forward pass that is there is differentiated; else a copy of it
that reads the given values.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.build import Builder, Expr, twin, uncollected
from onward.differentiate.expand import expanded
from onward.differentiate.path import between, way
from onward.differentiate.recompute import Choice, recomputation
from onward.differentiate.sweep import pull_back
from onward.errors import InvalidModelError, UnsupportedError
from onward.model import Model
from onward.model.core import is_gradient, string, strings, values
from onward.transform.types import fill_in_types_before
from onward.transform.unused import remove_unused


@uncollected()
def lower_gradients(model: Model, *, recompute: Choice = None) -> Model:
    """A model without steps, which may be changed, with no `Gradient` left; those of higher order are done in order."""
    while (node := _first_gradient(model.graph)) is not None:
        xs, y = strings(node, "xs"), string(node, "y")
        name = node.outputs[0].name if node.outputs else ""
        _check_names(model, node, (*xs, *strings(node, "zs")), y)
        model = expanded(model, y, xs)
        node = next(n for n in model.graph if is_gradient(n) and (not n.outputs or n.outputs[0].name == name))
        _lower(model, node, xs, y, recompute)
    remove_unused(model.graph)
    return model


def _first_gradient(graph: ir.Graph) -> ir.Node | None:
    return next((node for node in graph if is_gradient(node)), None)


def _check_names(model: Model, node: ir.Node, variables: Sequence[str], y: str) -> None:
    known = {value.name for value in values(model.graph)}
    missing = [name for name in (*variables, y) if name not in known]
    given = sum(value is not None for value in node.inputs)
    if missing or len(variables) != given:
        raise InvalidModelError(
            f"the Gradient `{node.name}` names `{missing[0]}`, which does not exist"
            if missing
            else f"the Gradient `{node.name}` has {given} inputs for {len(variables)} variables",
            hint="`onward check` says more",
        )


def _lower(model: Model, node: ir.Node, xs: Sequence[str], y: str, recompute: Choice) -> None:
    graph = model.graph
    known = {value.name: value for value in values(graph)}
    named = (*xs, *strings(node, "zs"))
    given = [value for value in node.inputs if value is not None]
    variables, target = [known[name] for name in named], known[y]
    fill_in_types_before(model, (target, *given))
    op = Builder(graph, opset=model.opset, names=model.names(), functions=model.functions, share=True)
    if given != variables:
        variables, target = _at(op, target, dict(zip(variables, given, strict=True)))
    wanted = variables[: len(xs)]
    nodes = way(target, wanted)
    if target.dtype is None:
        raise UnsupportedError(f"the type of `{y}` is not known", hint="state the types of the model's outputs")
    again = recomputation(recompute, nodes, wanted)
    found = pull_back(op, nodes, {target: op.filled_like(target, 1)}, wanted, cut=set(variables), recomputation=again)
    for x, output in zip(wanted, node.outputs, strict=False):
        if output.name:
            _replace(op, output, found[x] if x in found else op.filled_like(x, 0))
    graph.remove(node, safe=True)
    graph.sort()


def _at(op: Builder, y: ir.Value, given: dict[ir.Value, ir.Value]) -> tuple[list[ir.Value], ir.Value]:
    """A copy of the subgraph from the variables to `y` that reads the given values; those, and the copy's `y`."""
    new = dict(given)
    for node in between(y, list(given)):
        if all(output in given for output in node.outputs):
            continue
        copy = twin(
            node, [new.get(value, value) if value is not None else None for value in node.inputs], op.names, "{}/at"
        )
        new |= {old: output for old, output in zip(node.outputs, copy.outputs, strict=True) if old not in given}
        op.graph.append(copy)
    return [new[value] for value in given], new.get(y, y)


def _replace(op: Builder, old: ir.Value, new: Expr) -> None:
    if new.value.is_graph_output() or new.value.producer() is None:
        new = op.Identity(new)
    name = old.name
    old.name = op.names.fresh(f"{name}/lowered")
    old.replace_all_uses_with(new.value, replace_graph_outputs=True)
    new.value.name = name
