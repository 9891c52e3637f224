"""Optimizers of any class of one's own, by tracing an update on the backend that Keras has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from onward.agreement.tolerance import Arrays
from onward.agreement.updates import Trial, compare_updates, update_by
from onward.build import Names
from onward.errors import Error, UnsupportedError, first_line
from onward.frameworks.keras.optimizer import array_of, twin_of
from onward.model import Model
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of, name_inputs

_ELSEWHERE = {
    **dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor", "gradient_accumulation_steps")),
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
