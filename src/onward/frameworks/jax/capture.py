"""Training models from JAX: a function, parameters and an optax optimizer."""

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
from onward.frameworks.randomness import refuse_random_draws
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
    """Return the training model that continues a JAX run.

        training = onward.from_jax(loss, params, batch, optimizer=tx, opt_state=state)

    - `function`: without `loss`, the loss, `(params, batch) -> scalar`; with `statistics`,
      `(params, statistics, batch) -> (scalar, new statistics)`. With a `loss` of a recipe, such
      as `"cross_entropy"`, the predictions, `(params, inputs) -> outputs`
    - `params`: any tree: plain dicts, Flax, Equinox. Parameters are named by their path:
      `Dense_0/kernel`
    - `example_inputs`: a batch, by name, with a dynamic first axis; with a `loss`, only the
      inputs
    - `loss`: a loss of a recipe for the predictions of `function`
    - `optimizer`, `opt_state`: an optax optimizer and its state (default: the initial state)
    - `statistics`: a tree of other arrays that `function` changes, such as running averages
    - `probe`: compare a few steps of both sides (default: True)
    """
    captured = _Captured(function, params, statistics, example_inputs)
    weights = captured.weights
    parts = ErrorCollector()
    with parts.collect():
        check_function(captured)
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
        optimization, is_traced = _updates(optimizer, state, weights, idle)
    parts.refuse()
    run = RunState(model=model, loss="value:loss" if loss is None else loss, **optimization._asdict())
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
    """Return the optimizer as one of a recipe and False, or its traced update and True."""
    if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(weights)):  # a recipe updates them in float32
        traced = trace_optimizer(tx, state, weights, idle)
        return traced._replace(recipe={**traced.recipe, "master_weights": False}), True
    try:
        optimization = read_optimizer(tx, state, weights)
    except UnsupportedError as unread:
        try:
            return trace_optimizer(tx, state, weights, idle), True
        except (UnsupportedError, MismatchError) as error:
            hints = "; ".join(hint for failure in (unread, error) if (hint := failure.hint))
            raise UnsupportedError(f"{unread.message}; and as a function: {error.message}", hint=hints) from error
    return _drop_idle(optimization, idle), False


def _drop_idle(optimization: Optimization, idle: set[str]) -> Optimization:
    """Leave out parameters on which no result depends, if their updates are zero."""
    moving = []
    for group in optimization.groups:
        for name in idle.intersection(group.parameters):
            momentum = (f"{name}/momentum_buffer", f"{name}/exp_avg", f"accum/{name}")
            is_moving = any(optimization.state[key].any() for key in momentum if key in optimization.state)
            moving += [name] if group.spec.options.get("weight_decay") or is_moving else []
    if moving:
        raise UnsupportedError(
            f"the optimizer changes {', '.join(f'`{name}`' for name in moving)}, on which the function does not depend",
            hint="leave it out of the parameters, or freeze it with `optax.set_to_zero()`",
        )
    used = [(group.optimizer, [name for name in group.parameters if name not in idle]) for group in optimization.groups]
    dropped = {key for key in optimization.state if {key.rpartition("/")[0], key.removeprefix("accum/")} & idle}
    return optimization._replace(
        groups=[ParameterGroup(optimizer, names) for optimizer, names in used if names],
        state={key: array for key, array in optimization.state.items() if key not in dropped},
    )


class _Captured:
    """Function of JAX with its arguments."""

    def __init__(self, function: Callable[..., Any], params: Tree, statistics: Tree, batch: Any):
        self.function, self.params, self.statistics, self.batch = function, params, statistics, batch

        def parameter(leaf: Any) -> Any:
            return leaf if jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating) else None

        self.weights = jax.tree.map(parameter, params)

    def __call__(self, weights: Tree, statistics: Tree, batch: Any) -> Any:
        """Call the function with other weights as parameters."""
        params = jax.tree.map(lambda old, new: old if new is None else new, self.params, weights)
        if statistics is None:
            return self.function(params, batch)
        copy = jax.tree.map(lambda leaf: leaf, statistics)  # the function may change it
        return self.function(params, copy, batch)

    def model(self, results: list[str] | None) -> Model:
        names = list(named_leaves(self.batch)) if isinstance(self.batch, Mapping) else None
        if self.statistics is None:
            return export(self.function, self.params, self.batch, names=results, input_names=names)

        def both(trees: tuple[Tree, Tree], batch: Any) -> Any:
            return self.function(*trees, batch)

        model = export(both, (self.params, self.statistics), self.batch, names=results, input_names=names)
        plain_names = {name: name.partition("/")[2] or "params" for name in model.graph.initializers}
        return rename(model, {old: new for old, new in plain_names.items() if old[:2] in ("0/", "1/")})


def _assemble(run: RunState, captured: _Captured) -> Model:
    training = to_training_model(run)
    if captured.statistics is not None:
        for name in named_leaves(captured.statistics):
            _bind(training, name)
        stamp(training)
    return training


def _bind(model: Model, name: str) -> None:
    """Let a step set a statistic to the output `<name>/next`, and a reset to its current value."""
    step, graph = model.step(), model.graph
    value = graph.initializers[name]
    assert value.const_value is not None
    value.const_value = with_tags(value.const_value, role="statistics")
    output = next(output for output in graph.outputs if output.name == f"{name}/next")
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


# Errors of JAX where Python code needs the value of an array.
_DECISIONS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_function(captured: _Captured) -> None:
    """Refuse a function that fails with its example."""
    try:
        with refuse_random_draws("the function"):
            jax.eval_shape(captured, captured.weights, captured.statistics, captured.batch)
    except _DECISIONS as error:
        raise UnsupportedError(
            f"Python code of the function depends on values of arrays: {first_line(error)}",
            hint="use `jnp.where`, `jax.lax.cond` or `jax.lax.scan`",
        ) from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), captured.batch)
        raise DataError(
            f"the function fails with the example: {type(error).__name__}: {first_line(error)}",
            hint=f"check names, shapes and types of the example: {shapes}",
        ) from error


def check_optimizer(optimizer: Any, state: Any, weights: Any) -> None:
    """Refuse an object that is not an optax optimizer, and a state of another optimizer."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UnsupportedError(
            f"{optimizer!r} is not an optimizer of optax", hint="give a transformation, such as `optax.adam(1e-3)`"
        )
    if state is None:
        return
    try:
        jax.eval_shape(optimizer.update, weights, state, weights)
    except (AttributeError, ValueError) as error:
        raise DataError(
            f"`opt_state` is not a state of this optimizer: {first_line(error)}",
            hint="give the current state of the run, which starts as `optimizer.init(params)`",
        ) from error
    except TypeError as error:
        raise UnsupportedError(
            f"the optimizer cannot be carried: an update takes more than gradients: {first_line(error)}",
            hint="use an optimizer such as `optax.adam(1e-3)`",
        ) from error
