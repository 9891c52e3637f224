"""Keras's learning-rate schedules and ours. Both count updates from 0; Keras computes in float32."""

from __future__ import annotations

from typing import Any

from onward.vocabulary.keras import SCHEDULES, Rate, Refused, shortest_decimal


def rate_of(optimizer: Any) -> Rate:
    """The learning rate of a Keras optimizer; `Refused` says that its schedule has no counterpart."""
    given = optimizer._learning_rate
    if hasattr(given, "numpy"):
        return Rate(shortest_decimal(given.numpy()))
    kind = type(given).__name__
    if kind not in SCHEDULES or not type(given).__module__.startswith("keras."):
        raise Refused(f"schedule {kind} has no counterpart")
    return SCHEDULES[kind](given.get_config())
