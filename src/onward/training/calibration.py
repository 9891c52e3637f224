"""Ranges that are rounded to, measured on the data of a run before its first step."""

from __future__ import annotations

import itertools

from onward.engines import Engine
from onward.errors import UnsupportedError
from onward.recipe.quantize import calibrate, has_ranges, needs_calibration
from onward.training.feed import Feed


def calibrate_on(feed: Feed, engine: Engine) -> list[str]:
    """Give a training model that is fresh its ranges, where it has such; what to say about that."""
    if engine.group.size > 1 and has_ranges(engine.model):
        raise UnsupportedError(
            "the ranges of activations are those of what one process sees, and here are several",
            hint="train in one process, or round weights alone: `quantize=int8:activations=none`",
        )
    wanted = needs_calibration(engine.model)
    if not wanted:
        return []
    batches = list(itertools.islice(feed.training.epoch(0), wanted))
    state = calibrate(engine.model, batches)
    for name, array in state.items():
        engine.model.set(name, array)
    engine.load_state(state)
    return [f"ranges are calibrated on {len(batches)} batches"]
