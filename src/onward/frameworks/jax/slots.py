"""States of optax as slots of a training model, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.frameworks.jax.closures import Transformation, named_leaves, path_name
from onward.vocabulary.optax import FIELDS

Arrays = dict[str, np.ndarray]


def read_slots(found: Transformation) -> Arrays:
    """What a transformation remembers of parameters, as `<parameter>/<slot>`."""
    if found.name == "joint":
        return {name: np.asarray(array) for name, array in found.state.state.items()}
    if found.name == "transformation":
        trees = found.state.slots
    else:
        trees = {slot: getattr(found.state, field) for field, slot in FIELDS.get(found.name, {}).items()}
    params = named_leaves(found.params)
    slots: Arrays = {}
    for slot, tree in trees.items():
        for name, leaf in named_leaves(tree).items():
            axis = _reduced_axis(found, slot, params[name].shape)
            if axis is not None:
                slots[f"{name}/{slot}"] = np.asarray(leaf) if axis < 0 else np.expand_dims(np.asarray(leaf), axis)
    return slots


def fill_state(found: Transformation, slots: Mapping[str, np.ndarray], step: int) -> Any:
    """The state of a transformation, with our slots in it, after so many updates."""
    state = found.state
    if "count" in getattr(state, "_fields", ()):
        state = state._replace(count=jnp.asarray(step, state.count.dtype))
    if found.name == "joint":
        kept = {name: jnp.array(slots.get(name, old), old.dtype) for name, old in state.state.items()}
        return state._replace(state=kept)
    if found.name == "transformation":
        return state._replace(slots={slot: _with(tree, slot, slots) for slot, tree in state.slots.items()})
    for field, slot in FIELDS.get(found.name, {}).items():
        state = state._replace(**{field: _with(getattr(state, field), slot, slots)})
    return state


def _with(tree: Any, slot: str, slots: Mapping[str, np.ndarray]) -> Any:
    def leaf(path: Any, old: jax.Array) -> jax.Array:
        new = slots.get(f"{path_name(path)}/{slot}")
        return old if new is None else jnp.array(np.asarray(new).reshape(old.shape), old.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _reduced_axis(found: Transformation, slot: str, shape: tuple[int, ...]) -> int | None:
    """The axis that a factor of Adafactor lacks; -1 if none, and None where optax keeps a zero that means nothing."""
    if found.name != "scale_by_factored_rms":
        return -1
    arguments = found.arguments
    factored = bool(arguments["factored"]) and len(shape) > 1
    factored = factored and sorted(shape)[-2] >= arguments["min_dim_size_to_factor"]
    if factored == (slot == "variance"):
        return None
    small, large = (int(axis) for axis in np.argsort(shape)[-2:]) if factored else (-1, -1)
    return {"row_var": large, "col_var": small, "variance": -1}[slot]


def counts(state: Any) -> list[int]:
    """How many updates a state says that there were."""
    found = [int(state.count)] if "count" in getattr(state, "_fields", ()) else []
    injected: Mapping[str, Any] = getattr(state, "hyperparams_states", {})
    return found + [int(each.count) for each in injected.values()]
