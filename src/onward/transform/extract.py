"""Cutting a part out of a model, with as much of its training as the part can carry."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import UnknownNameError, UnsupportedError, suggest_or_list
from onward.model import Model, Source, load
from onward.model.core import Step, string, strings, tie, untie, values
from onward.model.serde import stamp
from onward.model.state import states
from onward.model.walk import ancestors
from onward.transform.training import drop_unused_definitions, remove
from onward.transform.types import fill_in_types


@checked()
def extract(model: Source, inputs: Sequence[str], outputs: Sequence[str]) -> Model:
    """The part of a model that computes `outputs` from `inputs`, which may be values in the middle of it.

        features = onward.transform.extract("digits.onnx", ["image"], ["active"])

    - `model`: any model
    - `inputs`, `outputs`: names of values

    What lies behind the new outputs and is needed for the loss moves into the training step. Parameters before the new
    inputs leave the model, and their state with them. A step that cannot do without them is refused.
    """
    model = load(model).copy()
    known = {value.name: value for value in values(model.graph) if value.name}
    missing = [name for name in (*inputs, *outputs) if name not in known]
    if missing:
        listed = ", ".join(f"`{name}`" for name in missing)
        raise UnknownNameError(
            f"there is no value {listed} in the inference graph", hint=suggest_or_list(missing[0], known)
        )
    fill_in_types(model, [known[name] for name in (*inputs, *outputs)])
    graph = model.graph
    tie(graph)  # to what the part must then contain
    fresh = [_as_input(known[name]) for name in inputs]
    known |= {value.name: value for value in fresh if value.name}
    results = [known[name] for name in outputs]
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
    untie(graph)
    drop_unused_definitions(model)
    model.path = None
    return stamp(model)


def _as_input(value: ir.Value) -> ir.Value:
    """A graph input in the place of `value`, for all its readers."""
    if value.producer() is None and not value.is_initializer():
        return value
    fresh = ir.Value(name=value.name, type=value.type, shape=value.shape, doc_string=value.doc_string)
    value.replace_all_uses_with(fresh, replace_graph_outputs=True)
    value.name = f"{value.name}:before"
    return fresh


def _check_reachable(needed: set[ir.Node], old: list[ir.Value], fresh: list[ir.Value], graph: ir.Graph) -> None:
    read = {value for node in needed for value in node.inputs}
    unbound = [v.name for v in old if v in read and v not in fresh and v.name not in graph.initializers]
    if unbound:
        listed = ", ".join(f"`{name}`" for name in unbound)
        raise UnsupportedError(f"the outputs also depend on {listed}", hint="list it among the inputs")


def _forget_unreachable(model: Model, index: int, step: Step) -> None:
    """Take parameters that the loss no longer depends on out of a step, with their slots and updates."""
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
            f"the update of `{stuck[0]}` depends on the gradients of parameters that are cut away (`{min(gone)}`)",
            hint="strip the training (`onward strip`), cut, and prepare the part again",
        )
    step.update = {key: value for key, value in step.update.items() if key not in state}
    step.reset = {key: value for key, value in step.reset.items() if key not in state}
    kept = [value for value in step.algorithm.outputs if value not in lost]
    step.algorithm.outputs.clear()
    step.algorithm.outputs.extend(kept)
    step.algorithm.remove([n for n in step.algorithm if any(output in lost for output in n.outputs)], safe=True)
    for name in [n for n, v in step.algorithm.initializers.items() if n in state or not v.uses()]:
        del step.algorithm.initializers[name]
    _drop_initial_values(step)


def _trim(gradient: ir.Node, step: Step, model: Model, gone: set[str]) -> set[ir.Value]:
    """Drop from a Gradient's xs what its y does not depend on; returns the outputs that are lost."""
    xs, zs = strings(gradient, "xs"), strings(gradient, "zs")
    by_name = {v.name: v for graph in (model.graph, step.algorithm) for v in values(graph)}
    target = by_name.get(string(gradient, "y"))
    _, read = ancestors([target] if target is not None else [])
    keep = [i for i, value in enumerate(gradient.inputs) if value is None or value in read]
    dropped = [i for i in range(len(xs)) if i not in keep]
    lost = {gradient.outputs[i] for i in dropped if i < len(gradient.outputs)}
    gone.update(xs[i] for i in dropped)
    if dropped or len(keep) < len(gradient.inputs):
        _rebuild(gradient, step, [i for i in keep if i < len(xs)], [i for i in keep if i >= len(xs)], xs, zs)
    return lost


def _rebuild(
    node: ir.Node, step: Step, kept_xs: list[int], kept_zs: list[int], xs: tuple[str, ...], zs: tuple[str, ...]
) -> None:
    new = ir.Node(
        node.domain,
        node.op_type,
        [node.inputs[i] for i in (*kept_xs, *kept_zs)],
        [
            ir.AttrStrings("xs", [xs[i] for i in kept_xs]),
            ir.AttrString("y", string(node, "y")),
            *([ir.AttrStrings("zs", [zs[i - len(xs)] for i in kept_zs])] if kept_zs else []),
        ],
        num_outputs=len(kept_xs),
        name=node.name,
    )
    for output, i in zip(new.outputs, kept_xs, strict=True):
        old = node.outputs[i]
        output.name, output.type, output.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(output, replace_graph_outputs=True)
        old.name = f"{old.name}:before"
    node.prepend(new)
    if not any(output.uses() for output in node.outputs):
        step.algorithm.remove(node, safe=True)


def _drop_initial_values(step: Step) -> None:
    """Remove from the initialization what no binding asks for any more."""
    if step.initialization is None:
        return
    wanted = set(step.reset.values())
    kept = [value for value in step.initialization.outputs if value.name in wanted]
    step.initialization.outputs.clear()
    step.initialization.outputs.extend(kept)
    needed, _ = ancestors(kept)
    step.initialization.remove([node for node in step.initialization if node not in needed], safe=True)
    for name in [n for n, v in step.initialization.initializers.items() if not v.uses() and v not in kept]:
        del step.initialization.initializers[name]


def _move_to_training(model: Model, inference: set[ir.Node], old_inputs: list[ir.Value]) -> None:
    """Give each step its own copy of the inference nodes that only training needs from now on."""
    graph = model.graph
    for step in model.steps:
        needed, _ = ancestors([*step.algorithm.outputs, *(v for n in step.algorithm for v in n.outputs)])
        moved = [node for node in graph if node in needed and node not in inference]
        if len(model.steps) > 1 and moved:
            raise UnsupportedError(
                "several training steps share nodes that the part does not contain",
                hint="extract with outputs that contain the losses, or strip the training first",
            )
        read = {value for node in moved for value in node.inputs}
        graph.remove(moved)
        first = step.algorithm[0] if len(step.algorithm) else None
        if first is not None:
            first.prepend(moved)
        step.algorithm.inputs.extend(v for v in old_inputs if v in read and v not in graph.inputs)
        for name in [n for n, v in graph.initializers.items() if v in read]:
            value = graph.initializers[name]
            users = {use.node for use in value.uses()}
            if not users & inference and name not in step.update:
                del graph.initializers[name]
                step.algorithm.register_initializer(value)
