"""From a training model to plain ONNX: what any runtime can execute, driven by a loop of a few lines.

    step = onward.lower("training.onnx")          # inputs: a batch and the state; outputs: metrics and the new state
    step.save("step.onnx")

Which output replaces which input says the metadata of the file, `train.lowered`, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from onward.build import Builder, uncollected
from onward.differentiate.recompute import Choice
from onward.differentiate.simplify import put_results_last, simplify
from onward.errors import UnknownNameError, UnsupportedError, near
from onward.lowering.expand import expand
from onward.lowering.gradients import lower_gradients
from onward.lowering.optimize import optimize
from onward.model import TRAINING_DOMAIN, Model, Source, Step, read
from onward.model.core import strings, values
from onward.model.state import states
from onward.model.walk import ancestors, descendants
from onward.transform.inline import inline
from onward.transform.opset import convert_opset
from onward.transform.unused import remove_unused

CONTRACT = "train.lowered"
"""The metadata of a lowered model: its part, its batch inputs, its state (input -> output) and its metrics."""
NEWEST_OPSET = 26
IR_VERSION = 10
"""What stock ONNX Runtime loads."""


@uncollected()
def lower(source: Source, step: int = 0, *, part: str = "step", recompute: Choice = None) -> Model:
    """A plain ONNX model for one step of a training model: only operators of the standard, no training operator.

    The parts:

    - `"step"`: (batch, state) -> (metrics, new state)
    - `"evaluation"`: (batch, state) -> (the metrics and outputs of the model, as inference computes them)
    - `"gradients"`: (batch, state) -> (metrics, a gradient per parameter, the state that the forward pass changes)
    - `"apply"`: (gradients, state) -> (metrics, the rest of the new state)
    - `"initialization"`: () -> the state to start from
    - `"state"`: () -> the state as it is in the file

    `recompute` names what is computed twice to save memory, as in `onward.gradient`.
    """
    if part not in _PARTS:
        raise UnknownNameError(f"there is no part `{part}`", hint=near(part, _PARTS) or f"parts: {', '.join(_PARTS)}")
    model = read(source)
    if model.opset > NEWEST_OPSET:
        model = convert_opset(model, NEWEST_OPSET)
    made, contract = _PARTS[part](model, step, recompute)
    made.ir.ir_version = IR_VERSION
    made.metadata[CONTRACT] = json.dumps({"part": part, **contract})
    return made


def contract_of(model: Model) -> dict[str, Any]:
    """What the metadata of a lowered model says."""
    if CONTRACT not in model.metadata:
        raise UnsupportedError("this is not a lowered model", hint="make one with `onward lower`")
    found: dict[str, Any] = json.loads(model.metadata[CONTRACT])
    return found


# ---- the parts -------------------------------------------------------------------------------------------------------

Made = tuple[Model, dict[str, Any]]


def _step(model: Model, index: int, recompute: Choice) -> Made:
    graph = _opened(model, index)
    bindings, metrics = _bindings(model.step(index))
    return _plain(model, index, graph, [*metrics, *bindings.values()], bindings, metrics, recompute)


def _evaluation(model: Model, index: int, recompute: Choice) -> Made:
    combined = _opened(model, index)
    outputs = [value.name or "" for value in model.graph.outputs]
    known = {value.name: value for value in values(combined.graph)}
    for name, value in known.items():  # what training computes in its own way, as inference computes it
        plain = known.get((name or "").removeprefix("train/"))
        if plain is not None and plain is not value:
            value.replace_all_uses_with(plain)
    _, metrics = _bindings(model.step(index))
    derived = descendants(combined.graph, [o for node in _gradients(combined.graph) for o in node.outputs])
    random = {known[state.name] for state in states(model, index) if state.role == "rng"}
    metrics = [name for name in metrics if known[name] not in derived and not random & ancestors([known[name]])[1]]
    return _plain(model, index, combined, [*metrics, *outputs], {}, metrics, None, outputs=outputs)


def _gradient_part(model: Model, index: int, recompute: Choice) -> Made:
    combined = _opened(model, index)
    nodes = _gradients(combined.graph)
    given = {o.name or "": x for node in nodes for x, o in zip(strings(node, "xs"), node.outputs, strict=False)}
    bindings, metrics = _bindings_of_forward(model, index, combined)
    names = [*metrics, *given, *bindings.values()]
    return _plain(
        model, index, combined, names, bindings, metrics, recompute, gradients={x: name for name, x in given.items()}
    )


def _apply(model: Model, index: int, recompute: Choice) -> Made:
    combined = _opened(model, index)
    forward, forward_metrics = _bindings_of_forward(model, index, combined)
    bindings, metrics = _bindings(model.step(index))
    gradients = {}
    for node in _gradients(combined.graph):
        for x, output in zip(strings(node, "xs"), node.outputs, strict=False):
            value = ir.Value(name=output.name, type=output.type, shape=output.shape)
            output.name = f"{output.name}/computed"
            output.replace_all_uses_with(value)
            combined.graph.inputs.append(value)
            gradients[x] = value.name or ""
    bindings = {name: new for name, new in bindings.items() if name not in forward}
    metrics = [name for name in metrics if name not in forward_metrics]
    names = [*metrics, *bindings.values()]
    return _plain(model, index, combined, names, bindings, metrics, None, gradients=gradients)


def _initialization(model: Model, index: int, recompute: Choice) -> Made:
    step = model.step(index)
    if step.initialization is None:
        raise UnsupportedError("the step has no initialization", hint="take the state of the file: part `state`")
    graph = step.initialization.clone()
    graph.opset_imports.update(model.ir.opset_imports)
    functions = [function.clone() for function in model.functions.values()]
    made = inline(Model(ir.Model(graph, ir_version=IR_VERSION, functions=functions)))
    names = made.names()
    states_by_output = {output: state for state, output in step.reset.items()}
    for value in values(made.graph):  # an output bears the name of its state, which may be in use
        if value.name in step.reset:
            value.name = names.fresh(f"{value.name}/within")
    for output in made.graph.outputs:
        output.name = states_by_output[output.name or ""]
    return _finished(made), {"state": dict.fromkeys(step.reset)}


def _state(model: Model, index: int, recompute: Choice) -> Made:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": model.opset}, name="state")
    op = Builder(graph, opset=model.opset)
    for state in states(model, index):
        stored = ir.Value(name=f"{state.name}/stored", type=state.value.type, shape=state.value.shape)
        stored.const_value = state.value.const_value
        graph.register_initializer(stored)
        value = op.Identity(stored).like(stored).value
        value.name = state.name
        graph.outputs.append(value)
    return Model(ir.Model(graph, ir_version=IR_VERSION)), {"state": {s.name: None for s in states(model, index)}}


_PARTS: dict[str, Callable[[Model, int, Choice], Made]] = {
    "step": _step,
    "evaluation": _evaluation,
    "gradients": _gradient_part,
    "apply": _apply,
    "initialization": _initialization,
    "state": _state,
}


# ---- what the parts share --------------------------------------------------------------------------------------------


def _opened(model: Model, index: int) -> Model:
    return Model(model.combined(index))


def _bindings(step: Step) -> tuple[dict[str, str], list[str]]:
    """State -> its new value; and the other outputs of the algorithm, which are metrics."""
    new = set(step.update.values())
    return dict(step.update), [v.name or "" for v in step.algorithm.outputs if v.name not in new]


def _bindings_of_forward(model: Model, index: int, combined: Model) -> tuple[dict[str, str], list[str]]:
    """The bindings and metrics that belong to the forward pass: they depend on the batch, and on no gradient.

    A generator that the loss draws from belongs to it too: it advances when it was used.
    """
    graph = combined.graph
    known = {value.name: value for value in values(graph)}
    bindings, metrics = _bindings(model.step(index))
    nodes = _gradients(graph)
    derived = descendants(graph, [output for node in nodes for output in node.outputs])
    from_batch = descendants(graph, [value for value in graph.inputs if not value.is_initializer()])
    _, needed = ancestors(known[node.attributes["y"].as_string()] for node in nodes)

    def is_forward(new: str, state: str | None = None) -> bool:
        value = known[new]
        used = state is not None and known[state] in needed and known[state] not in _parameters(nodes, known)
        return value not in derived and (value in from_batch or used)

    chosen = {state: new for state, new in bindings.items() if is_forward(new, state)}
    return chosen, [name for name in metrics if is_forward(name)]


def _parameters(nodes: Iterable[ir.Node], known: dict[str | None, ir.Value]) -> set[ir.Value]:
    return {known[x] for node in nodes for x in strings(node, "xs")}


def _gradients(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if (node.domain, node.op_type) == (TRAINING_DOMAIN, "Gradient")]


def _plain(
    model: Model,
    index: int,
    combined: Model,
    names: Sequence[str],
    bindings: dict[str, str],
    metrics: Sequence[str],
    recompute: Choice,
    **more: Any,
) -> Made:
    """Keep what `names` need, lower it, and make inputs of the state."""
    graph = combined.graph
    known = {value.name: value for value in values(graph)}
    graph.outputs.clear()
    graph.outputs.extend(known[name] for name in dict.fromkeys(names))
    remove_unused(graph)
    combined = lower_gradients(combined, recompute=recompute)
    expand(combined.ir)
    combined = _finished(inline(combined))
    graph = combined.graph
    state = [s.name for s in states(model, index) if s.name in graph.initializers]
    for name in state:
        value = graph.initializers.pop(name)
        value.const_value = None
        if value not in graph.inputs:
            graph.inputs.append(value)
    batch = [v.name for v in graph.inputs if v.name not in state]
    contract = {"inputs": batch, "state": {name: bindings.get(name) for name in state}, "metrics": list(metrics)}
    return combined, contract | more


def _finished(model: Model) -> Model:
    """Without what nothing needs: nodes, inputs, initializers, imports."""
    graph = model.graph
    optimize(model)
    simplify(list(graph))
    remove_unused(graph)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)
    graph.inputs[:] = [value for value in graph.inputs if value.uses() or value.is_graph_output()]
    put_results_last(graph)
    for domain in list(graph.opset_imports):
        if domain not in ("", "ai.onnx") and not any(node.domain == domain for node in graph.all_nodes()):
            graph.opset_imports.pop(domain)
    foreign = sorted({node.domain for node in graph.all_nodes() if node.domain not in ("", "ai.onnx")})
    if foreign:
        raise UnsupportedError(
            f"the step has operators of {', '.join(f'`{domain}`' for domain in foreign)}, not of the standard",
            hint="a runtime needs them too; export the model without them",
        )
    return model
