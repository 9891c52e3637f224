"""Learning-rate schedules of Keras: read as those of a recipe, and made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from onward.recipe.spec import Spec
from onward.vocabulary.keras import SCHEDULES, Rate, Refused, shortest_decimal, write_schedule


def known_schedule(optimizer: Any) -> Rate | None:
    """Return the learning rate in words of a recipe; None for a schedule that is traced with the optimizer."""
    rate = optimizer._learning_rate
    if hasattr(rate, "numpy"):
        return Rate(shortest_decimal(rate.numpy()))
    name = type(rate).__name__
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise Refused(f"learning rate is a {name}, not a number or a schedule")
    is_own = type(rate).__module__.startswith("keras.")
    return SCHEDULES[name].read(rate.get_config()) if is_own and name in SCHEDULES else None


def read_schedule(optimizer: Any) -> Rate:
    """Return the learning rate; it is a factor of a schedule that is traced with the optimizer."""
    return known_schedule(optimizer) or Rate(1.0)


def make_schedule(lr: float, schedule: Sequence[Spec]) -> Any | None:
    """Return a learning rate or a Keras schedule; None if Keras has none that computes the same."""
    match write_schedule(lr, schedule):
        case (name, config):
            return getattr(keras.optimizers.schedules, name)(**config)
        case rate:
            return rate
