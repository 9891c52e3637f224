"""A training run of JAX, its function, parameters and optimizer of optax, as a training model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onward.agreement.steps import Step, compare_steps, without_dropout
from onward.agreement.tolerance import Comparison
from onward.arguments import checked
from onward.build import Builder, Names
from onward.errors import MismatchError, UnsupportedError
from onward.frameworks.jax.closures import Tree, named_leaves
from onward.frameworks.jax.examples import check_function, check_optimizer
from onward.frameworks.jax.jaxpr import export
from onward.frameworks.jax.jaxpr.emitter import data_of
from onward.frameworks.jax.optimizers import Optimization, read_optimizer
from onward.frameworks.jax.traced import trace_optimizer
from onward.frameworks.jax.trial import try_updates
from onward.model import Model
from onward.model.core import values
from onward.model.serde import stamp
from onward.model.state import with_tags
from onward.model.walk import ancestors
from onward.run_state.problems import Parts
from onward.run_state.state import ParameterGroup, RunState
from onward.run_state.training_models import to_training_model
from onward.runtime.sessions import evaluate
from onward.transform import rename


@checked(types=False)
def from_jax(
    function: Callable[..., Any],
    params: Tree,
    example_inputs: Any,
    *,
    loss: Any = None,
    optimizer: optax.GradientTransformation,
    opt_state: Any = None,
    statistics: Tree = None,
    probe: bool = True,
) -> Model:
    """The training model that goes on where a run of JAX is.

        training = onward.from_jax(loss, params, batch, optimizer=tx, opt_state=state)

    - `function`: without `loss`, the loss itself, `(params, batch) -> scalar`; with `statistics`
      `(params, statistics, batch) -> (scalar, new statistics)`. With a `loss` of a recipe, such as `"cross_entropy"`,
      what computes the predictions, `(params, inputs) -> outputs`
    - `params`: any tree: plain dicts, Flax, Equinox. Parameters are named after their place: `Dense_0/kernel`
    - `example_inputs`: a batch, by name, whose first axis is free; for predictions the inputs alone
    - `loss`, `statistics`: see `function`; `statistics` are what it changes beside the parameters, as a tree
    - `optimizer`, `opt_state`: of optax; without a state the run begins
    - `probe`: whether both sides make a few steps, which must agree
    """
    captured = _Captured(function, params, statistics, example_inputs)
    weights = captured.weights
    parts = Parts()
    with parts.reading():
        check_function(captured, weights, statistics, example_inputs)
    with parts.reading():
        check_optimizer(optimizer, opt_state, weights)
    parts.refuse()
    state = optimizer.init(weights) if opt_state is None else opt_state
    idle: set[str] = set()
    with parts.reading():
        model = captured.model(["loss", *captured.new_statistics()] if loss is None else None)
        idle = _idle(model)
    with parts.reading():
        found, is_traced = _updates(optimizer, state, weights, idle)
    parts.refuse()
    run = RunState(
        model=model,
        loss="value:loss" if loss is None else loss,
        groups=found.groups,
        state=found.state,
        step=found.step,
        schedule=found.schedule,
        clip=found.clip,
        recipe=found.recipe,
    )
    training = _assemble(run, captured)
    if not probe:
        return training
    if not is_traced:
        try_updates(optimizer, state, weights, run)
    if loss is None:
        still = dataclasses.replace(run, model=without_dropout(model))
        _probe_steps(_assemble(still, captured), captured, optimizer, state)
    else:
        _compare_outputs(model, captured)
    return training


def _idle(model: Model) -> set[str]:
    """Parameters that no result depends on."""
    _, reached = ancestors(model.outputs)
    return {name for name, value in model.graph.initializers.items() if value not in reached}


def _updates(tx: optax.GradientTransformation, state: Any, weights: Tree, idle: set[str]) -> tuple[Optimization, bool]:
    """The optimizer in the words of a recipe, or else its update as a function; and whether it is that."""
    if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(weights)):  # which a recipe would update in float32
        traced = trace_optimizer(tx, state, weights, idle)
        return traced._replace(recipe={**traced.recipe, "master_weights": False}), True
    try:
        found = read_optimizer(tx, state, weights)
    except UnsupportedError as unread:
        try:
            return trace_optimizer(tx, state, weights, idle), True
        except (UnsupportedError, MismatchError) as error:
            hints = "; ".join(hint for each in (unread, error) if (hint := each.hint))
            raise UnsupportedError(f"{unread.message}; and as a function: {error.message}", hint=hints) from error
    return _drop_idle(found, idle), False


def _drop_idle(found: Optimization, idle: set[str]) -> Optimization:
    """The same without parameters that no result depends on, if their updates are zero."""
    moving = [
        name
        for group in found.groups
        for name in idle.intersection(group.parameters)
        if group.spec.options.get("weight_decay") or _is_moving(found, name)
    ]
    if moving:
        raise UnsupportedError(
            f"the optimizer changes {', '.join(f'`{name}`' for name in moving)}, on which the function does not depend",
            hint="leave it out of the parameters, or freeze it with `optax.set_to_zero()`",
        )
    groups = [
        ParameterGroup(group.optimizer, [name for name in group.parameters if name not in idle])
        for group in found.groups
    ]
    dropped = {key for name in idle for key in _slots(found, name)}
    state = {key: array for key, array in found.state.items() if key not in dropped}
    return found._replace(groups=[group for group in groups if group.parameters], state=state)


def _is_moving(found: Optimization, parameter: str) -> bool:
    """Whether it has momentum."""
    kept = (f"{parameter}/momentum_buffer", f"{parameter}/exp_avg", f"accum/{parameter}")
    return any(found.state[key].any() for key in kept if key in found.state)


def _slots(found: Optimization, parameter: str) -> list[str]:
    return [key for key in found.state if key.rpartition("/")[0] == parameter or key == f"accum/{parameter}"]


class _Captured:
    """A function of JAX and what it is called with."""

    def __init__(self, function: Callable[..., Any], params: Tree, statistics: Tree, batch: Any):
        self.function, self.params, self.statistics, self.batch = function, params, statistics, batch
        self.weights = jax.tree.map(lambda leaf: leaf if _is_parameter(leaf) else None, params)

    def __call__(self, weights: Tree, statistics: Tree, batch: Any) -> Any:
        """The result with other weights in the place of the parameters."""
        params = jax.tree.map(lambda old, new: old if new is None else new, self.params, weights)
        if statistics is None:
            return self.function(params, batch)
        return self.function(params, jax.tree.map(lambda leaf: leaf, statistics), batch)  # a copy, which may be changed

    def new_statistics(self) -> list[str]:
        return [f"{name}/next" for name in named_leaves(self.statistics)] if self.statistics is not None else []

    def model(self, results: list[str] | None) -> Model:
        names = list(named_leaves(self.batch)) if isinstance(self.batch, Mapping) else None
        if self.statistics is None:
            return export(self.function, self.params, self.batch, names=results, input_names=names)

        def both(trees: tuple[Tree, Tree], batch: Any) -> Any:
            return self.function(*trees, batch)

        made = export(both, (self.params, self.statistics), self.batch, names=results, input_names=names)
        places = {name: name.partition("/")[2] or "params" for name in made.graph.initializers}
        return rename(made, {old: new for old, new in places.items() if old[:2] in ("0/", "1/")})


def _is_parameter(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _assemble(run: RunState, captured: _Captured) -> Model:
    training = to_training_model(run)
    if captured.statistics is not None:
        for name in named_leaves(captured.statistics):
            _bind(training, name, f"{name}/next")
        stamp(training)
    return training


def _bind(model: Model, name: str, new: str) -> None:
    """Let a step put a value of the graph in the place of a statistic, and a reset what it is now."""
    step, graph = model.step(), model.graph
    value = graph.initializers[name]
    assert value.const_value is not None
    value.const_value = with_tags(value.const_value, role="statistics")
    output = next(each for each in graph.outputs if each.name == new)
    graph.outputs.remove(output)
    op = Builder(step.algorithm, opset=model.opset, names=model.names())
    result = op.Identity(output).named(f"{name}/new").like(value)
    step.algorithm.outputs.append(result.value)
    step.update[name] = result.name
    assert step.initialization is not None
    init = Builder(
        step.initialization, opset=model.opset, names=Names(v.name or "" for v in values(step.initialization))
    )
    start = init.constant(value.const_value.numpy()).named(f"{name}/initial").like(value)
    step.initialization.outputs.append(start.value)
    step.reset[name] = start.name


# ---- both sides ------------------------------------------------------------------------------------------------------


def _probe_steps(training: Model, captured: _Captured, tx: optax.GradientTransformation, opt_state: Any) -> None:
    """Three steps on both sides."""
    types = {value.name: value.dtype.numpy() for value in training.inputs if value.dtype}
    batch = {name: data_of(jnp.asarray(x)).astype(types[name]) for name, x in named_leaves(captured.batch).items()}
    sides = [captured.weights, captured.statistics, opt_state]

    def advance(weights: Tree, statistics: Tree, opt_state: Any) -> Any:
        def loss(weights: Tree) -> Any:
            result = captured(weights, statistics, captured.batch)
            return result if statistics is not None else (result, None)

        (value, following), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        updates, opt_state = tx.update(gradients, opt_state, weights)
        return value, gradients, optax.apply_updates(weights, updates), following, opt_state

    compiled = jax.jit(advance)

    def step(_: Any) -> Step:
        value, gradients, *sides[:] = compiled(*sides)
        weights = {name: leaf for tree in sides[:2] for name, leaf in _arrays(tree).items()}
        return Step(float(value), _arrays(gradients), weights)

    compare_steps(training, [batch] * 3, step, framework="JAX", engine="jax")


def _arrays(tree: Tree) -> dict[str, np.ndarray]:
    return {name: data_of(leaf) for name, leaf in named_leaves(tree).items()}


def _compare_outputs(model: Model, captured: _Captured) -> None:
    """What the model computes, and what the function does."""
    if captured.statistics is not None:
        raise UnsupportedError(
            "predictions with statistics do not say how these change",
            hint="give the loss itself as the function: (params, statistics, batch) -> (scalar, new statistics)",
        )
    fed = zip(model.inputs, jax.tree.leaves(captured.batch), strict=True)
    feeds = {value.name or "": np.asarray(leaf, value.dtype.numpy()) for value, leaf in fed if value.dtype}
    expected = jax.tree.leaves(captured.function(captured.params, captured.batch))
    names = [value.name or "" for value in model.outputs]
    compare = Comparison("what JAX computes", "the conversion is not exact: please report the function")
    compare(dict(zip(names, evaluate(model.copy(), feeds), strict=True)), dict(zip(names, expected, strict=True)))
