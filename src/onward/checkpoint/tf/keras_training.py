"""Keras models in training, in groups of arrays and a configuration, both ways."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.contents import mapping
from onward.checkpoint.tf.h5 import Groups, H5Variable, variables_of
from onward.checkpoint.tf.object_graph import SHARED
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
"""Variables of a LossScaleOptimizer, before those of its inner optimizer."""


class Role(NamedTuple):
    """Role of an optimizer's variable: a slot or another name, and its parameter or -1 for all."""

    name: str
    parameter: int = -1


class Settings(NamedTuple):
    """Optimizer of a configuration."""

    row: KerasRow
    config: Mapping[str, Any]
    scaler: Mapping[str, Any] | None = None
    """Settings of the LossScaleOptimizer around it."""
    is_whole: bool = True
    """True if hyper-parameters are known, and not only what the variables tell."""

    @property
    def is_constant(self) -> bool:
        return not isinstance(self.config.get("learning_rate"), Mapping)

    @property
    def accumulate(self) -> int:
        steps = self.config.get("gradient_accumulation_steps")
        return steps if isinstance(steps, int) and steps > 1 else 1

    def roles(self, parameters: int) -> list[Role]:
        """Return the roles of its variables, in order, for a number of parameters."""
        indices = range(parameters)
        roles = [Role(ITERATIONS), *([Role(RATE)] if self.is_constant else [])]
        roles += [Role(AVERAGE, at) for at in indices if self.config.get("use_ema")]
        roles += [Role(GATHERED, at) for at in indices if self.accumulate > 1]
        slots = self.row.slots_for(self.config)
        roles += [Role(slot, at) for at in indices for slot in slots if slot not in self.row.apart]
        roles += [Role(slot, at) for slot in slots if slot in self.row.apart for at in indices]
        return roles + [Role(slot) for slot in self.row.shared if parameters]

    def rate(self) -> Rate | None:
        """Return the base rate and the schedule; None if no recipe has it."""
        rate = self.config.get("learning_rate")
        if isinstance(rate, int | float):
            return Rate(float(rate))
        row = SCHEDULES.get(str(rate.get("class_name"))) if isinstance(rate, Mapping) else None
        if row is None or not isinstance(rate, Mapping) or not str(rate.get("module", "")).startswith("keras."):
            return None
        try:
            return row.read(rate["config"])
        except (Refused, KeyError, TypeError, ValueError, ArithmeticError):
            return None

    def spec(self, lr: float) -> Spec | None:
        """Return the optimizer of a recipe; None if numbers are missing."""
        numbers = [self.config.get(name) for name in self.row.settings.values()]
        overwritten = self.config.get("use_ema") and self.config.get("ema_overwrite_frequency")
        if not self.is_whole or None in numbers or self.config.get("loss_scale_factor") or overwritten:
            return None
        return self.row.read({**dict.fromkeys(self.row.flags, False), **self.config}, lr)


def settings_of(compiled: Mapping[str, Any]) -> Settings | None:
    """Return the optimizer of a `compile_config`; None if its variables are unknown."""
    optimizer = compiled.get("optimizer")
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("config"), Mapping):
        return None
    class_name, config = str(optimizer.get("class_name")), optimizer["config"]
    if class_name == _SCALED:
        inner = settings_of({"optimizer": config.get("inner_optimizer")})
        return inner and inner._replace(scaler=config)
    is_own = str(optimizer.get("module", "")).startswith("keras.") and not optimizer.get("registered_name")
    if not is_own or class_name not in KERAS_ROWS:
        return None
    for name in (*KERAS_ROWS[class_name].settings.values(), *CLIPS, "weight_decay"):
        value = config.get(name)
        if value is not None and not (isinstance(value, int | float) and abs(value) < _LARGEST):
            raise InvalidModelError(f"`{name}` of the optimizer in the file is not a number")
    return Settings(KERAS_ROWS[class_name], config)


def settings_by_variables(name: str, arrays: Sequence[Tensor], parameters: int) -> Settings | None:
    """Return the optimizer with a name whose variables have these shapes, if only one has."""
    row = next((row for row in KERAS_ROWS.values() if is_named_after(name, row.name)), None)
    if row is None or len(arrays) < 2:
        return None
    constant = not arrays[1].shape and arrays[1].dtype.kind == "f" and len(arrays) > 2
    matches: dict[tuple[Role, ...], Settings] = {}
    for flags in itertools.product((False, True), repeat=4):
        config = dict(zip(("use_ema", *ONLY_WITH.values()), flags, strict=True))
        settings = Settings(row, {**config, "learning_rate": 0.0 if constant else {}}, is_whole=False)
        roles = settings.roles(parameters)
        if len(roles) == len(arrays) and not _inconsistent(roles, arrays):
            matches[tuple(roles)] = settings
    return next(iter(matches.values())) if len(matches) == 1 else None


def _inconsistent(roles: Sequence[Role], arrays: Sequence[Tensor]) -> list[int]:
    """Return parameters whose variables differ in shape."""
    shapes: dict[int, tuple[int, ...]] = {-1: ()}
    return [
        role.parameter
        for role, array in zip(roles, arrays, strict=True)
        if shapes.setdefault(role.parameter, array.shape) != array.shape
    ]


def parameters_in(settings: Settings, arrays: Sequence[Tensor]) -> int:
    """Return the number of parameters with these variables; 0 before the first step."""
    count_for_one, count_per_parameter = len(settings.roles(1)), len(settings.roles(2)) - len(settings.roles(1))
    count = 1 + (len(arrays) - count_for_one) // count_per_parameter if count_per_parameter else 0
    if len(arrays) == len(settings.roles(0)):
        return 0
    roles = settings.roles(count)
    if len(roles) != len(arrays) or _inconsistent(roles, arrays):
        raise InvalidModelError(f"the optimizer has {len(arrays)} variables, which {settings.row.name} does not have")
    return count


def loss_of(compiled: Mapping[str, Any]) -> Any:
    """Return the loss of a recipe; None if it depends on the outputs."""
    loss = compiled.get("loss")
    config: Mapping[str, Any] = {}
    if isinstance(loss, Mapping) and isinstance(loss.get("config"), Mapping):
        loss, config = loss["config"].get("name"), loss["config"]
    if not isinstance(loss, str) or compiled.get("loss_weights") is not None:
        return None
    return read_named_loss(loss, config)


_OUTER, _INNER = "optimizer/vars", "optimizer/inner_optimizer/vars"


class KerasTraining:
    """Training of a Keras model: variables, and the roles of its optimizer's variables."""

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

    def _are_sure(self, trained: Sequence[H5Variable]) -> bool:
        """True if the trainable variables are the optimizer's parameters, in order."""
        if not all(variable.is_sure for variable in self.variables):
            return False
        shapes = {role.parameter: array.shape for role, array in zip(self._roles, self._arrays, strict=False)}
        shapes.pop(-1, None)
        return not shapes or shapes == {at: variable.tensor.shape for at, variable in enumerate(trained)}

    def facts(self) -> dict[str, Any]:
        """Return fields of a checkpoint."""
        settings = self._settings
        fields: dict[str, Any] = {
            "tensors": {variable.name: variable.tensor for variable in self.variables},
            "keeps_order": all(variable.is_sure for variable in self.variables),
            "loss": loss_of(self._compiled),
            "arguments": {key: value for key, value in self._compiled.items() if key != "optimizer"},
            "remarks": tuple(self._remarks()),
        }
        if settings is None:
            group = ParameterGroup(settings=mapping(self._compiled.get("optimizer")))
            optimizers = (OptimizerState((), (group,), {}, variant="keras"),) if self._arrays else ()
            return {**fields, "optimizers": optimizers}
        batches = self._number(ITERATIONS)
        step = None if batches is None else int(batches) // settings.accumulate
        rate = settings.rate() if settings.is_whole else None
        constant = self._number(RATE)
        lr = shortest_decimal(constant) if constant is not None else rate.lr if rate else 0.0
        counts_batches = settings.accumulate > 1 and not settings.is_constant
        has_words = (rate is not None or constant is not None) and not counts_batches
        words = (tuple(rate.schedule) if rate else ()) if has_words else None
        with_slots = {role.parameter for role in self._roles}
        slots = {name: dict(self._slots(at)) for at, name in enumerate(self._parameters) if at in with_slots}
        spec = settings.spec(lr) if has_words else None
        numbers = {} if constant is None else {"lr": lr}
        group = ParameterGroup(spec, tuple(self._parameters), settings.config, numbers=numbers)
        averages = {
            name: array
            for at, name in enumerate(self._parameters)
            for array in self._all(Role(AVERAGE, at))
            if isinstance(name, str)
        }
        decay = settings.config.get("ema_momentum")
        return {
            **fields,
            "optimizers": (OptimizerState(settings.row.optimizers[:1], (group,), slots, variant="keras"),),
            "schedules": (SchedulerState(mapping(settings.config.get("learning_rate")), words, step, every=1),),
            "step": step,
            "progress": {} if step is None else {"step": step},
            "accumulate": settings.accumulate if settings.is_whole else None,
            "waiting": int(batches or 0) % settings.accumulate,
            "clip": read_clip({name: settings.config.get(name) for name in CLIPS}) or {} if settings.is_whole else None,
            "scaler": self._scaler(),
            "averages": averages,
            "average_decay": float(decay) if step and averages and isinstance(decay, int | float) else None,
        }

    def _slots(self, at: int) -> Iterator[tuple[str, Tensor]]:
        for role, array in zip(self._roles, self._arrays, strict=False):
            if role.parameter == at and role.name not in (AVERAGE, GATHERED):
                yield role.name, array
            elif role.name == SHARED:
                yield SHARED, convert_dtype(array, np.dtype(np.float64))

    def _all(self, searched: Role) -> list[Tensor]:
        return [array for role, array in zip(self._roles, self._arrays, strict=False) if role == searched]

    def _number(self, name: str) -> float | None:
        arrays = self._all(Role(name))
        return arrays[0].array().item() if arrays and not arrays[0].shape else None

    def _scaler(self) -> dict[str, Any]:
        """Return the loss scale with the keys of PyTorch's."""
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

    def _remarks(self) -> Iterator[str]:
        config = self._settings.config if self._settings else {}
        if self._settings is None and self._arrays:
            yield "the optimizer state has no names and no known order"
        if config.get("weight_decay"):
            yield "files of Keras do not store which variables are excluded from weight decay"
        if config.get("use_ema"):
            yield "Keras's `fit` overwrites weights by their averages at its end"
        if config.get("use_ema") and config.get("ema_overwrite_frequency"):
            yield "averages overwrite the weights at intervals, which a training model does not do"

    # ---- back --------------------------------------------------------------------------------------------------------

    def renew(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        """Return the groups with the numbers of a checkpoint."""
        groups = {
            path: {"attributes": group["attributes"], "arrays": dict(group["arrays"])}
            for path, group in self._groups.items()
        }
        for variable in self.variables:
            new = in_place_of(variable.tensor, checkpoint.tensors.get(variable.name), variable.name)
            groups[variable.group]["arrays"][variable.key] = new
        if self._settings is None or not checkpoint.optimizers or not self._arrays:
            return groups
        renewed = self._optimizer(checkpoint, self._settings)
        groups[self._place]["arrays"] = _numbered(renewed)
        if self._place == _INNER:
            outer = _in_order(groups[_OUTER]["arrays"])[: len(SCALER)]
            if "scale" in checkpoint.scaler:
                outer[2] = _like(outer[2], checkpoint.scaler["_growth_tracker"])
                outer[3] = _like(outer[3], checkpoint.scaler["scale"])
            groups[_OUTER]["arrays"] = _numbered([*outer, *renewed])
        return groups

    def _optimizer(self, checkpoint: Checkpoint, settings: Settings) -> list[Tensor]:
        state, step = checkpoint.optimizers[0], checkpoint.step
        roles, arrays = self._roles, list(self._arrays)
        if state.slots and not any(role.parameter >= 0 for role in roles):  # before its first step
            roles = settings.roles(len(self._parameters))
        listed = [name for group in state.groups for name in group.parameters]
        names = listed if len(listed) == len(self._parameters) else self._parameters  # an import may have named them
        moved = step is not None and step != (self._number(ITERATIONS) or 0) // settings.accumulate
        variables = []
        for at, role in enumerate(roles):
            name = names[role.parameter] if role.parameter >= 0 else next(iter(state.slots), "")
            slot = state.slots.get(name, {}).get(role.name)
            if at >= len(arrays):
                variables.append(_initial_variable(role, slot, checkpoint.tensors.get(str(name)), name))
            elif role.name == AVERAGE and (name in checkpoint.averages or moved):
                variables.append(in_place_of(arrays[at], checkpoint.averages.get(str(name)), f"the average of {name}"))
            elif role.name in settings.row.slots:
                variables.append(in_place_of(arrays[at], slot, f"{name}/{role.name}"))
            else:
                variables.append(self._single(role, arrays[at], slot, checkpoint, settings.accumulate if moved else 0))
        return variables

    @staticmethod
    def _single(role: Role, old: Tensor, slot: Any, checkpoint: Checkpoint, moved: int) -> Tensor:
        """Return a variable other than a slot. `moved`: batches of an update, 0 without updates."""
        rate = checkpoint.optimizers[0].groups[0].rate
        if role.name == ITERATIONS and moved:
            return _like(old, (checkpoint.step or 0) * moved)
        if role.name == RATE and rate is not None:
            return _like(old, rate)
        if role.name == GATHERED and moved:
            return ArrayTensor(np.zeros(old.shape, old.dtype))
        return convert_dtype(as_tensor(slot), old.dtype) if role.name == SHARED and slot is not None else old


def _initial_variable(role: Role, slot: Any, weight: Tensor | None, name: Any) -> Tensor:
    """Return a variable that the optimizer creates in its first step."""
    if role.name == SHARED and slot is not None:
        return convert_dtype(as_tensor(slot), np.dtype(np.float32))
    if weight is None:
        raise UnsupportedError(f"the checkpoint has no `{name}`", hint="write a checkpoint of the same model")
    return in_place_of(weight, slot, f"{name}/{role.name}")


def in_place_of(old: Tensor, new: Any, name: str) -> Tensor:
    """Return a replacement for a tensor; raise an UnsupportedError if shapes or types differ."""
    if not isinstance(new, Tensor):
        raise UnsupportedError(
            f"the checkpoint has no `{name}`, which the original has", hint="write one of the same model and optimizer"
        )
    if (new.dtype, new.shape) != (old.dtype, old.shape):
        actual, expected = f"{new.dtype}{list(new.shape)}", f"{old.dtype}{list(old.shape)}"
        raise UnsupportedError(f"`{name}` is {actual}, where the original has {expected}")
    return new


def _like(old: Tensor, number: float) -> Tensor:
    return ArrayTensor(np.asarray(number, old.dtype))


def _in_order(arrays: Mapping[str, Tensor]) -> list[Tensor]:
    return [arrays[key] for key in sorted(filter(str.isdecimal, arrays), key=int)]


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(at): tensor for at, tensor in enumerate(tensors)}
