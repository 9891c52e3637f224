"""Extraction of a part of a model, with as much of its training as possible."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import UnsupportedError
from onward.model import Model, Source, load
from onward.model.core import Step, link_gradients, string, strings, unlink_gradients, values
from onward.model.serde import stamp
from onward.model.state import states
from onward.model.walk import ancestors
from onward.transform.context import values_by_name
from onward.transform.training import drop_unused_definitions, remove
from onward.transform.types import fill_in_types


@checked()
def extract(model: Source, inputs: Sequence[str], outputs: Sequence[str]) -> Model:
    """Return the subgraph of a model that computes `outputs` from `inputs`, both also intermediate values.

        features = onward.transform.extract("digits.onnx", ["image"], ["active"])

    - `model`: any model
    - `inputs`, `outputs`: names of values

    Nodes behind the new outputs that the loss needs move into the training step. Parameters before
    the new inputs are removed with their state. A step that needs them is refused.
    """
    model = load(model).copy()
    by_name = values_by_name([model.graph], (*inputs, *outputs))
    fill_in_types(model, [by_name[name] for name in (*inputs, *outputs)])
    graph = model.graph
    link_gradients(graph)  # to the values that the subgraph must contain
    fresh = [_as_input(by_name[name]) for name in inputs]
    by_name |= {value.name: value for value in fresh if value.name}
    results = [by_name[name] for name in outputs]
    old_inputs = list(graph.inputs)
    graph.outputs.clear()
    graph.inputs.clear()
    graph.inputs.extend(fresh)
    needed, _ = ancestors(results)
    _check_reachable(needed, old_inputs, fresh, graph)
    for i, step in enumerate(model.steps):
        _forget_unreachable(model, i, step)
    _move_to_training(model, needed, old_inputs)
    remove(graph, [node for node in graph if node not in needed])
    for name in [n for n, v in graph.initializers.items() if not v.uses() and v not in results and v not in fresh]:
        del graph.initializers[name]
    graph.outputs.extend(results)
    unlink_gradients(graph)
    drop_unused_definitions(model)
    model.path = None
    return stamp(model)


def _as_input(value: ir.Value) -> ir.Value:
    """Return a graph input that replaces `value` for all its readers."""
    if value.producer() is None and not value.is_initializer():
        return value
    fresh = ir.Value(name=value.name, type=value.type, shape=value.shape, doc_string=value.doc_string)
    value.replace_all_uses_with(fresh, replace_graph_outputs=True)
    value.name = f"{value.name}:before"
    return fresh


def _check_reachable(needed: set[ir.Node], old: list[ir.Value], fresh: list[ir.Value], graph: ir.Graph) -> None:
    values_read = {value for node in needed for value in node.inputs}
    unbound = [v.name for v in old if v in values_read and v not in fresh and v.name not in graph.initializers]
    if unbound:
        listed = ", ".join(f"`{name}`" for name in unbound)
        raise UnsupportedError(f"the outputs also depend on {listed}", hint="list it among the inputs")


def _forget_unreachable(model: Model, index: int, step: Step) -> None:
    """Remove parameters that the loss no longer depends on from a step, with slots and updates."""
    lost: set[ir.Value] = set()
    gone: set[str] = set()
    for gradient in step.gradients():
        lost |= _trim(gradient, step, model, gone)
    if not gone:
        return
    state = {s.name for s in states(model, index) if s.name in gone or s.parameter in gone}
    for node in step.algorithm:
        if any(value in lost for value in node.inputs):
            lost.update(node.outputs)
    names = {value.name for value in lost}
    stuck = sorted(key for key, value in step.update.items() if value in names and key not in state)
    if stuck:
        raise UnsupportedError(
            f"the update of `{stuck[0]}` depends on the gradient of `{min(gone)}`, which is outside",
            hint="strip the training first: `onward strip MODEL -o plain.onnx`",
        )
    step.update = {key: value for key, value in step.update.items() if key not in state}
    step.reset = {key: value for key, value in step.reset.items() if key not in state}
    outputs = [value for value in step.algorithm.outputs if value not in lost]
    step.algorithm.outputs.clear()
    step.algorithm.outputs.extend(outputs)
    step.algorithm.remove([n for n in step.algorithm if any(output in lost for output in n.outputs)], safe=True)
    for name in [n for n, v in step.algorithm.initializers.items() if n in state or not v.uses()]:
        del step.algorithm.initializers[name]
    if (graph := step.initialization) is not None:
        bound = set(step.reset.values())
        outputs = [value for value in graph.outputs if value.name in bound]
        graph.outputs.clear()
        graph.outputs.extend(outputs)
        needed, _ = ancestors(outputs)
        graph.remove([node for node in graph if node not in needed], safe=True)
        for name in [n for n, v in graph.initializers.items() if not v.uses() and v not in outputs]:
            del graph.initializers[name]


def _trim(gradient: ir.Node, step: Step, model: Model, gone: set[str]) -> set[ir.Value]:
    """Drop xs from a Gradient that its y does not depend on; return the lost outputs."""
    xs = strings(gradient, "xs")
    by_name = {v.name: v for graph in (model.graph, step.algorithm) for v in values(graph)}
    target = by_name.get(string(gradient, "y"))
    _, values_read = ancestors([target] if target is not None else [])
    keep = [i for i, value in enumerate(gradient.inputs) if value is None or value in values_read]
    dropped = [i for i in range(len(xs)) if i not in keep]
    lost = {gradient.outputs[i] for i in dropped if i < len(gradient.outputs)}
    gone.update(xs[i] for i in dropped)
    if dropped or len(keep) < len(gradient.inputs):
        _rebuild(gradient, step, keep)
    return lost


def _rebuild(node: ir.Node, step: Step, keep: list[int]) -> None:
    """Replace a Gradient by one with some of its inputs, and the outputs of these."""
    xs = strings(node, "xs")
    kept_xs, kept_zs = [i for i in keep if i < len(xs)], [i - len(xs) for i in keep if i >= len(xs)]
    attributes = [ir.AttrStrings("xs", [xs[i] for i in kept_xs]), ir.AttrString("y", string(node, "y"))]
    if kept_zs:
        attributes.append(ir.AttrStrings("zs", [strings(node, "zs")[i] for i in kept_zs]))
    inputs = [node.inputs[i] for i in keep]
    new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(kept_xs), name=node.name)
    for output, i in zip(new.outputs, kept_xs, strict=True):
        old = node.outputs[i]
        output.name, output.type, output.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(output, replace_graph_outputs=True)
        old.name = f"{old.name}:before"
    node.prepend(new)
    if not any(output.uses() for output in node.outputs):
        step.algorithm.remove(node, safe=True)


def _move_to_training(model: Model, inference: set[ir.Node], old_inputs: list[ir.Value]) -> None:
    """Move inference nodes that only training needs to the steps."""
    graph = model.graph
    for step in model.steps:
        needed, _ = ancestors([*step.algorithm.outputs, *(v for n in step.algorithm for v in n.outputs)])
        moved = [node for node in graph if node in needed and node not in inference]
        if len(model.steps) > 1 and moved:
            raise UnsupportedError(
                "several training steps share nodes behind the outputs",
                hint="add the losses to the outputs, or strip the training first: `onward strip MODEL -o plain.onnx`",
            )
        values_read = {value for node in moved for value in node.inputs}
        graph.remove(moved)
        if len(step.algorithm):
            step.algorithm[0].prepend(moved)
        step.algorithm.inputs.extend(v for v in old_inputs if v in values_read and v not in graph.inputs)
        for name in [n for n, v in graph.initializers.items() if v in values_read]:
            value = graph.initializers[name]
            users = {use.node for use in value.uses()}
            if not users & inference and name not in step.update:
                del graph.initializers[name]
                step.algorithm.register_initializer(value)
