"""Optimizers, schedules and losses of Keras by the names of its classes, as those of a recipe, both ways."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from onward.recipe.optimizers import ConfiguredOptimizer, optimizer
from onward.recipe.spec import Spec
from onward.vocabulary.rows import OptimizerRow


class Refused(Exception):
    """The reason why something of Keras has no counterpart."""


def snake_case(name: str) -> str:
    """Return the name that Keras gives to the objects of a class."""
    parted = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", parted).lower()


def is_named_after(name: str, kind: str) -> bool:
    """True if Keras may have named an object so after its class."""
    return re.fullmatch(rf"{snake_case(kind)}(_\d+)?", name) is not None


def shortest_decimal(number: Any) -> float:
    """Return a float32 as people write it: 0.1, not 0.10000000149011612."""
    return float(str(np.float32(number)))


# ---- optimizers ------------------------------------------------------------------------------------------------------

ONLY_WITH = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}
"""Slot -> the setting of Keras without which a class does not keep it."""
_WORDS = {"_m": "momentum", "_u": "norm", "_velocities": "velocity"}
"""Names of variables that are not the singular of their attribute."""


@dataclasses.dataclass(frozen=True)
class KerasRow(OptimizerRow):
    """An optimizer class of Keras. A slot is an attribute with a list of one variable for each parameter."""

    flags: tuple[str, ...] = ()
    """Choices, which a recipe calls as Keras does."""
    apart: tuple[str, ...] = ()
    """Slots of which all variables are made before those of the next slot; others are made parameter by parameter."""
    shared: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Slots that Keras keeps once for all parameters -> attribute with the variable."""

    @functools.cached_property
    def words(self) -> dict[str, str]:
        """Slot -> the word with which Keras ends the names of its variables."""
        return {slot: _WORDS.get(name, name.strip("_").removesuffix("s")) for slot, name in self.slots.items()}

    @functools.cached_property
    def attributes(self) -> set[str]:
        """Attributes with slots."""
        return {*self.slots.values(), *self.shared.values()}

    @functools.cached_property
    def always(self) -> set[str]:
        """Slots that are kept whatever the settings are."""
        return self.slots.keys() - ONLY_WITH.keys()

    def kept_slots(self, config: Mapping[str, Any]) -> list[str]:
        """Return the slots that an optimizer with these settings keeps, in the order of making them."""
        return [slot for slot in self.slots if slot in self.always or config.get(ONLY_WITH[slot])]

    def read(self, config: Mapping[str, Any], lr: float) -> Spec:
        """Return the optimizer of a recipe for settings of the class."""
        decay = float(config.get("weight_decay") or 0.0)
        numbers = {ours: float(config[theirs]) for ours, theirs in self.settings.items()}
        flags = {flag: bool(config[flag]) for flag in self.flags}
        if flags.get("nesterov") and not numbers["momentum"]:
            flags["nesterov"] = False  # Keras has no look ahead without a momentum either
        name = "adam" if self.name == "AdamW" and not decay else self.optimizers[0]
        return Spec(name, {"lr": lr, **numbers, **flags, "variant": "keras", "weight_decay": decay})

    def write(self, configured: ConfiguredOptimizer) -> dict[str, Any]:
        """Return the settings of the class, but for the learning rate and weight decay."""
        numbers = {theirs: configured.values[ours] for ours, theirs in self.settings.items()}
        return {**numbers, **{flag: bool(configured.options.get(flag, False)) for flag in self.flags}}

    def fits(self, configured: ConfiguredOptimizer) -> bool:
        """True if the arithmetic of the class is the same function, and no number that Keras fixes is another."""
        if configured.kind.name not in self.optimizers or configured.options["maximize"]:
            return False
        theirs = optimizer(self.optimizers[0])
        options = {flag: configured.options.get(flag, False) for flag in theirs.options}
        keras_options = {**theirs.configure(variant="keras").options, **options}
        twin = ConfiguredOptimizer(theirs, {**theirs.hyper, **configured.values}, keras_options)
        fixed = {**theirs.hyper, **theirs.variants["keras"]}
        free = {"lr", "weight_decay", *self.settings}
        if any(configured.values[number] != fixed[number] for number in configured.effective - free):
            return False
        return _update_name(configured) == _update_name(twin)


def _update_name(configured: ConfiguredOptimizer) -> str:
    """Return the name of the update. A weight decay of 0 is none."""
    name = configured.kind.choose(configured.settings, None).function.name
    return name if configured.values.get("weight_decay") else name.removesuffix("W")


def _row(
    name: str, optimizers: Sequence[str], settings: Mapping[str, str], slots: Mapping[str, str], **columns: Any
) -> KerasRow:
    return KerasRow(f"keras.optimizers.{name}", tuple(optimizers), ("keras",), settings, slots, **columns)


_BETAS = {"beta1": "beta_1", "beta2": "beta_2"}
_ADAM = {**_BETAS, "eps": "epsilon"}
_MOMENTS = {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}
_AMSGRAD: dict[str, Any] = {"flags": ("amsgrad",), "apart": ("max_exp_avg_sq",)}
_HATS = {**_MOMENTS, "max_exp_avg_sq": "_velocity_hats"}
_ROWS = (
    _row(
        "SGD", ["sgd", "momentum", "nesterov", "sgdw"], {"momentum": "momentum"}, {"momentum_buffer": "momentums"},
        flags=("nesterov",),
    ),
    _row("Adam", ["adam", "amsgrad"], _ADAM, _HATS, **_AMSGRAD),
    _row("AdamW", ["adamw"], _ADAM, _HATS, **_AMSGRAD),
    _row(
        "Adagrad", ["adagrad"], {"eps": "epsilon", "initial_accumulator_value": "initial_accumulator_value"},
        {"sum": "_accumulators"},
    ),
    _row(
        "Adadelta", ["adadelta"], {"rho": "rho", "eps": "epsilon"},
        {"square_avg": "_accumulated_grads", "acc_delta": "_accumulated_delta_vars"},
    ),
    _row("Adamax", ["adamax"], _ADAM, {"exp_avg": "_m", "exp_inf": "_u"}),
    _row("Nadam", ["nadam"], _ADAM, _MOMENTS, shared={"mu_product": "_u_product"}),
    _row(
        "RMSprop", ["rmsprop"], {"alpha": "rho", "eps": "epsilon", "momentum": "momentum"},
        {"square_avg": "_velocities", "momentum_buffer": "_momentums", "grad_avg": "_average_gradients"},
        flags=("centered",), apart=("square_avg", "momentum_buffer", "grad_avg"),
    ),
    _row("Lion", ["lion"], _BETAS, {"exp_avg": "_momentums"}),
    _row("Lamb", ["lamb"], _ADAM, _MOMENTS),
)  # fmt: skip
OPTIMIZERS = {row.name: row for row in _ROWS}
"""By the names of Keras's classes."""

KERAS_2_SLOTS = {
    "m": "exp_avg", "v": "exp_avg_sq", "vhat": "max_exp_avg_sq", "momentum": "momentum_buffer", "rms": "square_avg",
    "mg": "grad_avg", "accumulator": "sum", "accum_grad": "square_avg", "accum_var": "acc_delta",
}  # fmt: skip
"""What optimizers before Keras 3 call their slots."""
AVERAGE = "average"
TENSORFLOW_1_SLOTS = {
    "Adam": "exp_avg", "Adam_1": "exp_avg_sq", "Momentum": "momentum_buffer", "Adagrad": "sum",
    "RMSProp": "square_avg", "RMSProp_1": "momentum_buffer", "Adadelta": "square_avg", "Adadelta_1": "acc_delta",
    "ExponentialMovingAverage": AVERAGE,
}  # fmt: skip
"""What TensorFlow 1 adds to the names of variables for their slots and averages."""

CLIPS = {"clipnorm": "tensor_norm", "global_clipnorm": "norm", "clipvalue": "value"}
"""Limits of gradients: Keras's -> those of a recipe."""


def read_clip(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the limit of gradients of an optimizer's settings as a recipe has it; None if there is none."""
    for theirs, ours in CLIPS.items():
        if limit := config[theirs]:
            return {ours: float(limit), **({} if ours == "value" else {"variant": "keras"})}
    return None


def write_clip(clip: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of an optimizer for a limit of gradients; None if Keras computes it in another way."""
    if clip is None:
        return {}
    if clip.get("variant", "optax") not in ("optax", "keras"):
        return None
    return {theirs: clip[ours] for theirs, ours in CLIPS.items() if ours in clip}


# ---- schedules -------------------------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """A base rate, and its schedule."""

    lr: float
    schedule: Sequence[Spec] = ()


Config = Mapping[str, Any]


class ScheduleRow(NamedTuple):
    """A schedule class of Keras."""

    read: Callable[[Config], Rate]
    write: Mapping[str, Callable[[float, Config], Config | None]]
    """Schedules of a recipe -> the class's settings for a rate and options; None where it computes another rate."""


def _read_exponential(config: Config) -> Rate:
    steps, factor = config["decay_steps"], config["decay_rate"]
    if config["staircase"]:
        return Rate(config["initial_learning_rate"], [Spec("step", {"size": steps, "gamma": factor})])
    return Rate(config["initial_learning_rate"], [Spec("exponential", {"gamma": factor ** (1 / steps)})])


def _stairs(lr: float, size: float, gamma: float) -> Config:
    return {"initial_learning_rate": lr, "decay_steps": size, "decay_rate": gamma, "staircase": True}


def _read_piecewise(config: Config) -> Rate:
    """A boundary still has the value before it. Parts of one value are lines that neither rise nor fall."""
    boundaries, values = [b + 1 for b in config["boundaries"]], [float(v) for v in config["values"]]
    factors = [after / before if before else math.nan for before, after in pairwise(values)]
    if factors and all(math.isclose(factor, factors[0], rel_tol=1e-9) for factor in factors):
        return Rate(values[0], [Spec("multistep", {"milestones": boundaries, "gamma": factors[0]})])
    lr = max(values)
    parts = [{"steps": 1, "start_factor": value / lr, "end_factor": value / lr} for value in values]
    ends = [{"until": boundary} for boundary in boundaries]
    return Rate(lr, [Spec("linear", {**part, **end}) for part, end in zip(parts, [*ends, {}], strict=True)])


def _write_piecewise(lr: float, n: Config) -> Config:
    values = [lr * n["gamma"] ** i for i in range(len(n["milestones"]) + 1)]
    return {"boundaries": [int(m) - 1 for m in n["milestones"]], "values": values}


def _read_polynomial(config: Config) -> Rate:
    if config["cycle"]:
        raise Refused("schedule PolynomialDecay with `cycle` has no counterpart")
    options = {"steps": config["decay_steps"], "power": config["power"], "end": config["end_learning_rate"]}
    return Rate(config["initial_learning_rate"], [Spec("polynomial", options)])


def _polynomial(start: float, steps: float, end: float, power: float = 1.0) -> Config:
    return {"initial_learning_rate": start, "decay_steps": steps, "end_learning_rate": end, "power": power}


def _read_cosine(config: Config) -> Rate:
    steps, low, start = config["decay_steps"], config["alpha"], config["initial_learning_rate"]
    target, warmup = config["warmup_target"], config["warmup_steps"]
    if target is None or not warmup:
        lr = start if target is None else target
        return Rate(lr, [Spec("cosine", {"steps": steps, "min": low * lr})])
    rising = {"warmup": warmup, "warmup_start": start / target}
    return Rate(target, [Spec("cosine", {"steps": steps + warmup, "min": low * target, **rising})])


def _write_cosine(lr: float, n: Config) -> Config | None:
    if n.get("after", "floor") != "floor" or not lr:
        return None
    warmup, alpha = n.get("warmup") or 0, n["min"] / lr
    if not warmup:
        return {"initial_learning_rate": lr, "decay_steps": n["steps"], "alpha": alpha}
    rising = {"warmup_target": lr, "warmup_steps": warmup}
    start = lr * n.get("warmup_start", 0.0)
    return {"initial_learning_rate": start, "decay_steps": n["steps"] - warmup, "alpha": alpha, **rising}


def _read_restarts(config: Config) -> Rate:
    if config["m_mul"] != 1.0 or config["t_mul"] < 1:
        raise Refused("schedule CosineDecayRestarts with another `m_mul` than 1 has no counterpart")
    lr = config["initial_learning_rate"]
    options = {"period": config["first_decay_steps"], "mult": config["t_mul"], "min": config["alpha"] * lr}
    return Rate(lr, [Spec("cosine_restarts", options)])


SCHEDULES = {
    "ExponentialDecay": ScheduleRow(
        _read_exponential,
        {
            "exponential": lambda lr, n: {"initial_learning_rate": lr, "decay_steps": 1, "decay_rate": n["gamma"]},
            "step": lambda lr, n: _stairs(lr, n["size"], n["gamma"]),
        },
    ),
    "PiecewiseConstantDecay": ScheduleRow(_read_piecewise, {"multistep": _write_piecewise}),
    "PolynomialDecay": ScheduleRow(
        _read_polynomial,
        {
            "linear": lambda lr, n: _polynomial(lr * n["start_factor"], n["steps"], lr * n["end_factor"]),
            "polynomial": lambda lr, n: _polynomial(lr, n["steps"], n["end"], n["power"]),
        },
    ),
    "CosineDecay": ScheduleRow(_read_cosine, {"cosine": _write_cosine}),
    "CosineDecayRestarts": ScheduleRow(_read_restarts, {}),
}
"""By the names of Keras's classes. Both sides count updates from 0."""


def write_schedule(lr: float, schedule: Sequence[Spec]) -> float | tuple[str, Config] | None:
    """Return a rate, or a class and its settings; None where Keras has no class that computes the same rates."""
    if not schedule:
        return lr
    name, options = schedule[0].name, dict(schedule[0].options)
    if len(schedule) > 1 or (options.get("warmup") and name != "cosine"):
        return None
    every = options.pop("every", 1)
    if every != 1:  # it counts epochs, say, and Keras counts updates
        stairs = {"exponential": 1, "step": options.get("size")}.get(name)
        return ("ExponentialDecay", _stairs(lr, stairs * every, options["gamma"])) if stairs else None
    if name == "constant":
        return lr
    kind, write = next(((kind, row.write[name]) for kind, row in SCHEDULES.items() if name in row.write), ("", None))
    config = None if write is None else write(lr, options)
    return None if config is None else (kind, config)
