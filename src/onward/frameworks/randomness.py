"""Detection of random numbers in traced code, where draws of Python or NumPy become constants."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from onward.run_state.problems import Problems


@contextlib.contextmanager
def refuse_random_draws(what: str) -> Iterator[None]:
    """Refuse code that draws random numbers from Python or NumPy."""
    before = _generators()
    yield
    problems = Problems(what)
    for generator, state in _generators().items():
        if state != before[generator]:
            problems.add(
                f"it draws random numbers from `{generator}`, which a graph would repeat",
                "turn off randomness such as layer drop and input masks, or use dropout",
            )
    problems.refuse()


def _generators() -> dict[str, Any]:
    return {"random": random.getstate(), "numpy.random": repr(np.random.get_state(legacy=False))}
