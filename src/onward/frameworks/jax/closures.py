"""What an optax object is made of: closures, each with the name of the function that made it, and its variables.

`walk` goes through chains, masks, partitions and injected hyper-parameters to the transformations that compute
something, in the order in which they do.
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
    """One transformation of gradients that is no combination of others."""

    name: str
    """The function of optax that makes it; in full if it is not optax's."""
    arguments: Mapping[str, Any]
    state: Any
    params: Tree
    """The parameters that it sees; those of others are left out."""


Visit = Callable[[Transformation], Any]
"""Gives the state that is to be in place of the transformation's."""


class ScheduledNumber(float):
    """A number of `inject_hyperparams` as it is now, which knows the schedule that it comes from."""

    schedule: Callable[[Any], Any]
    factor: float

    @classmethod
    def now(cls, value: float, schedule: Callable[[Any], Any], factor: float = 1.0) -> ScheduledNumber:
        made = cls(value)
        made.schedule, made.factor = schedule, factor
        return made

    def __mul__(self, other: float) -> ScheduledNumber:
        return ScheduledNumber.now(float(self) * other, self.schedule, self.factor * other)

    __rmul__ = __mul__

    def __neg__(self) -> ScheduledNumber:
        return self * -1


def origin(function: Callable[..., Any]) -> str:
    """The function that made this one by closing over its arguments, by its short name if it is optax's or ours."""
    function = inspect.unwrap(function)
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", repr(function))
    maker, inner, _ = name.partition(".<locals>")
    ours = module.startswith(("optax.", "onward."))
    return maker if ours and inner else f"{module}.{name}"


def free_variables(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function closes over, but for what was never assigned."""
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def walk(update: Callable[..., Any], state: Any, params: Tree, visit: Visit) -> Any:
    """Visit all transformations behind an `update`; return the state with what the visits gave."""
    maker, free = origin(update), free_variables(update)
    match maker:
        case "with_extra_args_support":
            return walk(free["tx"].update, state, params, visit)
        case "chain":
            return tuple(walk(each, s, params, visit) for each, s in zip(free["update_fns"], state, strict=True))
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
    """Return injected hyper-parameters as they are in the state."""
    numbers = {name: float(value) for name, value in state.hyperparams.items()}
    for name, schedule in free["sched_hps"].items():
        if not isinstance(schedule, WrappedSchedule):
            raise UnsupportedError(
                f"`{name}` follows a schedule with a state of its own", hint="use a function of the count of updates"
            )
        function = schedule.schedule_fn
        numbers[name] = ScheduledNumber.now(float(function(state.hyperparams_states[name].count)), function)
    return numbers


def transformations(tx: Any, state: Any, params: Tree) -> list[Transformation]:
    """Return all transformations that an optimizer is made of."""
    found: list[Transformation] = []

    def visit(each: Transformation) -> Any:
        found.append(each)
        return each.state

    walk(tx.update, state, params, visit)
    return found


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by name, which is their place in it."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def path_name(path: tuple[Any, ...]) -> str:
    """The name that the exporter gives to a parameter at this place."""
    return path_of(path) or "params"
