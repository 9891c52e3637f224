"""Recognition of optimizers of a recipe in chains of optax transformations.

Besides clipping, which comes first, all chains of a recipe have the form

    weight decay, direction, momentum, weight decay, trust ratio, rate, momentum

with most of these missing. Weight decay before the direction is part of the gradient; after it, it
is decoupled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onward.errors import UnsupportedError
from onward.frameworks.jax.closures import ScheduledNumber, Transformation, free_variables, origin
from onward.recipe.optimizers import configure, optimizer
from onward.recipe.optimizers.groups import Given
from onward.recipe.spec import Spec
from onward.vocabulary.optax import row_of
from onward.vocabulary.optimizers import TRANSFORMATIONS


class ChainRate(NamedTuple):
    """Constant factor, times a schedule if there is one."""

    factor: float
    schedule: Callable[[Any], Any] | None = None


class Recognized(NamedTuple):
    """Optimizer without its learning rate, and that rate."""

    optimizer: Given
    rate: ChainRate
    buffer_over_trace: Callable[[float], float] = lambda lr: 1.0  # our momentum buffer / the trace of optax
    needs_constant_rate: bool = False


def recognize(chain: Sequence[Transformation]) -> Recognized:
    """Return the optimizer; raise an error that names the unknown transformations."""
    tokens = _Tokens(chain)
    if not tokens:
        raise UnsupportedError(
            "some parameters have no transformation: optax adds their unchanged gradients",
            hint="freeze them with `optax.set_to_zero()`, as a group of `optax.partition`",
        )
    if any(t.name == "scale_by_factored_rms" for t in chain):
        return _adafactor(tokens)
    if (ours := tokens.take("transformation", "joint")) is not None:
        tokens.finish()
        return _ours(ours.arguments)
    coupled = tokens.decay()
    direction = tokens.take(*_DIRECTIONS)
    inner = tokens.momentum()
    decoupled = tokens.decay()
    trust = tokens.take("scale_by_trust_ratio")
    rate = tokens.rate()
    outer = tokens.momentum()
    tokens.finish()
    name, options = _direction(direction) if direction else ("sgd", {"variant": "optax"})
    if trust:
        if name != "adam":
            raise UnsupportedError(
                f"`scale_by_trust_ratio` after {name} has no counterpart in a recipe",
                hint="put it after `optax.scale_by_adam()`",
            )
        name, options = "lamb", {**options, **_numbers(trust), "weight_decay": 0.0}
    options |= _decay(name, options, coupled, decoupled)
    spec = Spec(_WITH_DECAY[name] if decoupled and name in _WITH_DECAY else name, options)
    return _with_momentum(spec, rate, inner, outer)


class _Tokens:
    def __init__(self, chain: Sequence[Transformation]):
        self._left = [t for t in chain if t.name not in ("identity", "inject_hyperparams")]

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, *names: str) -> Transformation | None:
        return self._left.pop(0) if self._left and self._left[0].name in names else None

    def decay(self) -> float:
        transformation = self.take("add_decayed_weights")
        return float(_numbers(transformation)["weight_decay"]) if transformation else 0.0

    def momentum(self) -> dict[str, Any] | None:
        trace = self.take("trace")
        numbers = _numbers(trace) if trace else None
        return {**numbers, "nesterov": bool(numbers["nesterov"])} if numbers else None

    def rate(self) -> ChainRate:
        factor, schedule = 1.0, None
        while scale := self.take("scale", "scale_by_schedule"):
            more = _rate(scale)
            if schedule and more.schedule:
                raise UnsupportedError("the learning rate is the product of two schedules")
            factor, schedule = factor * more.factor, schedule or more.schedule
        return ChainRate(factor, schedule)

    def finish(self) -> None:
        if self._left:
            unknown = [t.name for t in self._left if t.name not in _KNOWN] or [self._left[0].name]
            names = ", ".join(f"`{name}`" for name in unknown)
            raise UnsupportedError(f"{names} has no counterpart in a recipe at this position of the chain")


def _rate(scale: Transformation) -> ChainRate:
    if scale.name == "scale":
        size = scale.arguments["step_size"]
        return ChainRate(size.factor, size.schedule) if isinstance(size, ScheduledNumber) else ChainRate(float(size))
    function = scale.arguments["step_size_fn"]
    if origin(function) == "scale_by_learning_rate":
        free = free_variables(function)
        return ChainRate(float(free["m"]), free["learning_rate"])
    return ChainRate(1.0, function)


def number(arguments: Mapping[str, Any], name: str) -> float:
    value = arguments[name]
    if callable(value) or isinstance(value, ScheduledNumber):
        raise UnsupportedError(f"`{name}` follows a schedule, and only the learning rate can")
    return float(value)


_DIRECTIONS = {name for name, row in TRANSFORMATIONS.items() if row.slots} - {"trace", "scale_by_factored_rms"}
_KNOWN = {*_DIRECTIONS, "add_decayed_weights", "trace", "scale", "scale_by_schedule", "scale_by_trust_ratio"}


def _direction(transformation: Transformation) -> tuple[str, dict[str, Any]]:
    """Return the name of an optimizer, and its settings."""
    arguments = dict(transformation.arguments)
    if transformation.name == "scale_by_radam":
        arguments |= free_variables(arguments["_radam_update"])
    numbers, row = _numbers(transformation, arguments), row_of(transformation.name, arguments)
    if row.name == "adagrad" and not numbers["eps"]:
        raise UnsupportedError("Adagrad with `eps=0` divides by zero in a recipe, but not in optax")
    if row.name == "rmsprop":
        numbers["centered"] = transformation.name == "scale_by_stddev"
    options = {"variant": row.variants[0], **numbers}
    always = configure(Spec(row.optimizers[0], options)).decouples
    return row.optimizers[0], {**options, "weight_decay": 0.0} if always else options


def _numbers(transformation: Transformation, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of a recipe for the arguments of a transformation."""
    row, arguments = TRANSFORMATIONS[transformation.name], arguments or transformation.arguments
    for argument, fixed in row.fixed.items():
        value = arguments.get(argument, fixed)
        if value is not fixed and value != fixed:
            raise UnsupportedError(f"`{argument}={value}` has no counterpart in a recipe, where it is always {fixed}")
    return {
        ours.removeprefix("-"): -number(arguments, theirs) if ours[0] == "-" else number(arguments, theirs)
        for theirs, ours in row.settings.items()
        if theirs in arguments
    }


_WITH_DECAY = {"sgd": "sgdw", "adam": "adamw"}


def _decay(name: str, options: Mapping[str, Any], coupled: float, decoupled: float) -> dict[str, Any]:
    if coupled and decoupled:
        raise UnsupportedError("it has coupled and decoupled weight decay")
    definition, always = optimizer(name), configure(Spec(name, options)).decouples
    if coupled and always:
        raise UnsupportedError(f"weight decay before {name} has no counterpart in a recipe", hint="put it after")
    if coupled:
        return {"weight_decay": coupled}
    if not decoupled:
        return {}
    if name in _WITH_DECAY or always:
        return {"weight_decay": decoupled}
    if "decoupled_weight_decay" in definition.options:
        return {"weight_decay": decoupled, "decoupled_weight_decay": True}
    if options["variant"] == "optax" and "keras" in definition.variants:  # decoupled, and may be equal otherwise
        optax, keras = (configure(Spec(name, {**options, "variant": variant})) for variant in ("optax", "keras"))
        if optax.definition.choose(optax.settings, None).update is keras.definition.choose(keras.settings, None).update:
            return {"weight_decay": decoupled, "variant": "keras"}
    raise UnsupportedError(f"decoupled weight decay of {name} has no counterpart in a recipe", hint="put it before")


def _with_momentum(
    spec: Spec, rate: ChainRate, inner: dict[str, Any] | None, outer: dict[str, Any] | None
) -> Recognized:
    """Add momentum, with the rate outside its buffer (inner) or inside (outer)."""
    momentum = inner or outer
    if momentum is None:
        return Recognized(spec, rate)
    name, options = spec.name, dict(spec.options)
    if inner and outer:
        raise UnsupportedError("it has momentum before and after the learning rate")
    if name in ("sgd", "sgdw"):
        if outer and options.get("weight_decay"):
            raise UnsupportedError("weight decay before a rate with momentum after it has no counterpart in a recipe")
        options |= {**momentum, **({"variant": "keras"} if outer else {})}
        return Recognized(Spec(name, options), rate)
    if name != "rmsprop" or momentum["nesterov"]:
        what = "Nesterov momentum" if momentum["nesterov"] else "momentum"
        raise UnsupportedError(f"{what} after {name} has no counterpart in a recipe")
    if options["variant"] == "keras":
        raise UnsupportedError("weight decay between RMSprop and its momentum has no counterpart in a recipe")
    options["momentum"] = momentum["momentum"]
    inside = options["variant"] == "optax"
    sign, moves = (-1.0 if outer else 1.0), inside != bool(outer)

    def buffer_over_trace(lr: float) -> float:
        return sign * ((lr if inside else 1.0 / lr) if moves else 1.0)

    return Recognized(Spec(name, options), rate, buffer_over_trace, moves)


def _adafactor(tokens: _Tokens) -> Recognized:
    factored_rms = tokens.take("scale_by_factored_rms")
    clip = tokens.take("clip_by_block_rms")
    rate = tokens.rate()
    scale = tokens.take("scale_by_param_block_rms")
    decay = tokens.decay()
    sign = tokens.rate()
    tokens.finish()
    if factored_rms is None or scale is None or sign != ChainRate(-1.0):
        raise UnsupportedError("Adafactor without `multiply_by_parameter_scale` has no counterpart in a recipe")
    options: dict[str, Any] = {"variant": "optax", "d": _NEVER, "weight_decay": decay}
    for transformation in (factored_rms, clip, scale):
        options |= _numbers(transformation) if transformation else {}
    if origin(factored_rms.arguments["decay_rate_fn"]) != "optax._src.factorized._decay_rate_pow":
        raise UnsupportedError("a custom `decay_rate_fn` has no counterpart in a recipe")
    factored = factored_rms.arguments["factored"]
    options["min_dim_size_to_factor"] = int(options["min_dim_size_to_factor"]) if factored else _NO_AXIS
    return Recognized(Spec("adafactor", options), ChainRate(-rate.factor, rate.schedule))


_NEVER = 1e300  # larger than the root mean square of any update
_NO_AXIS = 2**31  # longer than any axis


def _ours(arguments: Mapping[str, Any]) -> Recognized:
    """Return the optimizer of a transformation that `to_jax` made."""
    rate, rules = arguments["rate"], arguments.get("rules")
    rule = next(iter(rules.values()))[1] if rules else arguments["rule"]
    optimizer = free_variables(rule)["function" if rules is None else "spec"]  # as updates.py names them
    return Recognized(optimizer, ChainRate(-1.0, rate) if callable(rate) else ChainRate(-float(rate)))
