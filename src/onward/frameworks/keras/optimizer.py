"""Keras optimizers with their state, from and to those of a recipe. Custom classes are traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np

from onward.agreement.steps import Trial, compare_updates, update_by
from onward.agreement.tolerance import Arrays
from onward.build import Names
from onward.errors import Error, UnsupportedError, first_line
from onward.frameworks.keras.schedule import known_schedule, make_schedule
from onward.frameworks.keras.step_graphs import has_replicas
from onward.model import Model
from onward.recipe.optimizers import FunctionOptimizer, configure
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of, name_inputs
from onward.recipe.spec import Spec
from onward.run_state.state import ParameterGroup, RunState
from onward.vocabulary.keras import CLIPS, Refused, read_clip, write_clip
from onward.vocabulary.optimizers import KERAS_ROWS
from onward.vocabulary.rows import KerasRow, row_for


def array_of(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value))


def config_of(optimizer: Any) -> dict[str, Any]:
    """Return the settings of an optimizer, with its schedule itself: one of the user may have no settings."""
    rate = optimizer._learning_rate
    if hasattr(rate, "numpy"):
        return dict(optimizer.get_config())
    with mock.patch.object(optimizer, "_learning_rate", 0.0):
        return {**optimizer.get_config(), "learning_rate": rate}


def new_optimizer(optimizer: Any, variables: Iterable[tuple[Any, Any]], **changed: Any) -> Any:
    """Return a new optimizer with the same settings, except for `changed`.

    `variables` are pairs: a variable of the optimizer, and the one that replaces it. Weight decay
    spares the same variables.
    """
    new = type(optimizer).from_config({**config_of(optimizer), **changed})
    if spared := [theirs for ours, theirs in variables if not optimizer._use_weight_decay(ours)]:
        new.exclude_from_weight_decay(var_list=spared)
    return new


def copy_optimizer(optimizer: Any, variables: Sequence[tuple[Any, Any]]) -> Any:
    """Return an optimizer with the same settings and state for other variables."""
    copy = new_optimizer(optimizer, variables)
    if optimizer.built:
        replacements = {id(ours): theirs for ours, theirs in variables}
        copy.build([replacements[id(variable)] for variable in optimizer._trainable_variables])
        for ours, theirs in zip(optimizer.variables, copy.variables, strict=True):
            theirs.assign(ours.value)
    return copy


def row_of(optimizer: Any) -> KerasRow | None:
    """Return the row of an optimizer; None for a custom class or schedule, with which the update is traced."""
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise Refused(f"optimizer {type(optimizer).__name__} wraps another one")
    is_own = type(optimizer).__module__.startswith("keras.")
    return KERAS_ROWS.get(type(optimizer).__name__) if is_own and known_schedule(optimizer) is not None else None


def read_optimizer(optimizer: Any, lr: float) -> Spec:
    """Return the optimizer of a recipe; raise `Refused` for a class without a counterpart."""
    row = row_of(optimizer)
    if row is None:
        raise Refused(f"optimizer {type(optimizer).__name__} has no counterpart")
    names = (*row.settings.values(), *row.flags, "weight_decay")
    return row.read({name: getattr(optimizer, name) for name in names}, lr)


def groups_of(optimizer: Any, lr: float, variables: Sequence[Any], names: Mapping[int, str]) -> list[ParameterGroup]:
    """Return one group, or two if weight decay spares some variables; `names` are by `id`."""
    if row_of(optimizer) is None:
        update = trace_update(optimizer, variables, names, lr)
        return [ParameterGroup(update, [names[id(v)] for v in variables])]
    decay, spec = float(optimizer.weight_decay or 0.0), read_optimizer(optimizer, lr)
    groups: dict[float, list[str]] = {decay: [], 0.0: []}
    for v in variables:
        groups[decay if optimizer._use_weight_decay(v) else 0.0].append(names[id(v)])
    return [
        ParameterGroup(Spec(spec.name, {**spec.options, "weight_decay": number}), members)
        for number, members in groups.items()
        if members
    ]


def clip_of(optimizer: Any) -> dict[str, Any] | None:
    return read_clip({name: getattr(optimizer, name) for name in CLIPS})


def recipe_of(optimizer: Any) -> dict[str, Any]:
    """Return the gradient accumulation and the average of the weights, as options of a recipe."""
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
    """Return the state that a built optimizer has for a variable, by slot."""
    row, index = row_of(optimizer), optimizer._get_variable_index(variable)
    if row is None:
        return {}
    lists = {ours: getattr(optimizer, theirs, None) for ours, theirs in row.slots.items()}
    slots = {ours: array_of(variables[index]) for ours, variables in lists.items() if variables}
    shared = {ours: array_of(getattr(optimizer, theirs)).astype(np.float64) for ours, theirs in row.shared.items()}
    return {**slots, **shared}


def state_of(optimizer: Any, names: Mapping[int, str], variables: list[Any]) -> dict[str, np.ndarray]:
    """Return the state of an optimizer, by the names of a training model."""
    state: dict[str, np.ndarray] = {}
    for variable in variables if optimizer.built else ():
        name, index = names[id(variable)], optimizer._get_variable_index(variable)
        state |= {f"{name}/{slot}": array for slot, array in slots_of(optimizer, variable).items()}
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


def make_optimizer(run: RunState, variables: Mapping[str, Any]) -> Any | None:
    """Return the Keras optimizer with the state of a run; None if Keras has none that computes the same.

    `variables` are those of the model, by name.
    """
    has_masters = any(f"{name}/master" in run.state for name in run.parameters)  # Keras would not update them
    if has_masters or any(isinstance(group.optimizer, FunctionOptimizer) for group in run.groups):
        return None
    if run.clip is not None and has_replicas():  # Keras clips before it sums the gradients of replicas
        return None
    if run.recipe.keys() - {"seed"}:  # Keras counts and starts accumulation, averages and scales differently
        return None
    rate, clip = make_schedule(run.groups[0].lr, run.schedule), write_clip(run.clip)
    common = [group.spec.without("weight_decay") for group in run.groups]  # Keras has one optimizer for all parameters
    if rate is None or clip is None or any(spec != common[0] for spec in common):
        return None
    configured = [configure(group.spec) for group in run.groups]
    row = row_for(KERAS_ROWS.values(), configured[0])
    if row is None or not all(map(row.fits, configured)):
        return None
    decays = [float(group.spec.options.get("weight_decay", 0.0)) for group in run.groups]
    if len({decay for decay in decays if decay}) > 1:
        return None
    if row.name == "AdamW" and not any(decays):
        row = KERAS_ROWS["Adam"]
    settings = {**row.write(configured[0]), **clip}
    optimizer = getattr(keras.optimizers, row.name)(rate, **settings, weight_decay=max(decays) or None)
    spared = [
        variables[n] for group, decay in zip(run.groups, decays, strict=True) if not decay for n in group.parameters
    ]
    if any(decays) and spared:
        optimizer.exclude_from_weight_decay(var_list=spared)
    optimizer.build([v for v in variables.values() if v.trainable])
    optimizer.iterations.assign(run.step)
    for name in run.parameters:
        index = optimizer._get_variable_index(variables[name])
        for ours, theirs in row.slots.items():
            if (slot_variables := getattr(optimizer, theirs, None)) and f"{name}/{ours}" in run.state:
                slot_variables[index].assign(run.state[f"{name}/{ours}"])
        for ours, theirs in row.shared.items():
            if f"{name}/{ours}" in run.state:
                getattr(optimizer, theirs).assign(run.state[f"{name}/{ours}"])
    return optimizer


# ---- tracing ---------------------------------------------------------------------------------------------------------


# Settings that are options of a recipe, not of the update, with the values that turn them off.
_RECIPE_SETTINGS = {**dict.fromkeys((*CLIPS, "loss_scale_factor", "gradient_accumulation_steps")), "use_ema": False}


class _Slot(NamedTuple):
    """Variable of an optimizer."""

    owner: int | None  # index of the trained variable that it belongs to
    name: str
    variable: Any


def trace_update(optimizer: Any, variables: Sequence[Any], names: Mapping[int, str], lr: float) -> FunctionOptimizer:
    """Return the update of all variables, traced and compared with Keras; `names` are by `id`."""
    class_name = type(optimizer).__name__
    traced = _TracedOptimizer(optimizer, variables, lr)
    parameters = [names[id(variable)] for variable in variables]
    taken = Names([RATE, COUNT, *parameters, *map(gradient_of, parameters)])
    slots = [taken.fresh(s.name if s.owner is None else f"{parameters[s.owner]}/{s.name}") for s in traced.slots]
    try:
        update = _export(traced)
    except Error:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"an update of the optimizer {class_name} cannot be traced: {first_line(error)}",
            hint="compute with `keras.ops`, and not with Python numbers that change",
        ) from error
    update.graph.name = class_name
    name_inputs(update, [RATE, COUNT, *parameters, *map(gradient_of, parameters), *slots])
    trained = list(map(id, optimizer._trainable_variables)) if optimizer.built else []
    has_common_tensors = any(s.owner is None and s.variable.shape for s in traced.slots)
    if trained and trained != list(map(id, variables)) and has_common_tensors:
        raise UnsupportedError(
            f"the optimizer {class_name} has tensors that belong to no variable, and unused variables",
            hint="leave variables on which the loss does not depend out of the model",
        )
    values, initial = {}, {}
    if optimizer.built:
        values = _TracedOptimizer(optimizer, optimizer._trainable_variables, lr).values_of(optimizer)
    for name, slot in zip(slots, traced.slots, strict=True):
        variable = None if slot.owner is None else id(variables[slot.owner])
        owner = trained.index(variable) if variable in trained else None
        initial[name] = values.get((owner, slot.name), array_of(slot.variable))
    function = FunctionOptimizer(class_name, update, lr, initial)
    function.check()

    def state() -> Arrays:
        return dict(zip([*parameters, *slots], traced.state(), strict=True))

    def step(trial: Trial) -> Arrays:
        traced.step([trial.gradients[name] for name in parameters], lr * trial.factor)
        return state()

    compare_updates(update_by(function), step, state(), parameters, optimizer=f"the optimizer {class_name}")
    return function


def _export(traced: _TracedOptimizer) -> Model:
    """Return the graph of an update, on the backend that Keras uses."""
    examples = traced.examples()
    match keras.backend.backend():
        case "jax":
            from onward.frameworks.jax.jaxpr import export

            return export(lambda _, *tensors: traced.update(*tensors), {}, *examples, batch=None)
        case "tensorflow":
            from onward.frameworks.tensorflow.capture import export_function

            return export_function(traced.update_in_place, examples)
        case _:
            from onward.frameworks.torch.traced.symbolic_numbers import exported_update

            return exported_update(traced.update, tuple(map(keras.ops.convert_to_tensor, examples)))


class _TracedOptimizer:
    """Copy of an optimizer, with copies of the variables, that is traced."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], lr: float):
        settings = {name: off for name, off in _RECIPE_SETTINGS.items() if name in config_of(optimizer)}
        self._variables = [
            keras.Variable(array_of(v), dtype=v.dtype, name=f"variable{i}") for i, v in enumerate(variables)
        ]
        pairs = zip(variables, self._variables, strict=True)
        self._optimizer = new_optimizer(optimizer, pairs, learning_rate=lr, **settings)
        if known_schedule(optimizer) is None:
            schedule, new = optimizer._learning_rate, self._optimizer
            new._get_current_learning_rate = lambda: new._learning_rate * schedule(new.iterations)
        self._owners: dict[int, tuple[int, str]] = {}
        self._watch()
        self._optimizer.build(self._variables)
        common = (self._optimizer.iterations, self._optimizer._learning_rate)
        own = [v for v in self._optimizer.variables if all(v is not other for other in common)]
        names = Names()  # Adafactor gives all of its variables the name of the parameter
        self.slots: list[_Slot] = []
        for v in own:
            owner, name = self._owners.get(id(v)) or (None, names.fresh(v.name))
            self.slots.append(_Slot(owner, name, v))

    def _watch(self) -> None:
        """Record which variable of the model each variable of the optimizer belongs to."""
        add, indices = self._optimizer.add_variable_from_reference, {id(v): i for i, v in enumerate(self._variables)}

        def record(reference_variable: Any, name: str | None = None, **settings: Any) -> Any:
            variable = add(reference_variable, name=name, **settings)
            self._owners[id(variable)] = (indices[id(reference_variable)], name or "var")
            return variable

        self._optimizer.add_variable_from_reference = record

    def values_of(self, optimizer: Any) -> dict[tuple[int | None, str], np.ndarray]:
        """Return the values of another optimizer with as many variables, by owner and name."""
        others = [optimizer.iterations, optimizer._learning_rate]
        for name in ("_model_variables_moving_average", "_accumulated_gradients"):
            others += getattr(optimizer, name, None) or ()
        own = [v for v in optimizer.variables if all(v is not other for other in others)]
        return {(slot.owner, slot.name): array_of(v) for slot, v in zip(self.slots, own, strict=True)}

    def examples(self) -> list[np.ndarray]:
        variables = [array_of(v) for v in self._variables]
        scalars = (self._optimizer._learning_rate, self._optimizer.iterations)
        slots = [array_of(slot.variable) for slot in self.slots]
        return [*map(array_of, scalars), *variables, *(np.zeros_like(x) for x in variables), *slots]

    def update(self, lr: Any, t: Any, *tensors: Any) -> list[Any]:
        """Compute a step: from variables, gradients and slots to new variables and slots."""
        count = len(self._variables)
        values = {id(slot.variable): x for slot, x in zip(self.slots, tensors[2 * count :], strict=True)}
        values |= {id(self._optimizer._learning_rate): lr, id(self._optimizer.iterations): t - 1}
        own = [values[id(v)] for v in self._optimizer.variables]
        new, after = self._optimizer.stateless_apply(own, list(tensors[count : 2 * count]), list(tensors[:count]))
        results = {id(v): x for v, x in zip(self._optimizer.variables, after, strict=True)}
        return [*new, *(results[id(slot.variable)] for slot in self.slots)]

    def update_in_place(self, lr: Any, t: Any, *tensors: Any) -> list[Any]:
        """Compute a step on a backend whose optimizers assign their variables."""
        count = len(self._variables)
        slots = [slot.variable for slot in self.slots]
        own = (self._optimizer._learning_rate, self._optimizer.iterations, *self._variables, *slots)
        for variable, new in zip(own, (lr, t - 1, *tensors[:count], *tensors[2 * count :]), strict=True):
            variable.assign(new)
        self._optimizer.apply(list(tensors[count : 2 * count]), self._variables)
        return [keras.ops.convert_to_tensor(variable) for variable in (*self._variables, *slots)]

    def step(self, gradients: Sequence[np.ndarray], lr: float) -> None:
        self._optimizer.learning_rate = lr
        self._optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients], self._variables)

    def state(self) -> list[np.ndarray]:
        return [*map(array_of, self._variables), *(array_of(slot.variable) for slot in self.slots)]
