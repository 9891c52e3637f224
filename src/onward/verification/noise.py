"""Gradients that are nothing but rounding errors, as that of a bias before a normalization is.

Adam divides a gradient by its size, so such elements make whole steps into directions that differ on every engine. That
changes no loss, and is no disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onward.engines import Engine
from onward.errors import UnsupportedError
from onward.verification.distance import Arrays, farthest

_ROUNDINGS = 32
"""How many roundings of the largest gradient of a step no engine can tell from zero."""


def distances_without_noise(
    engine: Engine, reference: Engine, expected: Sequence[Arrays], batches: Sequence[Arrays]
) -> list[float]:
    """How far each step of an engine ends from that of the reference if both begin with the same state.

    `expected` is the reference's state before each step, and after the last. Elements that follow rounding errors on
    both sides are not compared.
    """
    found = []
    for before, after, batch in zip(expected[:-1], expected[1:], batches, strict=True):
        for each in (engine, reference):
            each.load_state(before)
        mine, theirs = (_noise(each, batch) for each in (engine, reference))
        both = {name: mine[name] & theirs[name] for name in mine.keys() & theirs.keys()}
        engine.step(batch)
        found.append(farthest(engine.state(), after, _followers(engine, both)))
    return found


def _noise(engine: Engine, batch: Arrays) -> Arrays:
    """Which elements of the gradients are rounding errors."""
    try:
        gradients = {name: np.abs(gradient) for name, gradient in engine.gradients(batch).items()}
    except UnsupportedError:  # a step without a gradient of its own
        return {}
    largest = max((size.max(initial=0) for size in gradients.values()), default=0)
    return {name: size <= _ROUNDINGS * np.finfo(size.dtype).eps * largest for name, size in gradients.items()}


def _followers(engine: Engine, noise: Arrays) -> Arrays:
    """The same elements of a parameter and of all state of its shape that belongs to it."""
    found = {}
    for state in engine.states():
        mask = noise.get(state.parameter or state.name)
        if mask is not None and mask.shape == state.array.shape:
            found[state.name] = mask
    return found
