"""What a compiled Keras model says of its training; and the variables of its optimizer, which have no names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onward.checkpoint.tf.tracked import SHARED
from onward.errors import InvalidModelError
from onward.recipe.spec import Spec
from onward.run_state.tensors import Tensor
from onward.vocabulary.keras import CLIPS, KINDS, SCHEDULES, Rate, Refused, is_named_after, settings_in

ITERATIONS, RATE, AVERAGE, GATHERED = "iterations", "learning_rate", "average", "gradient_accumulator"
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

    kind: str
    """The name of its class."""
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
        kind, every = KINDS[self.kind], range(parameters)
        made = [Role(ITERATIONS), *([Role(RATE)] if self.is_constant else [])]
        made += [Role(AVERAGE, at) for at in every if self.given.get("use_ema")]
        made += [Role(GATHERED, at) for at in every if self.accumulate > 1]
        slots = [slot for slot in kind.slots if self._keeps(slot)]
        made += [Role(slot, at) for at in every for slot in slots if slot not in kind.apart]
        made += [Role(slot, at) for slot in slots if slot in kind.apart for at in every]
        return made + ([Role(SHARED)] if self.kind == "Nadam" and parameters else [])

    def _keeps(self, slot: str) -> bool:
        wanted = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}.get(slot)
        return wanted is None or bool(self.given.get(wanted))


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
    if not is_own or kind not in KINDS:
        return None
    for name in (*KINDS[kind].numbers.values(), *CLIPS, "weight_decay"):
        if not _is_number(given.get(name)):
            raise InvalidModelError(f"the optimizer of the file has a `{name}` that is no number")
    return Settings(kind, given)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < _LARGEST)


def settings_by_variables(name: str, arrays: Sequence[Tensor], parameters: int) -> Settings | None:
    """The optimizer of that name that keeps variables of these shapes, if there is one only."""
    kind = next((kind for kind in KINDS if is_named_after(name, kind)), None)
    if kind is None or len(arrays) < 2:
        return None
    constant = not arrays[1].shape and arrays[1].dtype.kind == "f" and len(arrays) > 2
    found: dict[tuple[Role, ...], Settings] = {}
    for flags in itertools.product((False, True), repeat=4):
        given = dict(zip(("use_ema", "amsgrad", "centered", "momentum"), flags, strict=True))
        made = Settings(kind, {**given, "learning_rate": 0.0 if constant else {}}, is_whole=False)
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
        raise InvalidModelError(f"the optimizer keeps {len(arrays)} variables, which {settings.kind} does not have")
    return count


def rate_of(settings: Settings) -> Rate | None:
    """The rate before its schedule, and the schedule; None where that has no counterpart."""
    given = settings.given.get("learning_rate")
    if isinstance(given, int | float):
        return Rate(float(given))
    read = SCHEDULES.get(str(given.get("class_name"))) if isinstance(given, Mapping) else None
    if read is None or not isinstance(given, Mapping) or not str(given.get("module", "")).startswith("keras."):
        return None
    try:
        return read(given["config"])
    except (Refused, KeyError, TypeError, ValueError, ArithmeticError):
        return None


def spec_of(settings: Settings, lr: float) -> Spec | None:
    """The optimizer in words of a recipe; None where numbers are missing."""
    kind, decay = KINDS[settings.kind], settings.given.get("weight_decay")
    numbers = [settings.given.get(name) for name in kind.numbers.values()]
    overwritten = settings.given.get("use_ema") and settings.given.get("ema_overwrite_frequency")
    if not settings.is_whole or None in numbers or settings.given.get("loss_scale_factor") or overwritten:
        return None
    name = "adam" if kind.name == "adamw" and not decay else kind.name
    given = {**dict.fromkeys(kind.flags, False), **settings.given}
    return Spec(name, {"lr": lr, **settings_in(kind, given), "weight_decay": float(decay or 0.0)})


# ---- losses ----------------------------------------------------------------------------------------------------------

_NAMES = {"mse": "mean_squared_error", "mae": "mean_absolute_error"}
_PLAIN = {"mean_squared_error": "mse", "mean_absolute_error": "l1"}


def loss_of(compiled: Mapping[str, Any]) -> Any:
    """The loss in words of a recipe, where these mean the same whatever the outputs are; else None."""
    given = compiled.get("loss")
    config: Mapping[str, Any] = {}
    if isinstance(given, Mapping) and isinstance(given.get("config"), Mapping):
        given, config = given["config"].get("name"), given["config"]
    if not isinstance(given, str) or compiled.get("loss_weights") is not None:
        return None
    name = _NAMES.get(given.lower(), given.lower())
    if config.get("reduction", "sum_over_batch_size") != "sum_over_batch_size":
        return None
    if name in _PLAIN:
        return _PLAIN[name]
    if name in ("huber", "huber_loss") and isinstance(config.get("delta"), float):
        return {"name": "huber", "delta": config["delta"]}
    if name == "sparse_categorical_crossentropy" and config.get("from_logits") and config.get("ignore_class") is None:
        return "cross_entropy"
    return None
