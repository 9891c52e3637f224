"""Optimizers of Keras with their state, and those of a recipe. A class that is not of Keras is traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from onward.agreement.steps import Trial, compare_updates, update_by
from onward.agreement.tolerance import Arrays
from onward.build import Names
from onward.errors import Error, UnsupportedError, first_line
from onward.frameworks.keras.schedule import make_schedule
from onward.frameworks.keras.step_graphs import has_replicas
from onward.model import Model
from onward.recipe.optimizers import FunctionOptimizer, configure
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of, name_inputs
from onward.recipe.spec import Spec
from onward.run_state.state import RunState
from onward.vocabulary.keras import CLIPS, Refused, read_clip, write_clip
from onward.vocabulary.optimizers import KERAS_ROWS
from onward.vocabulary.rows import KerasRow, row_for


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


def copy_optimizer(optimizer: Any, variables: Sequence[tuple[Any, Any]]) -> Any:
    """Return an optimizer with the same settings and state for other variables; `variables` as for `twin_of`."""
    made = twin_of(optimizer, variables)
    if optimizer.built:
        twins = {id(ours): theirs for ours, theirs in variables}
        made.build([twins[id(variable)] for variable in optimizer._trainable_variables])
        for ours, theirs in zip(optimizer.variables, made.variables, strict=True):
            theirs.assign(ours.value)
    return made


# ---- reading ---------------------------------------------------------------------------------------------------------


def row_of(optimizer: Any) -> KerasRow | None:
    """Return the row of an optimizer; None for a class that has none, whose update is traced."""
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        raise Refused(f"optimizer {type(optimizer).__name__} is one around another")
    is_own = type(optimizer).__module__.startswith("keras.")
    return KERAS_ROWS.get(type(optimizer).__name__) if is_own else None


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
    row = row_for(KERAS_ROWS.values(), configured[0])
    if row is None or not all(map(row.fits, configured)):
        return None
    decays = [float(group.spec.options.get("weight_decay", 0.0)) for group in run.groups]
    if len({decay for decay in decays if decay}) > 1:
        return None
    if row.name == "AdamW" and not any(decays):
        row = KERAS_ROWS["Adam"]
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


# ---- tracing ---------------------------------------------------------------------------------------------------------


_ELSEWHERE = {
    **dict.fromkeys((*CLIPS, "loss_scale_factor", "gradient_accumulation_steps")),
    "use_ema": False,
}
"""Settings that are words of a recipe, and no part of the update."""


class _Slot(NamedTuple):
    """A variable of an optimizer."""

    place: tuple[int | None, str]
    """Whose it is, by the place among the variables that are trained, and its name."""
    variable: Any

    def called(self, names: Sequence[str]) -> str:
        owner, name = self.place
        return name if owner is None else f"{names[owner]}/{name}"


def trace_update(optimizer: Any, variables: Sequence[Any], names: Mapping[int, str], lr: float) -> FunctionOptimizer:
    """The update of these variables at once, which is compared with the optimizer's own; `names` are by `id`."""
    kind = type(optimizer).__name__
    twin = _Twin(optimizer, variables, lr)
    called = [names[id(variable)] for variable in variables]
    taken = Names([RATE, COUNT, *called, *map(gradient_of, called)])
    slots = [taken.fresh(slot.called(called)) for slot in twin.slots]
    inputs = [RATE, COUNT, *called, *map(gradient_of, called), *slots]
    try:
        update = _export(twin)
    except Error:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"an update of the optimizer {kind} cannot be traced: {first_line(error)}",
            hint="compute with `keras.ops`, and let nothing depend on numbers of Python that change",
        ) from error
    update.graph.name = kind
    name_inputs(update, inputs)
    _check_owners(optimizer, variables, twin)
    begun = _Twin(optimizer, optimizer._trainable_variables, lr).values_of(optimizer) if optimizer.built else {}
    places = {id(variable): i for i, variable in enumerate(optimizer._trainable_variables)} if optimizer.built else {}
    initial = {}
    for name, slot in zip(slots, twin.slots, strict=True):
        owner, own = slot.place
        place = None if owner is None else places.get(id(variables[owner]))
        initial[name] = begun.get((place, own), array_of(slot.variable))
    made = FunctionOptimizer(kind, update, lr, initial)
    made.check()
    _try_out(made, twin, called, slots)
    return made


def _check_owners(optimizer: Any, variables: Sequence[Any], twin: _Twin) -> None:
    """Refuse tensors of which nobody knows to which variable they belong, if there are others than these."""
    others = optimizer.built and list(map(id, variables)) != list(map(id, optimizer._trainable_variables))
    unknown = [slot for slot in twin.slots if slot.place[0] is None and slot.variable.shape]
    if others and unknown:
        raise UnsupportedError(
            f"the optimizer {type(optimizer).__name__} has tensors that are of no variable, and variables without use",
            hint="leave variables that the loss does not depend on out of the model",
        )


def _export(twin: _Twin) -> Model:
    """The graph of an update, on the backend that Keras has."""
    examples = twin.examples()
    match keras.backend.backend():
        case "jax":
            from onward.frameworks.jax.jaxpr import export

            return export(lambda _, *tensors: twin.update(*tensors), {}, *examples, batch=None)
        case "tensorflow":
            from onward.frameworks.tensorflow.capture import export_function

            return export_function(twin.update_in_place, examples)
        case _:
            from onward.frameworks.torch.traced.symbolic_numbers import exported_update

            return exported_update(twin.update, tuple(map(keras.ops.convert_to_tensor, examples)))


class _Twin:
    """An optimizer of the same class and settings, of variables of its own."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], lr: float):
        elsewhere = {name: off for name, off in _ELSEWHERE.items() if name in optimizer.get_config()}
        self._variables = [
            keras.Variable(array_of(v), dtype=v.dtype, name=f"variable{i}") for i, v in enumerate(variables)
        ]
        pairs = zip(variables, self._variables, strict=True)
        self._optimizer = twin_of(optimizer, pairs, learning_rate=lr, **elsewhere)
        self._owners: dict[int, tuple[int, str]] = {}
        self._watch()
        self._optimizer.build(self._variables)
        common = (self._optimizer.iterations, self._optimizer._learning_rate)
        own = [v for v in self._optimizer.variables if all(v is not other for other in common)]
        names = Names()  # Adafactor calls all that belongs to a variable as that
        self.slots = [_Slot(self._owners.get(id(v)) or (None, names.fresh(v.name)), v) for v in own]

    def _watch(self) -> None:
        """Note to which variables those of the optimizer belong."""
        add, places = self._optimizer.add_variable_from_reference, {id(v): i for i, v in enumerate(self._variables)}

        def noted(reference_variable: Any, name: str | None = None, **settings: Any) -> Any:
            made = add(reference_variable, name=name, **settings)
            self._owners[id(made)] = (places[id(reference_variable)], name or "var")
            return made

        self._optimizer.add_variable_from_reference = noted

    def values_of(self, optimizer: Any) -> dict[tuple[int | None, str], np.ndarray]:
        """What another optimizer, which is built of as many variables, has in the same places."""
        others = (*(getattr(optimizer, "_model_variables_moving_average", None) or ()),)
        others += (
            *(getattr(optimizer, "_accumulated_gradients", None) or ()),
            optimizer.iterations,
            optimizer._learning_rate,
        )
        own = [v for v in optimizer.variables if all(v is not other for other in others)]
        return {slot.place: array_of(v) for slot, v in zip(self.slots, own, strict=True)}

    def examples(self) -> list[np.ndarray]:
        variables = [array_of(v) for v in self._variables]
        scalars = (self._optimizer._learning_rate, self._optimizer.iterations)
        slots = [array_of(slot.variable) for slot in self.slots]
        return [*map(array_of, scalars), *variables, *(np.zeros_like(x) for x in variables), *slots]

    def update(self, lr: Any, t: Any, *tensors: Any) -> list[Any]:
        """A step as a function: from variables, gradients and slots to new variables and slots."""
        count = len(self._variables)
        given = {id(slot.variable): x for slot, x in zip(self.slots, tensors[2 * count :], strict=True)}
        given |= {id(self._optimizer._learning_rate): lr, id(self._optimizer.iterations): t - 1}
        own = [given[id(v)] for v in self._optimizer.variables]
        new, after = self._optimizer.stateless_apply(own, list(tensors[count : 2 * count]), list(tensors[:count]))
        found = {id(v): x for v, x in zip(self._optimizer.variables, after, strict=True)}
        return [*new, *(found[id(slot.variable)] for slot in self.slots)]

    def update_in_place(self, lr: Any, t: Any, *tensors: Any) -> list[Any]:
        """The same, for a backend on which an optimizer cannot do without its variables."""
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


def _try_out(made: FunctionOptimizer, twin: _Twin, names: Sequence[str], slots: Sequence[str]) -> None:
    def state() -> dict[str, np.ndarray]:
        return dict(zip([*names, *slots], twin.state(), strict=True))

    def step(trial: Trial) -> Arrays:
        twin.step([trial.gradients[name] for name in names], made.lr * trial.factor)
        return state()

    compare_updates(update_by(made), step, state(), names, optimizer=f"the optimizer {made.name}")
