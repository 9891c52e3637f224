"""Gradients that are nothing but rounding errors, as that of a bias before a normalization is.

Adam divides a gradient by its size, so such elements make whole steps into directions that differ on every engine. That
changes no loss, and is no disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onward.agreement.tolerance import Arrays, epsilon_of, farthest, largest
from onward.engines import Engine
from onward.errors import UnsupportedError

ROUNDINGS = 32
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
    try:
        return noise_in(engine.gradients(batch))
    except UnsupportedError:  # a step without a gradient of its own
        return {}


def noise_in(gradients: Arrays) -> dict[str, np.ndarray]:
    """Which elements of the gradients of a step are rounding errors; those of 16 bits are sums in float32."""
    top = max(map(largest, gradients.values()), default=0.0)
    epsilons = {name: min(epsilon_of(g.dtype), epsilon_of(np.dtype(np.float32))) for name, g in gradients.items()}
    return {name: np.abs(g) <= ROUNDINGS * epsilons[name] * top for name, g in gradients.items()}


def _followers(engine: Engine, noise: Arrays) -> Arrays:
    """The same elements of a parameter and of all state of its shape that belongs to it."""
    found = {}
    for state in engine.states():
        mask = noise.get(state.parameter or state.name)
        if mask is not None and mask.shape == state.array.shape:
            found[state.name] = mask
    return found
