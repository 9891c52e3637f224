"""Fewer points that look the same: what goes into the page, however long the run was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.training.report.history import Series

_MOST_POINTS = 900
"""About as many as a chart has pixels."""


def curve(series: Series) -> dict[str, list[Any]]:
    """`x` and `y`; of a long series means of equal stretches, with the least and the largest value of each.

    A number that is not finite is None: the line has a gap there.
    """
    steps, values = np.asarray(series.steps), np.asarray(series.values)
    if len(steps) <= _MOST_POINTS:
        return {"x": _round_all(steps, 16), "y": _round_all(values)}
    bounds = np.searchsorted(steps, np.linspace(steps[0], steps[-1], _MOST_POINTS, endpoint=False))
    starts = np.unique(bounds)
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = np.add.reduceat(np.where(finite, values, 0), starts) / counts
        low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
        high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    ends = np.append(starts[1:], len(steps)) - 1
    middles = np.floor((steps[starts] + steps[ends]) / 2)
    return {"x": _round_all(middles, 16), "y": _round_all(means), "low": _round_all(low), "high": _round_all(high)}


def _round_all(values: np.ndarray, digits: int = 5) -> list[Any]:
    return [round_to(value, digits) for value in values.tolist()]


def round_to(value: float, digits: int = 5) -> float | None:
    """As many digits as one sees; whole numbers without a point, since that is shorter."""
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
