"""Runs to and from training models. Reading checks that the run is complete."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Names
from onward.errors import UnsupportedError, list_names
from onward.lowering import lower
from onward.model import Model
from onward.model.core import string, values
from onward.model.serde import stamp
from onward.model.state import PARAMETER_KEY, SLOT_KEY, STEP, states, with_tags
from onward.model.walk import source_of
from onward.recipe.objective import terms, with_output
from onward.recipe.optimizers import FunctionOptimizer, optimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of
from onward.recipe.prepare import prepare
from onward.recipe.spec import Spec
from onward.recipe.training_mode import NEXT_KEY
from onward.rules.quantization import rounds, rounds_only_in_pairs
from onward.run_state.completeness import differences
from onward.run_state.reading import LossTerm, base_name, computing_node, read_training
from onward.run_state.state import RUN_ITSELF, ParameterGroup, RunState
from onward.runtime.sessions import evaluate
from onward.standard import IR_VERSION
from onward.transform.merge import rename
from onward.transform.quantized import RANGE_KEY
from onward.transform.training import drop_unused_definitions, keep_only, without_steps


def to_training_model(run: RunState) -> Model:
    """Return a training model that continues a run."""
    if not run.parameters:
        raise nothing_learns()
    first = run.groups[0].optimizer
    assert first is not None
    floating = [value.name or "" for value in run.model.outputs if value.dtype and value.dtype.is_floating_point()]
    model = prepare(
        _with_outputs(run.model, run.updates.values()),
        loss=with_output(run.loss, floating[0]) if run.updates and len(floating) == 1 else run.loss,
        optimizer=first,
        groups=[
            {"match": [glob.escape(name) for name in group.parameters], "optimizer": group.optimizer}
            for group in run.groups
        ],
        trainable=[glob.escape(name) for name in run.parameters],
        schedule=list(run.schedule) or None,
        clip=run.clip,
        variance=run.statistics,
        **run.recipe,
    )
    for name, array in run.state.items():
        model.set(name, array)
    model.set(STEP, np.int64(run.step))
    for name, new in run.updates.items():
        _bind(model, name, new)
    if run.updates:
        outputs = {value.name for value in run.model.outputs}
        for value in model.outputs:
            value.metadata_props.pop(NEXT_KEY, None)
        model.graph.outputs[:] = [value for value in model.outputs if value.name in outputs]
        stamp(model)
    return model


def _with_outputs(model: Model, names: Collection[str]) -> Model:
    """Return the model with further values as outputs, which keeps what computes them."""
    if not names:
        return model
    model, outputs = model.copy(), {value.name for value in model.outputs}
    for value in [value for value in values(model.graph) if value.name in names]:
        value.metadata_props[NEXT_KEY] = "1"
        if value.name not in outputs:
            model.graph.outputs.append(value)
    return model


def _bind(model: Model, name: str, new: str) -> None:
    """Let a step set a statistic to a value of the model, and a reset to the current value."""
    step, value = model.step(), model.graph.initializers[name]
    assert value.const_value is not None and step.initialization is not None
    value.const_value = with_tags(value.const_value, role="statistics")
    source = next(value for value in values(model.graph) if value.name == new)
    trained = next((t for t, plain in (step.fact("train.forward") or {}).items() if plain == new), None)
    source = next((value for value in values(step.algorithm) if value.name == trained), source)
    op = Builder(step.algorithm, opset=model.opset, names=model.names())
    result = op.Identity(source).named(f"{name}/new").like(value)
    step.algorithm.outputs.append(result.value)
    step.update[name] = result.name
    names = Names(value.name or "" for value in values(step.initialization))
    init = Builder(step.initialization, opset=model.opset, names=names)
    start = init.constant(value.const_value.numpy()).named(f"{name}/initial").like(value)
    step.initialization.outputs.append(start.value)
    step.reset[name] = start.name


def _updates_of(model: Model, index: int) -> dict[str, str]:
    """Return the statistics that a step sets to values of the model itself."""
    step = model.step(index)
    trained, sources = step.fact("train.forward") or {}, {value.name: value for value in values(model.graph)}
    new = {value.name: value.producer() for value in step.algorithm.outputs}
    updates: dict[str, str] = {}
    for state in states(model, index):
        node = new.get(step.update.get(state.name)) if state.role == "statistics" else None
        if node is not None and node.op_type == "Identity" and (value := node.inputs[0]) is not None:
            plain = trained.get(value.name, value.name)
            if plain is not None and plain in sources:
                updates[state.name] = plain
    return updates


def nothing_learns() -> UnsupportedError:
    return UnsupportedError(
        "no parameter of the optimizer has an effect on the loss", hint="check the loss and the frozen parameters"
    )


_ALL_STEPS = "convert all: `onward.to_torch(training)`, `onward.to_jax(training)` or `onward.to_tensorflow(training)`"


def step_of(model: Model, requested: int | None = None) -> int:
    """Return the index of a step, or of the only one."""
    if not model.steps:
        raise UnsupportedError(
            "this is an inference model, which holds no training",
            hint="prepare it first: `onward prepare model.onnx --loss cross_entropy`, or `onward.prepare`",
        )
    if requested is None and len(model.steps) > 1:
        names = ", ".join(f"`{name}`" for name in step_names(model))
        raise UnsupportedError(
            f"the training model has {len(model.steps)} steps ({names}), and only one fits here",
            hint=_ALL_STEPS,
        )
    return model.steps.index(model.step(requested or 0))


def only_step_of(model: Model, requested: int | None = None) -> int:
    """Return the index of the only step, for frameworks that cannot hold several."""
    index = step_of(model, requested)
    if len(model.steps) > 1:
        raise UnsupportedError(
            f"the training model has {len(model.steps)} steps, and the others would be lost",
            hint=_ALL_STEPS,
        )
    return index


def step_names(model: Model) -> list[str]:
    """Return the names of the steps; `step<index>` for one without a name of its own."""
    names = [step.algorithm.name or "" for step in model.steps]
    return [name if name and names.count(name) == 1 else f"step{index}" for index, name in enumerate(names)]


def one_step_of(model: Model, index: int) -> tuple[Model, dict[str, str]]:
    """Return a copy with only this step, and its names for state that has others in the model.

    Weights that other steps change are frozen in the copy.
    """
    one = model.copy()
    one.steps[:] = [one.steps[index]]
    own = [state for state in states(one) if state.name in one.step().algorithm.initializers]
    names = {s.name: f"{s.parameter}/{s.slot}" if s.parameter and s.slot else base_name(s.name) for s in own}
    changed = {old: new for old, new in names.items() if old != new}
    return rename(one, changed) if changed else one, {new: old for old, new in changed.items()}


def refuse_rounding(model: Model, *, in_pairs: bool) -> None:
    """Raise an UnsupportedError if gradients pass through rounding, as frameworks return zero.

    With `in_pairs`, a QuantizeLinear with its DequantizeLinear is supported.
    """
    reason = None
    if any(RANGE_KEY in node.metadata_props for node in model.graph):
        reason = "the quantization ranges change in training, which objects of a framework do not do"
    elif rounds(model) and not (in_pairs and rounds_only_in_pairs(model)):
        reason = "the model rounds to integers, where gradients of the framework would be zero"
    if reason:
        raise UnsupportedError(reason, hint=RUN_ITSELF)


def from_training_model(model: Model, index: int = 0, *, forward: bool = True) -> RunState:
    """Return the run of a training model with current numbers, if it is complete.

    Without `forward`, the caller executes the forward pass and the loss of the file itself.
    """
    run = _read_run_state(model, step_of(model, index))
    refuse_rounding(model, in_pairs=forward)
    step = model.step(index)
    recipe = step.fact("train.recipe") or {}
    if not forward:
        reported = {value.name for value in step.algorithm.outputs} - {*step.update.values()}
        others = [y for node in step.gradients() if (y := string(node, "y")) not in reported]
        if (others or len(step.gradients()) != 1) and "loss_scale" in recipe:
            raise _not_carried("it scales its loss")
        if others or len(step.gradients()) != 1:
            raise _not_carried(f"it differentiates {list_names(others, 3) or 'more than its loss'}")
    elif any(t.spec.name == "custom" for t in terms(run.loss)) or any("constant" in f for f in step.fact("train.loss")):
        run = dataclasses.replace(run, loss=loss_graph(model, index))
    if left_out := differences(model, index, _rewritten(run, forward), forward=forward):
        reasons = [_UNSUPPORTED[key] for key in recipe if key in _UNSUPPORTED and forward]
        raise _not_carried(*reasons or [f"it computes {' and '.join(left_out[:3])} differently from its recipe"])
    return run


def loss_graph(model: Model, index: int = 0) -> Model:
    """Return the loss of a step as a model, from outputs of the inference graph and further inputs, its targets."""
    step, combined = model.step(index), Model(model.combined(index))
    by_name = {value.name: value for value in values(combined.graph)}
    trained = {plain: name for name, plain in (step.fact("train.forward") or {}).items()}
    loss = by_name[string(step.gradients()[0], "y")]
    outputs, targets = [value.name or "" for value in model.outputs], {value.name for value in step.algorithm.inputs}
    inputs = []
    combined.graph.outputs.clear()
    for name in outputs:
        computed = by_name[trained.get(name, name)]
        value = ir.Value(name=name, type=computed.type, shape=computed.shape)
        computed.name = f"{name}/computed"
        computed.replace_all_uses_with(value)
        inputs.append(value)
    read = [value for value in combined.graph.inputs if value.name in targets]
    combined.graph.inputs.clear()
    combined.graph.inputs.extend([*inputs, *read])
    keep_only(combined, [loss])
    state = {entry.name for entry in states(model, index)}
    if strange := [name for name in combined.graph.initializers if name in state]:
        raise UnsupportedError(
            f"the loss is a custom graph that reads `{strange[0]}`, not only outputs and targets", hint=RUN_ITSELF
        )
    drop_unused_definitions(combined)
    return combined


def _not_carried(*reasons: str) -> UnsupportedError:
    return UnsupportedError(f"the training model cannot be carried over: {'; '.join(reasons)}", hint=RUN_ITSELF)


_UNSUPPORTED = {
    "augment": "it augments its data",
    "prune": "it prunes its weights",
    "teacher": "it learns from a teacher",
    "sample_weight": "it weights its samples",
}
"""Parts of a recipe that no framework has an object for."""


def _rewritten(run: RunState, forward: bool) -> Model:
    """Return the training model of a run without its state; without `forward`, with any loss."""
    if forward:
        return to_training_model(dataclasses.replace(run, state={}))
    watched = [term.output for term in terms(run.loss) if term.output is not None]
    floating = [value.name or "" for value in run.model.outputs if value.dtype and value.dtype.is_floating_point()]
    anything = [{name: "mse"} for name in dict.fromkeys([*watched, *floating])]
    return to_training_model(dataclasses.replace(run, state={}, loss=anything))


def is_plain(model: Model, index: int, run: RunState) -> bool:
    """True if a run is the whole of a step, with its forward pass and loss."""
    named = all(term.spec.name != "custom" for term in terms(run.loss))
    return named and not differences(model, index, _rewritten(run, forward=True), forward=True)


def _read_run_state(model: Model, index: int) -> RunState:
    """Return a run, without the check that it is complete."""
    run = read_training(model, index)
    unknown = [group.name for group in run.groups if group.optimizer is None]
    if unknown or not run.loss:
        subject = f"the updates of {', '.join(unknown)} are" if unknown else "the loss is"
        reason = f"{subject} written in plain operators, which no framework has as an object"
        raise UnsupportedError(reason, hint=RUN_ITSELF)
    own = [state for state in states(model, index) if state.role not in ("parameter", "statistics")]
    recipe = model.step(index).fact("train.recipe") or {}
    return RunState(
        model=without_steps(model),
        loss=[_term(term) for term in run.loss],
        groups=[
            ParameterGroup(optimizer_of(model, index, group), group.parameters, rate=group.rate) for group in run.groups
        ],
        state={state.name: state.array for state in own if state.name != STEP},
        step=run.step,
        schedule=run.schedule,
        clip=run.clip,
        statistics=recipe.get("variance", "population"),
        updates=_updates_of(model, index),
        recipe={key: recipe[key] for key in _RECIPE_OPTIONS if key in recipe},
        accumulate=int(recipe.get("accumulate", 1)),
        waiting=run.waiting if isinstance(run.waiting, int) else 0,
        average_decay=recipe.get("ema"),
    )


_RECIPE_OPTIONS = ("accumulate", "ema", "seed", "loss_scale", "master_weights")
"""Options of `prepare` beside those that a run has fields for."""


def _term(term: LossTerm) -> Any:
    if term.name == "value" and term.scale == 1:
        return f"value:{term.output}"
    scale = {} if term.scale == 1 else {"scale": term.scale}
    return {term.output: {"name": term.name, **term.options, **scale}}


def optimizer_of(model: Model, index: int, group: ParameterGroup) -> Spec | FunctionOptimizer:
    """Return the optimizer of a recipe without settings that have no effect, or a function."""
    if group.is_function:
        return _function_of(model, index, group)
    definition = optimizer(group.spec.name)
    options = {key: value for key, value in group.spec.options.items() if key not in group.settings}
    choices = {key: value for key, value in options.items() if key in definition.choices}
    numbers = {k: v for k, v in group.settings.items() if k in definition.hyper and isinstance(v, int | float)}
    default = definition.configure()  # some choices would be refused without the numbers that go with them
    complete = dataclasses.replace(
        default, values={**definition.hyper, **numbers}, options={**default.options, **choices}
    )
    used = {key: value for key, value in numbers.items() if key in complete.effective}
    return Spec(definition.name, {**used, **choices})


# ---- optimizers that are functions -----------------------------------------------------------------------------------

_SCALARS = {RATE: ir.DataType.DOUBLE, COUNT: ir.DataType.INT64}


def _function_of(model: Model, index: int, group: ParameterGroup) -> FunctionOptimizer:
    """Return the function of a group as a graph, whose inputs have the current names of state."""
    step = model.step(index)
    computed = {value.name: value for value in values(step.algorithm)}
    match = computing_node(computed[step.update[group.parameters[0]]])
    assert match is not None
    call = match[0]
    functions = {key: function.clone() for key, function in model.functions.items()}
    graph = functions.pop(call.op_identifier()).graph
    origins = [source_of(value) for value in call.inputs]
    names = _names([value.name or "" for value in graph.inputs], origins, group.parameters)
    for formal, actual, name in zip(graph.inputs, call.inputs, names, strict=True):
        assert actual is not None
        dtype = _SCALARS.get(name, actual.dtype) if formal.dtype is None else formal.dtype
        formal.type = None if dtype is None else ir.TensorType(dtype)
        formal.shape = ir.Shape([]) if name in _SCALARS else actual.shape
        formal.name = name
    update = Model(ir.Model(graph, ir_version=model.ir.ir_version or IR_VERSION, functions=list(functions.values())))
    drop_unused_definitions(update)
    first: dict[str | None, np.ndarray] = {}
    if step.initialization:
        initialization = lower(model, index, part="initialization")
        first = {v.name: array for v, array in zip(initialization.outputs, evaluate(initialization), strict=True)}
    initial_state = {
        name: first[value.name] for name, value in zip(names, origins, strict=True) if value and value.name in first
    }
    function_optimizer = FunctionOptimizer(group.spec.name, update, float(str(group.settings[RATE])))
    initial = {v.name: initial_state[v.name] for v in function_optimizer.state if v.name in initial_state}
    return dataclasses.replace(function_optimizer, initial=initial)


def _names(formals: Sequence[str], origins: Sequence[ir.Value | None], parameters: Sequence[str]) -> list[str]:
    names: dict[str, str] = {}
    for formal, value in zip(formals, origins, strict=True):
        tags = value.const_value.metadata_props if value is not None and value.const_value is not None else {}
        owner, slot = tags.get(PARAMETER_KEY), tags.get(SLOT_KEY)
        if formal in _SCALARS:
            names[formal] = formal
        elif value is not None and (name := value.name or "") in parameters:
            names[formal] = name
        elif slot is not None:  # state of a parameter or the group, or the copy of a parameter that is updated
            names[formal] = slot if owner is None else owner if slot == "master" else f"{owner}/{slot}"
    gradients = {gradient_of(formal): gradient_of(name) for formal, name in names.items()}
    return [names.get(formal) or gradients[formal] for formal in formals]
