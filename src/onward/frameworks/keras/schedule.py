"""Learning-rate schedules of Keras, and those of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from onward.recipe.spec import Spec
from onward.vocabulary.keras import SCHEDULES, Rate, Refused, shortest_decimal, write_schedule


def read_schedule(optimizer: Any) -> Rate:
    """Return the learning rate of an optimizer; raise `Refused` for a schedule that no recipe has."""
    given = optimizer._learning_rate
    if hasattr(given, "numpy"):
        return Rate(shortest_decimal(given.numpy()))
    kind = type(given).__name__
    if kind not in SCHEDULES or not type(given).__module__.startswith("keras."):
        raise Refused(f"schedule {kind} has no counterpart")
    return SCHEDULES[kind].read(given.get_config())


def make_schedule(lr: float, schedule: Sequence[Spec]) -> Any | None:
    """Return a number or a schedule of Keras; None where Keras has none that is the same."""
    match write_schedule(lr, schedule):
        case (name, config):
            return getattr(keras.optimizers.schedules, name)(**config)
        case rate:
            return rate
