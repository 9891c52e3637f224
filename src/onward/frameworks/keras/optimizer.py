"""Keras's optimizers: which of ours each is, what its settings are called, and where its variables are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from onward.recipe.spec import Spec
from onward.vocabulary.keras import CLIPS, KINDS, Kind, Refused, clip_in, settings_in


def kind_of(optimizer: Any) -> Kind | None:
    """What it is in our words; None for a class that has none, whose update is traced."""
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise Refused(f"optimizer {type(optimizer).__name__} is one around another")
    is_own = type(optimizer).__module__.startswith("keras.")
    return KINDS.get(type(optimizer).__name__) if is_own else None


def settings_of(optimizer: Any) -> dict[str, Any]:
    """All numbers and choices but the learning rate and the decay of weights."""
    kind = kind_of(optimizer)
    assert kind is not None
    return settings_in(kind, attributes_of(optimizer, (*kind.numbers.values(), *kind.flags)))


def spec_of(optimizer: Any, lr: float) -> Spec:
    """Return an optimizer in the words of a recipe; `Refused` says that its class has no counterpart."""
    kind = kind_of(optimizer)
    if kind is None:
        raise Refused(f"optimizer {type(optimizer).__name__} has no counterpart")
    decay = float(optimizer.weight_decay or 0.0)
    name = "adam" if kind.name == "adamw" and not decay else kind.name
    return Spec(name, {"lr": lr, **settings_of(optimizer), "weight_decay": decay})


def attributes_of(optimizer: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(optimizer, name) for name in names}


def slots_of(optimizer: Any, variable: Any) -> dict[str, np.ndarray]:
    """What an optimizer keeps beside a variable, by our names."""
    kind = kind_of(optimizer)
    if not optimizer.built or kind is None:
        return {}
    index = optimizer._get_variable_index(variable)
    lists = {ours: getattr(optimizer, theirs, None) for ours, theirs in kind.slots.items()}
    found = {ours: array_of(variables[index]) for ours, variables in lists.items() if variables}
    if hasattr(optimizer, "_u_product"):
        found["mu_product"] = array_of(optimizer._u_product).astype(np.float64)
    return found


def array_of(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value))


def twin_of(optimizer: Any, variables: Iterable[tuple[Any, Any]], **changed: Any) -> Any:
    """An optimizer with the same settings, but for those that are changed, and no state yet.

    `variables` are pairs: those of the optimizer, and those that the new one is for; what weight decay spares is the
    same.
    """
    made = type(optimizer).from_config({**optimizer.get_config(), **changed})
    if spared := [theirs for ours, theirs in variables if not optimizer._use_weight_decay(ours)]:
        made.exclude_from_weight_decay(var_list=spared)
    return made


def clip_of(optimizer: Any) -> dict[str, Any] | None:
    return clip_in(attributes_of(optimizer, CLIPS))


def recipe_of(optimizer: Any) -> dict[str, Any]:
    """Accumulation of gradients, and the average of the weights."""
    recipe: dict[str, Any] = {}
    if optimizer.loss_scale_factor is not None:
        raise Refused("optimizer has a `loss_scale_factor`")
    if optimizer.use_ema:
        if optimizer.ema_overwrite_frequency:
            raise Refused("optimizer has `ema_overwrite_frequency`: averages that become the weights")
        if not int(optimizer.iterations):
            raise Refused("optimizer has `use_ema` and no step was made: Keras's average begins after the first")
        recipe["ema"] = float(optimizer.ema_momentum)
    if optimizer.gradient_accumulation_steps:
        if not hasattr(optimizer._learning_rate, "numpy"):
            raise Refused("optimizer accumulates gradients under a schedule that counts batches, not updates")
        recipe["accumulate"] = int(optimizer.gradient_accumulation_steps)
    return recipe


def state_of(optimizer: Any, names: Mapping[int, str], variables: list[Any]) -> dict[str, np.ndarray]:
    """All that an optimizer has gathered, by the names of a training model."""
    state: dict[str, np.ndarray] = {}
    for variable in variables:
        name = names[id(variable)]
        state |= {f"{name}/{slot}": array for slot, array in slots_of(optimizer, variable).items()}
        if not optimizer.built:
            continue
        index = optimizer._get_variable_index(variable)
        if optimizer.use_ema:
            state[f"ema/{name}"] = array_of(optimizer._model_variables_moving_average[index])
        if optimizer.gradient_accumulation_steps:
            state[f"accum/{name}"] = array_of(optimizer._accumulated_gradients[index])
    if optimizer.use_ema:
        state["ema/n_averaged"] = np.asarray(int(optimizer.iterations), np.int64)
    if optimizer.gradient_accumulation_steps:
        done = int(optimizer._iterations) % optimizer.gradient_accumulation_steps
        state["micro_step"] = np.asarray(done, np.int64)
    return state
