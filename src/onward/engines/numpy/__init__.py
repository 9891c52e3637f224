"""The reference implementation in numpy: short rather than fast.

Its derivative is central differences, for checks. Training takes gradients from Onward's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onward.engines.framework import Framework, Operators, table
from onward.engines.numpy.types import in_float32
from onward.engines.shared import algebra, spatial
from onward.errors import UnknownNameError


def _table() -> Operators:
    """Return the table. Shared rows of algebra and spatial compute narrow floats in float32."""
    rows = table(__name__, np)
    rows.update({name: in_float32(rows[name]) for name in (*algebra.operators, *spatial.operators)})
    return rows


class Numpy(Framework):
    name = "numpy"
    operators = _table()

    def __init__(self, *, device: str = "cpu"):
        if device not in self.devices():
            raise UnknownNameError(f"numpy has no device `{device}`", hint="it has cpu")

    def supports(self, dtype: np.dtype) -> bool:
        return True

    def tensor(self, array: np.ndarray) -> np.ndarray:
        return array

    def array(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor)

    def copy(self, tensor: Any) -> np.ndarray:
        return np.array(tensor)

    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        y, more = function(xs)

        def gradient(i: int) -> np.ndarray:
            return _differences(lambda x: function([*xs[:i], x, *xs[i + 1 :]])[0].sum(), xs[i])

        return y, more, lambda: [gradient(i) for i in range(len(xs))]


def _differences(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return central differences, one element after the other."""
    step = np.cbrt(np.finfo(x.dtype).eps)
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        nudge = np.zeros_like(x)
        nudge[index] = step * max(1, abs(x[index]))
        gradient[index] = (function(x + nudge) - function(x - nudge)) / (2 * nudge[index])
    return gradient
