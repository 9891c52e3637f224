"""Optax objects as closures, each with the name of the function that made it, and its variables.

`walk` visits the transformations behind chains, masks, partitions and injected hyper-parameters, in
the order in which they compute.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from optax.schedules import WrappedSchedule

from onward.errors import UnsupportedError
from onward.frameworks.jax.jaxpr import path_of

Tree = Any


class Transformation(NamedTuple):
    """Transformation of gradients that does not combine others."""

    name: str  # of the function that makes it; the full name if it is not optax's
    arguments: Mapping[str, Any]
    state: Any
    params: Tree  # the parameters that it transforms


Visit = Callable[[Transformation], Any]  # returns the new state of the transformation


class ScheduledNumber(float):
    """Current number of `inject_hyperparams`, with the schedule that it comes from."""

    schedule: Callable[[Any], Any]
    factor: float

    @classmethod
    def now(cls, value: float, schedule: Callable[[Any], Any], factor: float = 1.0) -> ScheduledNumber:
        number = cls(value)
        number.schedule, number.factor = schedule, factor
        return number

    def __mul__(self, other: float) -> ScheduledNumber:
        return ScheduledNumber.now(float(self) * other, self.schedule, self.factor * other)

    __rmul__ = __mul__

    def __neg__(self) -> ScheduledNumber:
        return self * -1


def origin(function: Callable[..., Any]) -> str:
    """Return the function that made a closure, by its short name if it is of optax or Onward."""
    function = inspect.unwrap(function)
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", repr(function))
    maker, inner, _ = name.partition(".<locals>")
    ours = module.startswith(("optax.", "onward."))
    return maker if ours and inner else f"{module}.{name}"


def free_variables(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that a function closes over and that are assigned."""
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return {}
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            variables[name] = cell.cell_contents
    return variables


def walk(update: Callable[..., Any], state: Any, params: Tree, visit: Visit) -> Any:
    """Visit all transformations behind an `update`; return the state that the visits return."""
    maker, free = origin(update), free_variables(update)
    match maker:
        case "with_extra_args_support":
            return walk(free["tx"].update, state, params, visit)
        case "chain":
            return tuple(walk(inner, s, params, visit) for inner, s in zip(free["update_fns"], state, strict=True))
        case "named_chain":
            return type(state)((name, walk(tx.update, state[name], params, visit)) for name, tx in free["transforms"])
        case "masked":
            mask = free["mask"]
            leaves = jax.tree.leaves(mask)
            if callable(mask) or (leaves and all(map(callable, leaves))):
                mask = mask(params)
            return _walk_masked(mask, free["inner"].update, state, params, visit)
        case "partition":
            labels, inner = free["param_labels"], {}
            labels = labels(params) if callable(labels) else labels
            for group, tx in free["transforms"].items():
                mask = jax.tree.map(lambda label, group=group: label == group, labels)
                inner[group] = _walk_masked(mask, tx.update, state.inner_states[group], params, visit)
            return state._replace(inner_states=inner)
        case "inject_hyperparams":
            visit(Transformation(maker, {}, state, optax.MaskedNode()))  # for its counts
            inner_update = free["inner_factory"](**free["other_hps"], **_numbers_of(free, state)).update
            return state._replace(inner_state=walk(inner_update, state.inner_state, params, visit))
    return visit(Transformation(maker, free, state, params))


def _walk_masked(mask: Tree, update: Callable[..., Any], state: Any, params: Tree, visit: Visit) -> Any:
    seen = jax.tree.map(lambda keep, param: param if keep else optax.MaskedNode(), mask, params)
    return state._replace(inner_state=walk(update, state.inner_state, seen, visit))


def _numbers_of(free: Mapping[str, Any], state: Any) -> dict[str, float]:
    """Return the current values of injected hyper-parameters."""
    numbers = {name: float(value) for name, value in state.hyperparams.items()}
    for name, schedule in free["sched_hps"].items():
        if not isinstance(schedule, WrappedSchedule):
            raise UnsupportedError(
                f"`{name}` follows a schedule with its own state", hint="use a function of the count of updates"
            )
        function = schedule.schedule_fn
        numbers[name] = ScheduledNumber.now(float(function(state.hyperparams_states[name].count)), function)
    return numbers


def transformations(tx: Any, state: Any, params: Tree) -> list[Transformation]:
    """Return all transformations of an optimizer."""
    visited: list[Transformation] = []

    def visit(transformation: Transformation) -> Any:
        visited.append(transformation)
        return transformation.state

    walk(tx.update, state, params, visit)
    return visited


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def path_name(path: tuple[Any, ...]) -> str:
    return path_of(path) or "params"
