"""Keras's learning-rate schedules and ours. Both count updates from 0; Keras computes in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from onward.convert.keras.rows import Refused
from onward.recipe.spec import Spec


class Rate(NamedTuple):
    """The base rate, and what becomes of it."""

    lr: float
    schedule: Sequence[Spec] = ()


def rate_of(optimizer: Any) -> Rate:
    """The learning rate of a Keras optimizer; `Refused` says that its schedule has no counterpart."""
    given = optimizer._learning_rate
    if hasattr(given, "numpy"):
        return Rate(float(str(np.float32(given.numpy()))))  # 0.1, not 0.10000000149011612
    kind = type(given).__name__
    if kind not in _READERS or not type(given).__module__.startswith("keras."):
        raise Refused(f"schedule {kind} has no counterpart")
    return _READERS[kind](given.get_config())


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


_READERS = {
    "ExponentialDecay": _exponential,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
}
