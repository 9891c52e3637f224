"""Training models from JAX: a function, parameters and an optax optimizer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onward.agreement.steps import without_dropout
from onward.arguments import checked
from onward.errors import DataError, MismatchError, UnsupportedError, first_line
from onward.frameworks.jax.closures import Tree, named_leaves
from onward.frameworks.jax.jaxpr import export
from onward.frameworks.jax.optimizer import Optimization, read_optimizer
from onward.frameworks.jax.probe import compare_outputs, probe_steps, try_updates
from onward.frameworks.jax.traced_optimizer import trace_optimizer
from onward.frameworks.randomness import refuse_random_draws
from onward.model import Model
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
    optimizer: Any = None,
    opt_state: Any = None,
    statistics: Tree = None,
    has_aux: bool = False,
    probe: bool = True,
) -> Model:
    """Return the training model that continues a JAX run.

        training = onward.from_jax(loss, params, batch, optimizer=tx, opt_state=state)

    - `function`: without `loss`, the loss, `(params, batch) -> scalar`; with `statistics`,
      `(params, statistics, batch) -> (scalar, new statistics)`. With a `loss` of a recipe, such
      as `"cross_entropy"`, the predictions, `(params, inputs) -> outputs`
    - `params`: any tree: plain dicts, Flax, Haiku, an Equinox module. Parameters are named by
      their path: `Dense_0/kernel`. Or a module of Flax NNX, which `function` takes in place of
      the parameters and may change; or a `TrainState` of Flax linen, whose `params`, `tx` and
      `opt_state` are used
    - `example_inputs`: a batch, by name, with a dynamic first axis; with a `loss`, only the
      inputs
    - `loss`: a loss of a recipe for the predictions of `function`
    - `optimizer`, `opt_state`: an optax optimizer and its state (default: the initial state), or
      an `nnx.Optimizer`, which has both
    - `statistics`: a tree of other arrays that `function` changes, such as running averages
    - `has_aux`: the loss is the first of two results, as in `jax.value_and_grad(has_aux=True)`.
      The other one is left out; with `statistics` it is `(new statistics, others)`
    - `probe`: compare a few steps of both sides (default: True)
    """
    objects = JaxObjects(function, params, statistics, optimizer, opt_state)
    function, params, statistics, optimizer, opt_state, count = read_objects(objects, has_aux, with_loss=loss is None)
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
    updates: dict[str, str] = {}
    with parts.collect():
        new = [] if statistics is None else [f"{name}/next" for name in named_leaves(statistics)]
        model = captured.model(["loss", *new] if loss is None else None)
        reached = ancestors(model.outputs)[1]
        idle = {name for name, value in model.graph.initializers.items() if value not in reached}
        updates = {} if statistics is None else _take_updates(model, statistics)
    with parts.collect():
        optimization, is_traced = read_updates(optimizer, state, weights, idle)
    parts.refuse()
    if count is not None and not optimization.step:  # some optimizers count no updates
        optimization = optimization._replace(step=count)
    run = RunState(model=model, loss="value:loss" if loss is None else loss, updates=updates, **optimization._asdict())
    training = to_training_model(run)
    if not probe:
        return training
    if not is_traced:
        try_updates(optimizer, state, weights, run)
    if loss is None:
        still = dataclasses.replace(run, model=without_dropout(model))
        probe_steps(to_training_model(still), captured, optimizer, state)
    else:
        compare_outputs(model, captured)
    return training


def read_updates(
    tx: optax.GradientTransformation, state: Any, weights: Tree, idle: set[str]
) -> tuple[Optimization, bool]:
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


def weights_of(params: Tree) -> Tree:
    """Return a tree of its floating-point arrays, with None in place of other leaves."""

    def weight(leaf: Any) -> Any:
        return leaf if jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating) else None

    return jax.tree.map(weight, params)


class _Captured:
    """Function of JAX with its arguments."""

    def __init__(self, function: Callable[..., Any], params: Tree, statistics: Tree, batch: Any):
        self.function, self.params, self.statistics, self.batch = function, params, statistics, batch
        self.weights = weights_of(params)

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


def _take_updates(model: Model, statistics: Tree) -> dict[str, str]:
    """Take the new statistics from the outputs of a model: name -> value. Constant ones need no update."""
    graph, updates = model.graph, {}
    for name in named_leaves(statistics):
        output = next(output for output in graph.outputs if output.name == f"{name}/next")
        graph.outputs.remove(output)
        producer = output.producer()
        if producer is not None and producer.op_type == "Identity" and producer.inputs[0] is graph.initializers[name]:
            graph.remove(producer, safe=True)
        else:
            updates[name] = f"{name}/next"
    return updates


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


class JaxObjects(NamedTuple):
    """Function of trees, with these trees and an optimizer: a run without classes."""

    function: Callable[..., Any]
    params: Tree
    statistics: Tree
    optimizer: Any
    opt_state: Any
    updates: int | None = None
    """Number of updates according to the objects."""


def nnx_of(target: Any) -> Any:
    """Return `flax.nnx` if the target is a module of it, else None."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if nnx is not None and isinstance(target, nnx.Module) else None


def is_train_state(target: Any) -> bool:
    """True for a `TrainState` of linen."""
    module = sys.modules.get("flax.training.train_state")
    return module is not None and isinstance(target, module.TrainState)


def read_objects(objects: JaxObjects, has_aux: bool, *, with_loss: bool = True) -> JaxObjects:
    """Return the run in trees, for objects of Flax that hold it; leave out auxiliary results."""
    if nnx := nnx_of(objects.params):
        objects = _of_module(nnx, objects, has_aux, with_loss)
    else:
        if is_train_state(state := objects.params):
            objects = objects._replace(
                params=state.params,
                optimizer=objects.optimizer or state.tx,
                opt_state=state.opt_state if objects.opt_state is None else objects.opt_state,
                updates=int(state.step),
            )
        if has_aux:
            objects = objects._replace(function=_without_results(objects.function, objects.statistics is not None))
        if jax.tree_util.all_leaves([objects.statistics]):
            objects = objects._replace(
                function=_of_named_statistic(objects.function), statistics={"statistics": objects.statistics}
            )
    if objects.optimizer is None:
        raise UnsupportedError("no `optimizer` is given", hint="give `optimizer=optax.adam(1e-3)`")
    return objects


def _of_module(nnx: Any, objects: JaxObjects, has_aux: bool, with_loss: bool) -> JaxObjects:
    """Return a module as its parameters, and the rest of its state as statistics."""
    optimizer, opt_state, count, wrt = objects.optimizer, objects.opt_state, None, nnx.Param
    if objects.statistics is not None:
        raise DataError("a module of NNX has its statistics inside", hint="leave out `statistics`")
    if isinstance(optimizer, nnx.Optimizer):
        opt_state = nnx.as_pure(optimizer.opt_state) if opt_state is None else opt_state
        optimizer, count, wrt = optimizer.tx, int(optimizer.step[...]), optimizer.wrt
    graph, params, rest = nnx.split(objects.params, wrt, ...)
    params, rest = nnx.as_pure(params), nnx.as_pure(rest)
    user_function = objects.function

    def function(params: Tree, *arguments: Any) -> Any:
        statistics, batch = arguments if arguments[1:] else (rest, *arguments)
        module = nnx.merge(graph, params, statistics, copy=True)
        result = user_function(module, batch)
        _, after, new = map(nnx.as_pure, nnx.split(module, wrt, ...))
        both = zip(named_leaves(params).items(), jax.tree.leaves(after), strict=True)
        if changed := [name for (name, old), leaf in both if leaf is not old]:
            raise UnsupportedError(
                f"the function itself changes `{changed[0]}`, which the optimizer trains",
                hint="compute with a changed copy, and leave the `nnx.Param` as it is",
            )
        result = result[0] if has_aux else result
        return (result, new) if arguments[1:] else result

    statistics = rest if with_loss and jax.tree.leaves(rest) else None
    return JaxObjects(function, params, statistics, optimizer, opt_state, count)


def _without_results(function: Callable[..., Any], with_statistics: bool) -> Callable[..., Any]:
    """Return a function without its auxiliary results: of (loss, (statistics, results)), or (loss, results)."""

    def loss_alone(*arguments: Any) -> Any:
        value, results = function(*arguments)
        return (value, results[0]) if with_statistics else value

    return loss_alone


def _of_named_statistic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose statistics, one array, have a name."""

    def named(params: Tree, statistics: Tree, batch: Any) -> Any:
        value, new = function(params, statistics["statistics"], batch)
        return value, {"statistics": new}

    return named
