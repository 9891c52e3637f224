"""Optimizers of Keras with their state, and those of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from onward.frameworks.keras.replicas import has_replicas
from onward.frameworks.keras.schedule import make_schedule
from onward.recipe.optimizers import FunctionOptimizer, configure
from onward.recipe.spec import Spec
from onward.run_state.state import RunState
from onward.vocabulary.keras import CLIPS, OPTIMIZERS, KerasRow, Refused, read_clip, write_clip
from onward.vocabulary.rows import row_for


def array_of(variable: Any) -> np.ndarray:
    """Return the value of a variable."""
    return np.array(keras.ops.convert_to_numpy(variable.value))


def twin_of(optimizer: Any, variables: Iterable[tuple[Any, Any]], **changed: Any) -> Any:
    """Return an optimizer with the same settings, but for those that are changed, and no state yet.

    `variables` are pairs: those of the optimizer, and those that the new one is for; what weight decay spares is the
    same.
    """
    made = type(optimizer).from_config({**optimizer.get_config(), **changed})
    if spared := [theirs for ours, theirs in variables if not optimizer._use_weight_decay(ours)]:
        made.exclude_from_weight_decay(var_list=spared)
    return made


# ---- reading ---------------------------------------------------------------------------------------------------------


def row_of(optimizer: Any) -> KerasRow | None:
    """Return the row of an optimizer; None for a class that has none, whose update is traced."""
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise Refused(f"optimizer {type(optimizer).__name__} is one around another")
    is_own = type(optimizer).__module__.startswith("keras.")
    return OPTIMIZERS.get(type(optimizer).__name__) if is_own else None


def read_optimizer(optimizer: Any, lr: float) -> Spec:
    """Return an optimizer as a recipe has it; raise `Refused` for a class that no recipe has."""
    row = row_of(optimizer)
    if row is None:
        raise Refused(f"optimizer {type(optimizer).__name__} has no counterpart")
    names = (*row.settings.values(), *row.flags, "weight_decay")
    return row.read({name: getattr(optimizer, name) for name in names}, lr)


def clip_of(optimizer: Any) -> dict[str, Any] | None:
    """Return the limit of gradients of an optimizer."""
    return read_clip({name: getattr(optimizer, name) for name in CLIPS})


def recipe_of(optimizer: Any) -> dict[str, Any]:
    """Return the accumulation of gradients, and the average of the weights."""
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


def slots_of(optimizer: Any, variable: Any) -> dict[str, np.ndarray]:
    """Return what an optimizer keeps of a variable, by slot."""
    row = row_of(optimizer)
    if not optimizer.built or row is None:
        return {}
    index = optimizer._get_variable_index(variable)
    lists = {ours: getattr(optimizer, theirs, None) for ours, theirs in row.slots.items()}
    found = {ours: array_of(variables[index]) for ours, variables in lists.items() if variables}
    shared = {ours: array_of(getattr(optimizer, theirs)).astype(np.float64) for ours, theirs in row.shared.items()}
    return {**found, **shared}


def state_of(optimizer: Any, names: Mapping[int, str], variables: list[Any]) -> dict[str, np.ndarray]:
    """Return the whole state of an optimizer, by the names of a training model."""
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


# ---- writing ---------------------------------------------------------------------------------------------------------


def make_optimizer(run: RunState, held: Mapping[str, Any]) -> Any | None:
    """Return Keras's optimizer with the state of a run; None if there is none that computes the same.

    `held` are the variables of the model by their names in the run.
    """
    has_masters = any(f"{name}/master" in run.state for name in run.parameters)  # which Keras would leave behind
    if has_masters or any(isinstance(group.optimizer, FunctionOptimizer) for group in run.groups):
        return None
    if run.clip is not None and has_replicas():  # Keras's own clip before gradients of replicas are summed up
        return None
    rate, clip = make_schedule(run.groups[0].lr, run.schedule), write_clip(run.clip)
    common = [group.spec.without("weight_decay") for group in run.groups]  # in Keras, of all parameters
    other = run.recipe.keys() - {"seed"}  # accumulation, averages, scales: Keras counts and begins in other ways
    if rate is None or clip is None or other or any(spec != common[0] for spec in common):
        return None
    configured = [configure(group.spec) for group in run.groups]
    row = row_for(OPTIMIZERS.values(), configured[0])
    if row is None or not all(map(row.fits, configured)):
        return None
    decays = [float(group.spec.options.get("weight_decay", 0.0)) for group in run.groups]
    if len({decay for decay in decays if decay}) > 1:
        return None
    if row.name == "AdamW" and not any(decays):
        row = OPTIMIZERS["Adam"]
    settings = {**row.write(configured[0]), **clip}
    made = getattr(keras.optimizers, row.name)(rate, **settings, weight_decay=max(decays) or None)
    spared = [held[n] for group, decay in zip(run.groups, decays, strict=True) if not decay for n in group.parameters]
    if any(decays) and spared:
        made.exclude_from_weight_decay(var_list=spared)
    made.build([v for v in held.values() if v.trainable])
    made.iterations.assign(run.step)
    for name in run.parameters:
        index = made._get_variable_index(held[name])
        for ours, theirs in row.slots.items():
            if (variables := getattr(made, theirs, None)) and f"{name}/{ours}" in run.state:
                variables[index].assign(run.state[f"{name}/{ours}"])
        for ours, theirs in row.shared.items():
            if f"{name}/{ours}" in run.state:
                getattr(made, theirs).assign(run.state[f"{name}/{ours}"])
    return made
