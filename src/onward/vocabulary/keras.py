"""Keras's optimizers and schedules by the names of their classes, in our words. Nothing here needs Keras."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from onward.recipe.spec import Spec


class Refused(Exception):
    """Says what has no counterpart."""


# ---- optimizers ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of Keras's optimizers in our words."""

    name: str
    numbers: Mapping[str, str]
    """Our number -> attribute of Keras's."""
    slots: Mapping[str, str]
    """Our slot -> attribute of Keras's, a list with a variable for each parameter; in the order of making them."""
    flags: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    """Slots that are made for all parameters before the next slot is; the others are made parameter by parameter."""


_BETAS = {"beta1": "beta_1", "beta2": "beta_2"}
_ADAM = Kind(
    "adam",
    {**_BETAS, "eps": "epsilon"},
    {"exp_avg": "_momentums", "exp_avg_sq": "_velocities", "max_exp_avg_sq": "_velocity_hats"},
    ("amsgrad",),
    apart=("max_exp_avg_sq",),
)
_MOMENTS = {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}
KINDS = {
    "SGD": Kind("sgd", {"momentum": "momentum"}, {"momentum_buffer": "momentums"}, ("nesterov",)),
    "Adam": _ADAM,
    "AdamW": dataclasses.replace(_ADAM, name="adamw"),
    "Adagrad": Kind(
        "adagrad",
        {"eps": "epsilon", "initial_accumulator_value": "initial_accumulator_value"},
        {"sum": "_accumulators"},
    ),
    "Adadelta": Kind(
        "adadelta",
        {"rho": "rho", "eps": "epsilon"},
        {"square_avg": "_accumulated_grads", "acc_delta": "_accumulated_delta_vars"},
    ),
    "Adamax": Kind("adamax", {**_BETAS, "eps": "epsilon"}, {"exp_avg": "_m", "exp_inf": "_u"}),
    "Nadam": Kind("nadam", {**_BETAS, "eps": "epsilon"}, _MOMENTS),
    "RMSprop": Kind(
        "rmsprop",
        {"alpha": "rho", "eps": "epsilon", "momentum": "momentum"},
        {"square_avg": "_velocities", "momentum_buffer": "_momentums", "grad_avg": "_average_gradients"},
        ("centered",),
        apart=("square_avg", "momentum_buffer", "grad_avg"),
    ),
    "Lion": Kind("lion", _BETAS, {"exp_avg": "_momentums"}),
    "Lamb": Kind("lamb", {**_BETAS, "eps": "epsilon"}, _MOMENTS),
}


def settings_in(kind: Kind, given: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers and choices but the learning rate and the decay of weights, from the attributes of an optimizer."""
    numbers = {ours: float(given[theirs]) for ours, theirs in kind.numbers.items()}
    flags = {flag: bool(given[flag]) for flag in kind.flags}
    if flags.get("nesterov") and not numbers["momentum"]:
        flags["nesterov"] = False  # Keras has no look ahead without a momentum either
    return {**numbers, **flags, "variant": "keras"}


def clip_in(given: Mapping[str, Any]) -> dict[str, Any] | None:
    for theirs, ours in CLIPS.items():
        if limit := given[theirs]:
            return {ours: float(limit), **({} if ours == "value" else {"variant": "keras"})}
    return None


def shortest_decimal(rate: Any) -> float:
    """A number of float32 as people write it: 0.1, not 0.10000000149011612."""
    return float(str(np.float32(rate)))


WORDS = {
    "_momentums": "momentum", "momentums": "momentum", "_velocities": "velocity", "_velocity_hats": "velocity_hat",
    "_accumulators": "accumulator", "_accumulated_grads": "accumulated_grad", "_m": "momentum", "_u": "norm",
    "_accumulated_delta_vars": "accumulated_delta_var", "_average_gradients": "average_gradient",
}  # fmt: skip
"""With what the names of the variables end that are in a list of that name."""

CLIPS = {"clipnorm": "tensor_norm", "global_clipnorm": "norm", "clipvalue": "value"}
"""Limits of gradients: Keras's -> ours."""


def snake_case(name: str) -> str:
    """As Keras names objects after their classes."""
    parted = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", parted).lower()


def is_named_after(name: str, kind: str) -> bool:
    """Whether an object may have got its name from its class."""
    return re.fullmatch(rf"{snake_case(kind)}(_\d+)?", name) is not None


# ---- schedules -------------------------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """The base rate, and what becomes of it."""

    lr: float
    schedule: Sequence[Spec] = ()


def _exponential(config: dict[str, Any]) -> Rate:
    steps, factor = config["decay_steps"], config["decay_rate"]
    if config["staircase"]:
        return Rate(config["initial_learning_rate"], [Spec("step", {"size": steps, "gamma": factor})])
    return Rate(config["initial_learning_rate"], [Spec("exponential", {"gamma": factor ** (1 / steps)})])


def _piecewise(config: dict[str, Any]) -> Rate:
    """A boundary still has the value before it. Parts of one value are lines that neither rise nor fall."""
    boundaries, values = [b + 1 for b in config["boundaries"]], [float(v) for v in config["values"]]
    factors = [after / before if before else math.nan for before, after in pairwise(values)]
    if factors and all(math.isclose(factor, factors[0], rel_tol=1e-9) for factor in factors):
        return Rate(values[0], [Spec("multistep", {"milestones": boundaries, "gamma": factors[0]})])
    lr = max(values)
    parts = [{"steps": 1, "start_factor": value / lr, "end_factor": value / lr} for value in values]
    ends = [{"until": boundary} for boundary in boundaries]
    return Rate(lr, [Spec("linear", {**part, **end}) for part, end in zip(parts, [*ends, {}], strict=True)])


def _polynomial(config: dict[str, Any]) -> Rate:
    if config["cycle"]:
        raise Refused("schedule PolynomialDecay with `cycle` has no counterpart")
    options = {"steps": config["decay_steps"], "power": config["power"], "end": config["end_learning_rate"]}
    return Rate(config["initial_learning_rate"], [Spec("polynomial", options)])


def _cosine(config: dict[str, Any]) -> Rate:
    steps, low, start = config["decay_steps"], config["alpha"], config["initial_learning_rate"]
    target, warmup = config["warmup_target"], config["warmup_steps"]
    if target is None or not warmup:
        lr = start if target is None else target
        return Rate(lr, [Spec("cosine", {"steps": steps, "min": low * lr})])
    rising = {"warmup": warmup, "warmup_start": start / target}
    return Rate(target, [Spec("cosine", {"steps": steps + warmup, "min": low * target, **rising})])


def _restarts(config: dict[str, Any]) -> Rate:
    if config["m_mul"] != 1.0 or config["t_mul"] < 1:
        raise Refused("schedule CosineDecayRestarts with another `m_mul` than 1 has no counterpart")
    lr = config["initial_learning_rate"]
    options = {"period": config["first_decay_steps"], "mult": config["t_mul"], "min": config["alpha"] * lr}
    return Rate(lr, [Spec("cosine_restarts", options)])


SCHEDULES = {
    "ExponentialDecay": _exponential,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
}
