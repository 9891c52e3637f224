"""What the page shows of each layer: norms of gradients over time, and how weights are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onward.inspect.formatting import clean
from onward.training.report.history import History, Series
from onward.training.report.thinning import curve, round_to

MOST_LINES = 6
"""More layers than these are a heat map: nobody can tell so many lines apart."""
_MOST_ROWS, _MOST_COLUMNS = 160, 150
_MOST_LAYERS, _MOST_RIDGES = 60, 14
_LEAST_BINS, _MOST_BINS = 8, 48


def gradient_lines(norms: dict[str, Series]) -> list[dict[str, Any]]:
    return [{"name": clean(name), "role": "line", **curve(series)} for name, series in norms.items()]


def gradient_map(norms: dict[str, Series]) -> dict[str, Any]:
    """Rows of layers, columns of stretches of time; each cell the geometric mean of the norms in it, None if none."""
    names = list(norms)[:_MOST_ROWS]
    steps = np.unique(np.concatenate([np.asarray(norms[name].steps) for name in names]))
    starts = np.linspace(0, len(steps), min(len(steps), _MOST_COLUMNS), endpoint=False).astype(int)
    rows = [_cells(norms[name], steps[starts]) for name in names]
    return {
        "names": [clean(name) for name in names],
        "x": [round_to(step, 16) for step in steps[starts].tolist()],
        "rows": rows,
        "left_out": len(norms) - len(names),
    }


def _cells(series: Series, starts: np.ndarray) -> list[float | None]:
    steps, values = np.asarray(series.steps), np.asarray(series.values)
    good = np.isfinite(values) & (values > 0)  # a norm of zero has no place on a logarithmic scale
    places = np.searchsorted(starts, steps[good], side="right") - 1
    sums = np.bincount(places, np.log(values[good]), len(starts))
    counts = np.bincount(places, minlength=len(starts))
    with np.errstate(invalid="ignore"):
        return [round_to(value, 4) for value in np.exp(sums / counts).tolist()]


def weight_histograms(history: History) -> list[dict[str, Any]]:
    """For each layer the histograms at some moments over common intervals, as heights from 0 to 100."""
    chosen = _pick_evenly(history.weights, _MOST_RIDGES)
    names = list(dict.fromkeys(name for _, layers in chosen for name in layers))
    found = (_ridges(name, chosen) for name in names)
    return [ridges for ridges in found if ridges][:_MOST_LAYERS]


def _pick_evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _ridges(name: str, snapshots: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any] | None:
    parts = [(step, _histogram(layers.get(name))) for step, layers in snapshots]
    known = [(step, *histogram) for step, histogram in parts if histogram]
    if not known:
        return None
    low, high = min(edges[0] for _, edges, _ in known), max(edges[-1] for _, edges, _ in known)
    if not high > low:  # all weights are equal
        low, high = low - 0.5, high + 0.5
    numbers = max(counts.sum() for _, _, counts in known)
    bounds = np.linspace(low, high, round(min(max(2 * numbers**0.5, _LEAST_BINS), _MOST_BINS)) + 1)
    densities = [_rebin(edges, counts, bounds) for _, edges, counts in known]
    return {
        "name": clean(name),
        "low": round_to(low),
        "high": round_to(high),
        "steps": [step for step, _, _ in known],
        "heights": [np.rint(100 * density / max(density.max(), 1e-300)).astype(int).tolist() for density in densities],
    }


def _histogram(value: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Edges and counts, if that is what it is."""
    try:
        edges, counts = np.asarray(value["edges"], float), np.asarray(value["counts"], float)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    fits = edges.ndim == counts.ndim == 1 and len(edges) == len(counts) + 1 >= 2
    if not fits or not np.isfinite(edges).all() or not np.isfinite(counts).all() or (np.diff(edges) < 0).any():
        return None
    return (edges, counts) if counts.sum() > 0 and (counts >= 0).all() and edges[-1] - edges[0] < np.inf else None


def _rebin(edges: np.ndarray, counts: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The share of values between each two of `bounds`, as if they were even between each two of `edges`."""
    if edges[0] == edges[-1]:
        share = np.zeros(len(bounds) - 1)
        share[min(int(np.searchsorted(bounds, edges[0], side="right")) - 1, len(share) - 1)] = 1
        return share
    below = np.concatenate([[0], np.cumsum(counts)]) / counts.sum()
    return np.diff(np.interp(bounds, edges, below))
