"""Chance in what is traced, which runs only once: what Python or NumPy draw would be a constant."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from onward.run_state.problems import Problems


@contextlib.contextmanager
def no_chance(what: str) -> Iterator[None]:
    """Refuse what asks Python or NumPy for random numbers meanwhile."""
    before = _generators()
    yield
    problems = Problems(what)
    for generator, state in _generators().items():
        if state != before[generator]:
            problems.add(
                f"it draws random numbers by `{generator}`, and a graph would have the same ones always",
                "turn off what is random, such as layers that are left out or masks on inputs; or use dropout",
            )
    problems.refuse()


def _generators() -> dict[str, Any]:
    return {"random": random.getstate(), "numpy.random": repr(np.random.get_state(legacy=False))}
