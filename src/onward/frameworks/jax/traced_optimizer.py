"""Traced optax transformations: the update is a function of all parameters at once.

Its counts, also those of schedules, are state. Its learning rate is inside; that of the training
model is a factor of all updates, and 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onward.agreement.steps import Trial, compare_updates, update_by
from onward.agreement.tolerance import Arrays
from onward.errors import UnsupportedError, first_line
from onward.frameworks.jax.closures import Tree, named_leaves, path_name, transformations
from onward.frameworks.jax.jaxpr import export
from onward.frameworks.jax.jaxpr.builder import data_of
from onward.frameworks.jax.optimizer import Optimization
from onward.frameworks.jax.updates import places_of
from onward.model import Model
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of
from onward.run_state.state import ParameterGroup


def trace_optimizer(tx: Any, opt_state: Any, params: Tree, idle: Collection[str] = ()) -> Optimization:
    """Return the update of an optax transformation as a function, with its state.

    Parameters on which no result depends, `idle`, are state too: an optimizer may keep averages
    there.
    """
    traced = _Traced(tx, jax.tree.map(jnp.asarray, opt_state), params, idle)
    model = traced.model()
    begin = traced.state(traced.params, traced.opt_state)
    function = FunctionOptimizer(model.graph.name or "optax", model, 1.0, begin)
    _try_updates(function, traced)
    stored_names = places_of(function, "group0")
    state = {stored_names[name]: value for name, value in begin.items()}
    counts = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state) if _word(path[-1]) == "count"]
    step = max((int(count) for count in counts if count.ndim == 0), default=0)
    return Optimization([ParameterGroup(function, traced.trained)], state, step, [], None, {})


def fill_traced(tx: Any, opt_state: Any, params: Tree, idle: Collection[str], stored: Mapping[str, np.ndarray]) -> Any:
    """Return the state of an optimizer with the arrays that `trace_optimizer` would name so."""
    trained = {name for name in named_leaves(params) if name not in idle}
    names = _state_names(opt_state, params, trained)
    arrays = [stored.get(name, stored.get(f"group0/{name}")) for name in names]
    leaves = [
        old if array is None else jnp.asarray(array, jnp.asarray(old).dtype)
        for array, old in zip(arrays, jax.tree.leaves(opt_state), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(opt_state), leaves)


class _Traced:
    """Update with names for its inputs."""

    def __init__(self, tx: Any, opt_state: Any, params: Tree, idle: Collection[str]):
        self.tx, self.opt_state, self.params = tx, opt_state, params
        self.trained = [name for name in named_leaves(params) if name not in idle]
        self.others = [name for name in named_leaves(params) if name in idle]
        of_others = [f"parameter.{name.replace('/', '.')}" for name in self.others]
        self.state_names = [*_state_names(opt_state, params, set(self.trained)), *of_others]

    def state(self, params: Tree, opt_state: Any) -> dict[str, np.ndarray]:
        leaves = jax.tree.leaves((opt_state, self.of(self.others, params)))
        return dict(zip(self.state_names, map(data_of, leaves), strict=True))

    def of(self, names: Collection[str], params: Tree) -> list[Any]:
        return [leaf for name, leaf in named_leaves(params).items() if name in names]

    def arrays(self, params: Tree, opt_state: Any) -> dict[str, np.ndarray]:
        """Return the trained parameters, and the state."""
        trained = {name: data_of(leaf) for name, leaf in named_leaves(params).items() if name in self.trained}
        return {**trained, **self.state(params, opt_state)}

    def whole(self, leaves: Mapping[str, Any]) -> Tree:
        """Return a tree of all parameters, with zeros for missing leaves."""
        return jax.tree_util.tree_map_with_path(
            lambda path, old: leaves.get(path_name(path), jnp.zeros_like(old)), self.params
        )

    def model(self) -> Model:
        names = [*self.trained, *map(gradient_of, self.trained), *self.state_names, RATE]
        results = [f"{name}/new" for name in (*self.trained, *self.state_names)]

        def update(_: Any, parameters: Any, gradients: Any, state: Any, others: Any, rate: Any) -> Any:
            params = self.whole(dict(zip([*self.trained, *self.others], [*parameters, *others], strict=True)))
            changes, state = self.tx.update(self.whole(dict(zip(self.trained, gradients, strict=True))), state, params)
            scaled = jax.tree.map(lambda change: change * rate.astype(change.dtype), changes)
            new = optax.apply_updates(params, scaled)
            return self.of(self.trained, new), state, self.of(self.others, new)

        update.__name__ = _name_of(self.tx, self.opt_state, self.params)
        trained = self.of(self.trained, self.params)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        arguments = (trained, trained, self.opt_state, self.of(self.others, self.params), rate)
        try:
            return export(update, (), *arguments, names=results, input_names=names, batch=None)
        except UnsupportedError:
            raise
        except Exception as error:  # of custom functions, which get only shapes
            raise UnsupportedError(
                f"its update cannot be traced: {first_line(error)}",
                hint="write the update as a function of gradients, state and parameters, with operations of JAX",
            ) from error


def _state_names(state: Any, params: Tree, trained: set[str]) -> list[str]:
    """Return names for the leaves of a state, with the name of a parameter that they mirror."""
    owners = {path: path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    short, long = [], []
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        start = next((i for i in range(len(path)) if owners.get(path[i:]) in trained), len(path))
        owner = f"{owners[path[start:]]}/" if start < len(path) else ""
        words = [_word(key) for key in path[:start]]
        short.append(owner + next((word for word in reversed(words) if not word.isdigit()), "state"))
        long.append(owner + ".".join(["state", *words]))
    taken = Counter(short)
    reserved = {RATE, COUNT, "x", "g", *trained, *map(gradient_of, trained)}
    return [s if taken[s] == 1 and s not in reserved else other for s, other in zip(short, long, strict=True)]


def _word(key: Any) -> str:
    return re.sub(r"\W+", "_", jax.tree_util.keystr((key,), simple=True))


def _name_of(tx: Any, state: Any, params: Tree) -> str:
    """Return the names of the transformations."""
    try:
        makers = [t.name.partition(".<locals>")[0] for t in transformations(tx, state, params)]
    except Exception:  # custom objects may differ from those of optax
        makers = [type(tx).__name__]
    short_names = [maker.removesuffix(".update").rpartition(".")[2].removeprefix("scale_by_") for maker in makers]
    names = [name for name in dict.fromkeys(short_names) if name not in _PLAIN]
    return re.sub(r"\W+", "_", "_".join(names[:3])) or "optax"


_PLAIN = ("identity", "inject_hyperparams", "scale", "schedule", "add_decayed_weights")  # in most optimizers


def _try_updates(function: FunctionOptimizer, traced: _Traced) -> None:
    """Compare updates of optax, without tracing, with those of the function."""
    params, state = traced.params, traced.opt_state
    update = update_by(function, engine="numpy")

    def step(trial: Trial) -> Arrays:
        nonlocal params, state
        gradients = traced.whole({name: jnp.asarray(gradient) for name, gradient in trial.gradients.items()})
        changes, state = traced.tx.update(gradients, state, params)
        params = optax.apply_updates(params, changes)
        return traced.arrays(params, state)

    compare_updates(
        lambda before, trial: update(before, trial._replace(factor=1.0)),  # the rate is inside of the transformation
        step,
        traced.arrays(params, state),
        traced.trained,
        optimizer=f"the optimizer {function.name}",
    )
