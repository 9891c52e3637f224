"""An optimizer that a training model has as a function, as a transformation of optax that executes it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from onward.frameworks.jax.exact import Rate, execute_by_jax
from onward.frameworks.jax.source.runtime import joint
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of
from onward.transform.inline import inline


def executed(function: FunctionOptimizer, group: str, rate: Rate) -> optax.GradientTransformation:
    """The function as an optimizer of parameters by name, those of a group; `rate` is for its learning rate."""
    names, places = function.parameters, places_of(function, group)
    results = [value.name or "" for value in function.update.graph.outputs]
    run = execute_by_jax(inline(function.update))

    def begin() -> dict[str, Any]:
        return {places[name]: jnp.asarray(array) for name, array in initial_state(function).items()}

    def rule(params: Any, gradients: Any, state: Any, lr: Any, t: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        given = {RATE: lr, COUNT: t, **{name: state[place] for name, place in places.items()}}
        given |= {name: params[name] for name in names} | {gradient_of(name): gradients[name] for name in names}
        found = run({value.name: given[value.name] for value in function.inputs if value.name})
        after = dict(zip([*names, *places.values()], (found[result] for result in results), strict=True))
        return {name: after[name] for name in names}, {place: after[place] for place in places.values()}

    return joint(names, rule, begin, rate)


def places_of(function: FunctionOptimizer, group: str) -> dict[str, str]:
    """By state of a function, what a training model calls it."""
    names = (value.name or "" for value in function.state)
    return {name: name if function.owner_of(name) else f"{group}/{name}" for name in names}


def initial_state(function: FunctionOptimizer) -> dict[str, np.ndarray]:
    """What the state of a function begins with."""
    made = {}
    for value in function.state:
        assert value.dtype is not None and value.shape is not None
        initial = np.asarray(function.initial.get(value.name or "", 0))
        made[value.name or ""] = np.broadcast_to(initial, tuple(value.shape.numpy())).astype(value.dtype.numpy())
    return made
