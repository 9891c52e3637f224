"""A Keras model in training: groups of arrays and its configuration as facts, and facts as groups of arrays again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.trees import mapping
from onward.checkpoint.tf.h5 import Groups, Variable, variables_of
from onward.checkpoint.tf.tracked import SHARED
from onward.errors import InvalidModelError, UnsupportedError
from onward.recipe.spec import Spec
from onward.run_state.state import OptimizerState, ParameterGroup, SchedulerState
from onward.run_state.tensors import ArrayTensor, Tensor, as_tensor, convert_dtype
from onward.vocabulary.keras import (
    AVERAGE,
    CLIPS,
    SCHEDULES,
    Rate,
    Refused,
    is_named_after,
    read_clip,
    shortest_decimal,
)
from onward.vocabulary.keras_losses import read_named_loss
from onward.vocabulary.optimizers import KERAS_ROWS
from onward.vocabulary.rows import ONLY_WITH, KerasRow

ITERATIONS, RATE, GATHERED = "iterations", "learning_rate", "gradient_accumulator"
_SCALED = "LossScaleOptimizer"
_LARGEST = 1e300
SCALER = ("own_iterations", "own_learning_rate", "step_counter", "dynamic_scale")
"""The variables of a LossScaleOptimizer before those of the one inside."""


class Role(NamedTuple):
    """What a variable of an optimizer is: a slot, or something else, of a parameter or of all."""

    what: str
    parameter: int = -1


class Settings(NamedTuple):
    """An optimizer as a configuration describes it."""

    row: KerasRow
    given: Mapping[str, Any]
    scaler: Mapping[str, Any] | None = None
    """The settings of what scales the loss around it."""
    is_whole: bool = True
    """Whether the numbers are there, or only what its variables tell."""

    @property
    def is_constant(self) -> bool:
        return not isinstance(self.given.get("learning_rate"), Mapping)

    @property
    def accumulate(self) -> int:
        found = self.given.get("gradient_accumulation_steps")
        return found if isinstance(found, int) and found > 1 else 1

    def roles(self, parameters: int) -> list[Role]:
        """Its variables, in their order, for so many parameters."""
        every = range(parameters)
        made = [Role(ITERATIONS), *([Role(RATE)] if self.is_constant else [])]
        made += [Role(AVERAGE, at) for at in every if self.given.get("use_ema")]
        made += [Role(GATHERED, at) for at in every if self.accumulate > 1]
        slots = self.row.kept_slots(self.given)
        made += [Role(slot, at) for at in every for slot in slots if slot not in self.row.apart]
        made += [Role(slot, at) for slot in slots if slot in self.row.apart for at in every]
        return made + [Role(slot) for slot in self.row.shared if parameters]

    def rate(self) -> Rate | None:
        """Return the rate before its schedule, and the schedule; None where that has no counterpart."""
        given = self.given.get("learning_rate")
        if isinstance(given, int | float):
            return Rate(float(given))
        row = SCHEDULES.get(str(given.get("class_name"))) if isinstance(given, Mapping) else None
        if row is None or not isinstance(given, Mapping) or not str(given.get("module", "")).startswith("keras."):
            return None
        try:
            return row.read(given["config"])
        except (Refused, KeyError, TypeError, ValueError, ArithmeticError):
            return None

    def spec(self, lr: float) -> Spec | None:
        """Return the optimizer of a recipe; None where numbers are missing."""
        numbers = [self.given.get(name) for name in self.row.settings.values()]
        overwritten = self.given.get("use_ema") and self.given.get("ema_overwrite_frequency")
        if not self.is_whole or None in numbers or self.given.get("loss_scale_factor") or overwritten:
            return None
        return self.row.read({**dict.fromkeys(self.row.flags, False), **self.given}, lr)


def settings_of(compiled: Mapping[str, Any]) -> Settings | None:
    """The optimizer of a `compile_config`; None for one whose variables are not known."""
    optimizer = compiled.get("optimizer")
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("config"), Mapping):
        return None
    kind, given = str(optimizer.get("class_name")), optimizer["config"]
    if kind == _SCALED:
        inner = settings_of({"optimizer": given.get("inner_optimizer")})
        return inner and inner._replace(scaler=given)
    is_own = str(optimizer.get("module", "")).startswith("keras.") and not optimizer.get("registered_name")
    if not is_own or kind not in KERAS_ROWS:
        return None
    for name in (*KERAS_ROWS[kind].settings.values(), *CLIPS, "weight_decay"):
        if not _is_number(given.get(name)):
            raise InvalidModelError(f"the optimizer of the file has a `{name}` that is no number")
    return Settings(KERAS_ROWS[kind], given)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < _LARGEST)


def settings_by_variables(name: str, arrays: Sequence[Tensor], parameters: int) -> Settings | None:
    """The optimizer of that name that keeps variables of these shapes, if there is one only."""
    row = next((row for row in KERAS_ROWS.values() if is_named_after(name, row.name)), None)
    if row is None or len(arrays) < 2:
        return None
    constant = not arrays[1].shape and arrays[1].dtype.kind == "f" and len(arrays) > 2
    found: dict[tuple[Role, ...], Settings] = {}
    for flags in itertools.product((False, True), repeat=4):
        given = dict(zip(("use_ema", *ONLY_WITH.values()), flags, strict=True))
        made = Settings(row, {**given, "learning_rate": 0.0 if constant else {}}, is_whole=False)
        roles = made.roles(parameters)
        if len(roles) == len(arrays) and not _unfitting(roles, arrays):
            found[tuple(roles)] = made
    return next(iter(found.values())) if len(found) == 1 else None


def _unfitting(roles: Sequence[Role], arrays: Sequence[Tensor]) -> list[int]:
    """Parameters whose variables have several shapes."""
    shapes: dict[int, tuple[int, ...]] = {-1: ()}
    return [
        role.parameter
        for role, array in zip(roles, arrays, strict=True)
        if shapes.setdefault(role.parameter, array.shape) != array.shape
    ]


def parameters_in(settings: Settings, arrays: Sequence[Tensor]) -> int:
    """For how many parameters an optimizer keeps these variables; 0 if it has not begun."""
    few, more = len(settings.roles(1)), len(settings.roles(2)) - len(settings.roles(1))
    count = 1 + (len(arrays) - few) // more if more else 0
    if len(arrays) == len(settings.roles(0)):
        return 0
    roles = settings.roles(count)
    if len(roles) != len(arrays) or _unfitting(roles, arrays):
        raise InvalidModelError(f"the optimizer keeps {len(arrays)} variables, which {settings.row.name} does not have")
    return count


def loss_of(compiled: Mapping[str, Any]) -> Any:
    """The loss in words of a recipe, where these mean the same whatever the outputs are; else None."""
    given = compiled.get("loss")
    config: Mapping[str, Any] = {}
    if isinstance(given, Mapping) and isinstance(given.get("config"), Mapping):
        given, config = given["config"].get("name"), given["config"]
    if not isinstance(given, str) or compiled.get("loss_weights") is not None:
        return None
    return read_named_loss(given, config)


_OUTER, _INNER = "optimizer/vars", "optimizer/inner_optimizer/vars"


class Fitted:
    def __init__(self, groups: Groups, config: Mapping[str, Any] | None):
        self._groups = groups
        self._compiled: Mapping[str, Any] = mapping((config or {}).get("compile_config"))
        self.variables = variables_of(groups, config)
        self._place = _INNER if _INNER in groups else _OUTER
        self._arrays = _in_order(groups.get(self._place, {}).get("arrays", {}))
        trained = [variable for variable in self.variables if variable.is_trained]
        self._settings = settings_of(self._compiled)
        if self._settings is None and not self._compiled and self._arrays:
            name = groups[self._place]["attributes"].get("name", "")
            self._settings = settings_by_variables(name, self._arrays, len(trained))
        count = parameters_in(self._settings, self._arrays) if self._settings and self._arrays else 0
        self._roles = self._settings.roles(count) if self._settings else []
        self._parameters: list[str | int] = list(range(count))
        if self._are_sure(trained):
            self._parameters = [variable.name for variable in trained]

    def _are_sure(self, trained: Sequence[Variable]) -> bool:
        """Whether the optimizer's parameters are the variables that are trained, in their order."""
        if not all(variable.is_sure for variable in self.variables):
            return False
        kept = {role.parameter: array.shape for role, array in zip(self._roles, self._arrays, strict=False)}
        kept.pop(-1, None)
        return not kept or kept == {at: variable.tensor.shape for at, variable in enumerate(trained)}

    def facts(self) -> dict[str, Any]:
        """Fields of a checkpoint."""
        known = self._settings
        found: dict[str, Any] = {
            "tensors": {variable.name: variable.tensor for variable in self.variables},
            "keeps_order": all(variable.is_sure for variable in self.variables),
            "loss": loss_of(self._compiled),
            "arguments": {key: value for key, value in self._compiled.items() if key != "optimizer"},
            "remarks": tuple(self._remarks()),
        }
        if known is None:
            group = ParameterGroup(settings=mapping(self._compiled.get("optimizer")))
            unknown = OptimizerState((), (group,), {}, variant="keras")
            return {**found, "optimizers": (unknown,) if self._arrays else ()}
        batches = self._number(ITERATIONS)
        step = None if batches is None else int(batches) // known.accumulate
        rate = known.rate() if known.is_whole else None
        constant = self._number(RATE)
        lr = shortest_decimal(constant) if constant is not None else rate.lr if rate else 0.0
        counts_batches = known.accumulate > 1 and not known.is_constant
        has_words = (rate is not None or constant is not None) and not counts_batches
        words = (tuple(rate.schedule) if rate else ()) if has_words else None
        with_slots = {role.parameter for role in self._roles}
        slots = {name: dict(self._slots(at)) for at, name in enumerate(self._parameters) if at in with_slots}
        spec = known.spec(lr) if has_words else None
        numbers = {} if constant is None else {"lr": lr}
        group = ParameterGroup(spec, tuple(self._parameters), known.given, numbers=numbers)
        named = [(at, name) for at, name in enumerate(self._parameters) if isinstance(name, str)]
        averages = {name: array for at, name in named for array in self._all(Role(AVERAGE, at))}
        return {
            **found,
            "optimizers": (OptimizerState(known.row.optimizers[:1], (group,), slots, variant="keras"),),
            "schedules": (SchedulerState(mapping(known.given.get("learning_rate")), words, step, every=1),),
            "step": step,
            "progress": {} if step is None else {"step": step},
            "accumulate": known.accumulate if known.is_whole else None,
            "waiting": int(batches or 0) % known.accumulate,
            "clip": read_clip({name: known.given.get(name) for name in CLIPS}) or {} if known.is_whole else None,
            "scaler": self._scaler(),
            "averages": averages,
            "average_decay": self._decay() if step and averages else None,
        }

    def _slots(self, at: int) -> Iterator[tuple[str, Tensor]]:
        for role, array in zip(self._roles, self._arrays, strict=False):
            if role.parameter == at and role.what not in (AVERAGE, GATHERED):
                yield role.what, array
            elif role.what == SHARED:
                yield SHARED, convert_dtype(array, np.dtype(np.float64))

    def _all(self, wanted: Role) -> list[Tensor]:
        return [array for role, array in zip(self._roles, self._arrays, strict=False) if role == wanted]

    def _number(self, what: str) -> float | None:
        found = self._all(Role(what))
        return found[0].array().item() if found and not found[0].shape else None

    def _scaler(self) -> dict[str, Any]:
        """In the words of PyTorch's."""
        outer = dict(zip(SCALER, _in_order(self._groups.get(_OUTER, {}).get("arrays", {})), strict=False))
        if self._settings is None or self._settings.scaler is None or "dynamic_scale" not in outer:
            return {}
        return {
            "scale": outer["dynamic_scale"].array().item(),
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": self._settings.scaler.get("dynamic_growth_steps"),
            "_growth_tracker": outer["step_counter"].array().item(),
        }

    def _decay(self) -> float | None:
        decay = self._settings.given.get("ema_momentum") if self._settings else None
        return float(decay) if isinstance(decay, int | float) else None

    def _remarks(self) -> Iterator[str]:
        known = self._settings
        if known is None:
            if self._arrays:
                yield "what its optimizer keeps has no names, and no order that is known"
            return
        if known.given.get("weight_decay"):
            yield "whether some variables are excluded from weight decay is not in files of Keras"
        if known.given.get("use_ema"):
            yield "Keras's `fit` overwrites weights by their averages when it ends"
        if known.given.get("use_ema") and known.given.get("ema_overwrite_frequency"):
            yield "averages become the weights from time to time, which a training model does not do"

    # ---- back --------------------------------------------------------------------------------------------------------

    def renew(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        """The groups with all that a checkpoint knows in its place."""
        made = {
            path: {"attributes": group["attributes"], "arrays": dict(group["arrays"])}
            for path, group in self._groups.items()
        }
        for variable in self.variables:
            new = in_place_of(variable.tensor, checkpoint.tensors.get(variable.name), variable.name)
            made[variable.group]["arrays"][variable.key] = new
        if self._settings is None or not checkpoint.optimizers or not self._arrays:
            return made
        renewed = self._optimizer(checkpoint, self._settings)
        made[self._place]["arrays"] = dict(_number_tensors(renewed))
        if self._place == _INNER:
            outer = _in_order(made[_OUTER]["arrays"])[: len(SCALER)]
            if "scale" in checkpoint.scaler:
                outer[2] = _like(outer[2], checkpoint.scaler["_growth_tracker"])
                outer[3] = _like(outer[3], checkpoint.scaler["scale"])
            made[_OUTER]["arrays"] = dict(_number_tensors([*outer, *renewed]))
        return made

    def _optimizer(self, checkpoint: Checkpoint, settings: Settings) -> list[Tensor]:
        kept, step = checkpoint.optimizers[0], checkpoint.step
        roles, arrays = self._roles, list(self._arrays)
        if kept.slots and not any(role.parameter >= 0 for role in roles):  # it had not begun
            roles = settings.roles(len(self._parameters))
        known = [name for group in kept.groups for name in group.parameters]
        names = known if len(known) == len(self._parameters) else self._parameters  # somebody may have found them
        moved = step is not None and step != (self._number(ITERATIONS) or 0) // settings.accumulate
        made = []
        for at, role in enumerate(roles):
            name = names[role.parameter] if role.parameter >= 0 else next(iter(kept.slots), "")
            slot = kept.slots.get(name, {}).get(role.what)
            if at >= len(arrays):
                made.append(_initial_variable(role, slot, checkpoint.tensors.get(str(name)), name))
            elif role.what == AVERAGE and (name in checkpoint.averages or moved):
                made.append(in_place_of(arrays[at], checkpoint.averages.get(str(name)), f"the average of {name}"))
            elif role.what in settings.row.slots:
                made.append(in_place_of(arrays[at], slot, f"{name}/{role.what}"))
            else:
                made.append(self._single(role, arrays[at], slot, checkpoint, settings.accumulate if moved else 0))
        return made

    @staticmethod
    def _single(role: Role, old: Tensor, slot: Any, checkpoint: Checkpoint, moved: int) -> Tensor:
        """What is no slot. `moved`: batches of an update, if there were updates since."""
        rate = checkpoint.optimizers[0].groups[0].rate
        if role.what == ITERATIONS and moved:
            return _like(old, (checkpoint.step or 0) * moved)
        if role.what == RATE and rate is not None:
            return _like(old, rate)
        if role.what == GATHERED and moved:
            return ArrayTensor(np.zeros(old.shape, old.dtype))
        return convert_dtype(as_tensor(slot), old.dtype) if role.what == SHARED and slot is not None else old


def _initial_variable(role: Role, slot: Any, weight: Tensor | None, name: Any) -> Tensor:
    """A variable that the optimizer did not have before its first step."""
    if role.what == SHARED and slot is not None:
        return convert_dtype(as_tensor(slot), np.dtype(np.float32))
    if weight is None:
        raise UnsupportedError(f"there is no `{name}`", hint="write a checkpoint of the same model")
    return in_place_of(weight, slot, f"{name}/{role.what}")


def in_place_of(old: Tensor, new: Any, name: str) -> Tensor:
    """A tensor that takes the place of another."""
    if not isinstance(new, Tensor):
        raise UnsupportedError(
            f"there is no `{name}`, which the original has", hint="write a checkpoint of the same model and optimizer"
        )
    if (new.dtype, new.shape) != (old.dtype, old.shape):
        found, expected = f"{new.dtype}{list(new.shape)}", f"{old.dtype}{list(old.shape)}"
        raise UnsupportedError(f"`{name}` is {found}, where the original has {expected}")
    return new


def _like(old: Tensor, number: float) -> Tensor:
    return ArrayTensor(np.asarray(number, old.dtype))


def _in_order(arrays: Mapping[str, Tensor]) -> list[Tensor]:
    return [arrays[key] for key in sorted(filter(str.isdecimal, arrays), key=int)]


def _number_tensors(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((str(at), tensor) for at, tensor in enumerate(tensors))
