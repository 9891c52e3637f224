"""An optimizer of a framework and what was traced of it, side by side: updates by random gradients.

A number that was taken for a constant, and is none, shows here.
"""

from __future__ import annotations

import numpy as np

from onward.errors import MismatchError

TRIALS = ((1.0, 1.0), (0.4, 1e-3), (2.5, 30.0), (1.0, 0.1))
"""Updates: by what the learning rate is multiplied, and how large gradients are."""
_TOLERANCE = 1e-5
"""Of a change, as a part of the largest in the tensor."""
_ROUNDING = 4.0
"""In the last digit of the largest element: what adding a change may cost."""


def compare(name: str, found: np.ndarray, expected: np.ndarray, before: np.ndarray, optimizer: str) -> None:
    """Compare what an update has made of a parameter or state; a difference that is no rounding is an error."""
    change, size = (float(np.abs(x).max(initial=0)) for x in (expected - before, expected))
    epsilon = float(np.finfo(expected.dtype).eps) if expected.dtype.kind == "f" else 0.0
    difference = float(np.abs(found.astype(np.float64) - expected).max(initial=0))
    if not difference <= _TOLERANCE * change + _ROUNDING * epsilon * size:
        raise MismatchError(
            f"an update of `{name}` by the optimizer {optimizer} is off by {difference:.3g} in what was traced of it, "
            f"where it is {change:.3g} large",
            hint="a step depends on what a trace does not see: random numbers, or something outside of the optimizer",
        )
