"""Names, saved slots, gradient clipping and schedules of Keras in words of a recipe, both ways."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from onward.recipe.spec import Spec


class Refused(Exception):
    """Reason why an object of Keras has no counterpart."""


def snake_case(name: str) -> str:
    """Return the name that Keras gives to the objects of a class."""
    parted = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", parted).lower()


def is_named_after(name: str, class_name: str) -> bool:
    """True if Keras may have given an object this name after its class."""
    return re.fullmatch(rf"{snake_case(class_name)}(_\d+)?", name) is not None


def shortest_decimal(number: Any) -> float:
    """Return a float32 as its shortest decimal: 0.1, not 0.10000000149011612."""
    return float(str(np.float32(number)))


# ---- optimizers ------------------------------------------------------------------------------------------------------

KERAS_2_SLOTS = {
    "m": "exp_avg", "v": "exp_avg_sq", "vhat": "max_exp_avg_sq", "momentum": "momentum_buffer", "rms": "square_avg",
    "mg": "grad_avg", "accumulator": "sum", "accum_grad": "square_avg", "accum_var": "acc_delta",
}  # fmt: skip
"""Slots of Keras 2 -> slots of a recipe."""
AVERAGE = "average"
TENSORFLOW_1_SLOTS = {
    "Adam": "exp_avg", "Adam_1": "exp_avg_sq", "Momentum": "momentum_buffer", "Adagrad": "sum",
    "RMSProp": "square_avg", "RMSProp_1": "momentum_buffer", "Adadelta": "square_avg", "Adadelta_1": "acc_delta",
    "ExponentialMovingAverage": AVERAGE,
}  # fmt: skip
"""Suffixes of TensorFlow 1 for slots and averages -> slots of a recipe."""

CLIPS = {"clipnorm": "tensor_norm", "global_clipnorm": "norm", "clipvalue": "value"}
"""Gradient clipping: names of Keras -> names of a recipe."""


def read_clip(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the gradient clipping of an optimizer's settings as a recipe has it, or None."""
    for theirs, ours in CLIPS.items():
        if limit := config[theirs]:
            return {ours: float(limit), **({} if ours == "value" else {"variant": "keras"})}
    return None


def write_clip(clip: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings for gradient clipping; None if Keras computes it differently."""
    if clip is None:
        return {}
    if clip.get("variant", "optax") not in ("optax", "keras"):
        return None
    return {theirs: clip[ours] for theirs, ours in CLIPS.items() if ours in clip}


# ---- schedules -------------------------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """Base rate and schedule."""

    lr: float
    schedule: Sequence[Spec] = ()


Config = Mapping[str, Any]


class ScheduleRow(NamedTuple):
    """Schedule class of Keras."""

    read: Callable[[Config], Rate | None]
    """None if a recipe has no such schedule."""
    write: Mapping[str, Callable[[float, Config], Config | None]]
    """Schedules of a recipe -> settings for a rate and options; None if the rates differ."""


def _read_exponential(config: Config) -> Rate:
    steps, factor = config["decay_steps"], config["decay_rate"]
    if config["staircase"]:
        return Rate(config["initial_learning_rate"], [Spec("step", {"size": steps, "gamma": factor})])
    return Rate(config["initial_learning_rate"], [Spec("exponential", {"gamma": factor ** (1 / steps)})])


def _stairs(lr: float, size: float, gamma: float) -> Config:
    return {"initial_learning_rate": lr, "decay_steps": size, "decay_rate": gamma, "staircase": True}


def _read_piecewise(config: Config) -> Rate:
    """Read a piecewise constant schedule, whose boundaries have the value before them."""
    boundaries, values = [b + 1 for b in config["boundaries"]], [float(v) for v in config["values"]]
    factors = [after / before if before else math.nan for before, after in pairwise(values)]
    if factors and all(math.isclose(factor, factors[0], rel_tol=1e-9) for factor in factors):
        return Rate(values[0], [Spec("multistep", {"milestones": boundaries, "gamma": factors[0]})])
    lr = max(values)
    parts = [{"steps": 1, "start_factor": value / lr, "end_factor": value / lr} for value in values]
    ends = [{"until": boundary} for boundary in boundaries]
    return Rate(lr, [Spec("linear", {**options, **end}) for options, end in zip(parts, [*ends, {}], strict=True)])


def _write_piecewise(lr: float, n: Config) -> Config:
    values = [lr * n["gamma"] ** i for i in range(len(n["milestones"]) + 1)]
    return {"boundaries": [int(m) - 1 for m in n["milestones"]], "values": values}


def _read_polynomial(config: Config) -> Rate | None:
    if config["cycle"]:
        return None
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


def _read_restarts(config: Config) -> Rate | None:
    if config["m_mul"] != 1.0 or config["t_mul"] < 1:
        return None
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
"""Class -> row. Both sides count updates from 0."""


def write_schedule(lr: float, schedule: Sequence[Spec]) -> float | tuple[str, Config] | None:
    """Return a rate, or a class and its settings; None if no class has the same rates."""
    if not schedule:
        return lr
    name, options = schedule[0].name, dict(schedule[0].options)
    if len(schedule) > 1 or (options.get("warmup") and name != "cosine"):
        return None
    every = options.pop("every", 1)
    if every != 1:  # Keras counts updates, the schedule larger steps
        stairs = {"exponential": 1, "step": options.get("size")}.get(name)
        return ("ExponentialDecay", _stairs(lr, stairs * every, options["gamma"])) if stairs else None
    if name == "constant":
        return lr
    class_name, write = next(
        ((class_name, row.write[name]) for class_name, row in SCHEDULES.items() if name in row.write), ("", None)
    )
    config = None if write is None else write(lr, options)
    return None if config is None else (class_name, config)
