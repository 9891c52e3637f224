"""Learning-rate schedules of Keras: read as those of a recipe, and made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from onward.recipe.spec import Spec
from onward.vocabulary.keras import SCHEDULES, Rate, Refused, shortest_decimal, write_schedule


def read_schedule(optimizer: Any) -> Rate:
    """Return the learning rate; raise `Refused` for a schedule without a counterpart."""
    rate = optimizer._learning_rate
    if hasattr(rate, "numpy"):
        return Rate(shortest_decimal(rate.numpy()))
    name = type(rate).__name__
    if name not in SCHEDULES or not type(rate).__module__.startswith("keras."):
        raise Refused(f"schedule {name} has no counterpart")
    return SCHEDULES[name].read(rate.get_config())


def make_schedule(lr: float, schedule: Sequence[Spec]) -> Any | None:
    """Return a learning rate or a Keras schedule; None if Keras has none that computes the same."""
    match write_schedule(lr, schedule):
        case (name, config):
            return getattr(keras.optimizers.schedules, name)(**config)
        case rate:
            return rate
