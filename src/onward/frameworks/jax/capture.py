"""A training run of JAX, its function, parameters and optimizer of optax, as a training model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from onward.agreement.steps import without_dropout
from onward.arguments import checked
from onward.build import Builder, Names
from onward.errors import DataError, MismatchError, UnsupportedError, first_line
from onward.frameworks.jax.closures import Tree, named_leaves
from onward.frameworks.jax.jaxpr import export
from onward.frameworks.jax.optimizer import Optimization, read_optimizer
from onward.frameworks.jax.probe import compare_outputs, probe_steps, try_updates
from onward.frameworks.jax.traced_optimizer import trace_optimizer
from onward.frameworks.randomness import no_chance
from onward.model import Model
from onward.model.core import values
from onward.model.serde import stamp
from onward.model.state import with_tags
from onward.model.walk import ancestors
from onward.run_state.problems import ErrorCollector
from onward.run_state.state import ParameterGroup, RunState
from onward.run_state.training_models import to_training_model
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
    parts = ErrorCollector()
    with parts.collect():
        check_function(captured, weights, statistics, example_inputs)
    with parts.collect():
        check_optimizer(optimizer, opt_state, weights)
    parts.refuse()
    state = optimizer.init(weights) if opt_state is None else opt_state
    idle: set[str] = set()
    with parts.collect():
        new = [] if statistics is None else [f"{name}/next" for name in named_leaves(statistics)]
        model = captured.model(["loss", *new] if loss is None else None)
        reached = ancestors(model.outputs)[1]
        idle = {name for name, value in model.graph.initializers.items() if value not in reached}
    with parts.collect():
        found, is_traced = _updates(optimizer, state, weights, idle)
    parts.refuse()
    run = RunState(model=model, loss="value:loss" if loss is None else loss, **found._asdict())
    training = _assemble(run, captured)
    if not probe:
        return training
    if not is_traced:
        try_updates(optimizer, state, weights, run)
    if loss is None:
        still = dataclasses.replace(run, model=without_dropout(model))
        probe_steps(_assemble(still, captured), captured, optimizer, state)
    else:
        compare_outputs(model, captured)
    return training


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
    """Leave out parameters that no result depends on, if their updates are zero."""
    moving = []
    for group in found.groups:
        for name in idle.intersection(group.parameters):
            momentum = (f"{name}/momentum_buffer", f"{name}/exp_avg", f"accum/{name}")
            is_moving = any(found.state[key].any() for key in momentum if key in found.state)
            moving += [name] if group.spec.options.get("weight_decay") or is_moving else []
    if moving:
        raise UnsupportedError(
            f"the optimizer changes {', '.join(f'`{name}`' for name in moving)}, on which the function does not depend",
            hint="leave it out of the parameters, or freeze it with `optax.set_to_zero()`",
        )
    groups = [
        ParameterGroup(group.optimizer, [name for name in group.parameters if name not in idle])
        for group in found.groups
    ]
    state = {
        key: array
        for key, array in found.state.items()
        if key.rpartition("/")[0] not in idle and key.removeprefix("accum/") not in idle
    }
    return found._replace(groups=[group for group in groups if group.parameters], state=state)


class _Captured:
    """A function of JAX and what it is called with."""

    def __init__(self, function: Callable[..., Any], params: Tree, statistics: Tree, batch: Any):
        self.function, self.params, self.statistics, self.batch = function, params, statistics, batch

        def parameter(leaf: Any) -> Any:
            return leaf if jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating) else None

        self.weights = jax.tree.map(parameter, params)

    def __call__(self, weights: Tree, statistics: Tree, batch: Any) -> Any:
        """The result with other weights in the place of the parameters."""
        params = jax.tree.map(lambda old, new: old if new is None else new, self.params, weights)
        if statistics is None:
            return self.function(params, batch)
        return self.function(params, jax.tree.map(lambda leaf: leaf, statistics), batch)  # a copy, which may be changed

    def model(self, results: list[str] | None) -> Model:
        names = list(named_leaves(self.batch)) if isinstance(self.batch, Mapping) else None
        if self.statistics is None:
            return export(self.function, self.params, self.batch, names=results, input_names=names)

        def both(trees: tuple[Tree, Tree], batch: Any) -> Any:
            return self.function(*trees, batch)

        made = export(both, (self.params, self.statistics), self.batch, names=results, input_names=names)
        places = {name: name.partition("/")[2] or "params" for name in made.graph.initializers}
        return rename(made, {old: new for old, new in places.items() if old[:2] in ("0/", "1/")})


def _assemble(run: RunState, captured: _Captured) -> Model:
    training = to_training_model(run)
    if captured.statistics is not None:
        for name in named_leaves(captured.statistics):
            _bind(training, name)
        stamp(training)
    return training


def _bind(model: Model, name: str) -> None:
    """Let a step replace a statistic by the output `<name>/next`, and a reset by what it is now."""
    step, graph = model.step(), model.graph
    value = graph.initializers[name]
    assert value.const_value is not None
    value.const_value = with_tags(value.const_value, role="statistics")
    output = next(each for each in graph.outputs if each.name == f"{name}/next")
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


# ---- arguments -------------------------------------------------------------------------------------------------------

_DECISIONS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where Python asks for the value of an array."""


def check_function(function: Callable[..., Any], weights: Any, statistics: Any, batch: Any) -> None:
    """Refuse a function that fails with its example, which is the last argument."""
    try:
        with no_chance("the function"):
            jax.eval_shape(function, weights, statistics, batch)
    except _DECISIONS as error:
        raise UnsupportedError(
            f"the function asks in Python for the values of arrays, and a graph cannot: {first_line(error)}",
            hint="choose by `jnp.where` or `jax.lax.cond`, repeat by `jax.lax.scan`",
        ) from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), batch)
        raise DataError(
            f"the function fails with the example: {type(error).__name__}: {first_line(error)}",
            hint=f"check names, shapes and types of the example: {shapes}",
        ) from error


def check_optimizer(optimizer: Any, state: Any, weights: Any) -> None:
    """Refuse what is no optimizer of optax, and a state that is another's."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UnsupportedError(
            f"{optimizer!r} is no optimizer of optax", hint="give a transformation, such as `optax.adam(1e-3)`"
        )
    if state is None:
        return
    try:
        jax.eval_shape(optimizer.update, weights, state, weights)
    except (AttributeError, ValueError) as error:
        raise DataError(
            f"the optimizer does not take the state that is given: {first_line(error)}",
            hint="give what its `init` made, after the updates since; or none for a run that begins",
        ) from error
    except TypeError as error:
        raise UnsupportedError(
            f"the optimizer cannot be carried: an update takes more than gradients: {first_line(error)}",
            hint="use one that needs nothing but gradients and parameters",
        ) from error
