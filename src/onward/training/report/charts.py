"""Data of the charts: curves over steps, a heat map of gradients, histograms of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onward.inspect.formatting import clean
from onward.training.progress import short
from onward.training.report.history import ENDS, History, Series, best_step

Chart = dict[str, Any]

_MOST_METRICS = 12
_MARKED = {"resume": "resumed", **{reason: word for reason, (word, style, _) in ENDS.items() if style != "good"}}
_MOST_MARKS = 40


def charts(history: History) -> Chart:
    """Return the JSON that the scripts of the page draw."""
    norms = {name: series for name, series in history.norms.items() if series}
    many = len(norms) > MOST_LINES
    drawn = {} if many else norms
    lines = [{"name": clean(name), "role": "line", **curve(series)} for name, series in drawn.items()]
    return {
        "last": history.step,
        "counts": [[0, 0, history.steps_per_epoch], *history.recounts],
        "marks": [
            {"x": event.step, "kind": event.name, "text": _MARKED[event.name]}
            for event in history.events
            if event.name in _MARKED
        ][-_MOST_MARKS:],
        "curves": list(_curves(history)),
        "norms": _chart("gradient norms", lines, log=True) if lines else None,
        "map": gradient_map(norms) if many else None,
        "histograms": weight_histograms(history),
    }


def _curves(history: History) -> Iterator[Chart]:
    names = dict.fromkeys(["loss", *history.validation, *history.train])
    for name in list(names)[:_MOST_METRICS]:
        series = [
            {"name": role, "role": role, **curve(values)}
            for role, values in (("training", history.train.get(name)), ("validation", history.validation.get(name)))
            if values
        ]
        if series:
            yield _chart(name, series, best=_best(history, name), log=_spans_decades(history, name))
    if history.rate:
        yield _chart("learning rate", [{"name": "learning rate", "role": "line", **curve(history.rate)}])
    if history.speed:
        yield _chart("samples per second", [{"name": "per step", "role": "training", **curve(history.speed)}])


def _chart(title: str, series: list[Chart], *, best: Chart | None = None, log: bool = False) -> Chart:
    return {"title": clean(title), "series": series, "best": best, "log": log, "summary": _summary(series)}


def _summary(series: list[Chart]) -> str:
    """Return a description of the chart for screen readers."""
    texts = []
    for item in series[:MOST_LINES]:
        points = [(x, y) for x, y in zip(item["x"], item["y"], strict=True) if y is not None]
        if points:
            (first, start), (last, end) = points[0], points[-1]
            texts.append(f"{item['name']}: {short(start)} at step {first:,}, {short(end)} at step {last:,}")
    return "; ".join(texts)


def _best(history: History, name: str) -> Chart | None:
    step, series = best_step(history), history.validation.get(name, Series())
    value = series.at(step) if step is not None else None
    return {"x": step, "y": round_to(value)} if value is not None and math.isfinite(value) else None


def _spans_decades(history: History, name: str) -> bool:
    """True if all values are positive and span two decades, so that a logarithmic scale shows more."""
    series = [values for values in (history.train.get(name), history.validation.get(name)) if values]
    values = [value for line in series for value in line.values if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)


# ---- long curves -----------------------------------------------------------------------------------------------------


_MOST_POINTS = 900  # about the width of a chart in pixels


def curve(series: Series) -> dict[str, list[Any]]:
    """Return `x` and `y`; for a long series means of equal intervals, with their least and largest values.

    Values that are not finite are None, a gap in the line.
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
    """Round to the digits that a chart shows; integers have no point, which is shorter in JSON."""
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


# ---- layers: gradients and weights -----------------------------------------------------------------------------------


MOST_LINES = 6  # more layers are drawn as a heat map, since more lines are hard to tell apart
_MOST_ROWS, _MOST_COLUMNS = 160, 150
_MOST_LAYERS, _MOST_RIDGES = 60, 14
_LEAST_BINS, _MOST_BINS = 8, 48


def gradient_map(norms: dict[str, Series]) -> dict[str, Any]:
    """Return a row per layer and a column per interval of steps, with the geometric means of the norms."""
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
    good = np.isfinite(values) & (values > 0)  # zero has no logarithm
    columns = np.searchsorted(starts, steps[good], side="right") - 1
    sums = np.bincount(columns, np.log(values[good]), len(starts))
    counts = np.bincount(columns, minlength=len(starts))
    with np.errstate(invalid="ignore"):
        return [round_to(value, 4) for value in np.exp(sums / counts).tolist()]


def weight_histograms(history: History) -> list[dict[str, Any]]:
    """Return the histograms of each layer at some steps over common bins, as heights from 0 to 100."""
    chosen = _pick_evenly(history.weights, _MOST_RIDGES)
    names = list(dict.fromkeys(name for _, layers in chosen for name in layers))
    layers = (_ridges(name, chosen) for name in names)
    return [ridges for ridges in layers if ridges][:_MOST_LAYERS]


def _pick_evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _ridges(name: str, snapshots: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any] | None:
    stored = [(step, _histogram(layers.get(name))) for step, layers in snapshots]
    histograms = [(step, *histogram) for step, histogram in stored if histogram]
    if not histograms:
        return None
    low, high = min(edges[0] for _, edges, _ in histograms), max(edges[-1] for _, edges, _ in histograms)
    if not high > low:  # all weights are equal
        low, high = low - 0.5, high + 0.5
    numbers = max(counts.sum() for _, _, counts in histograms)
    bounds = np.linspace(low, high, round(min(max(2 * numbers**0.5, _LEAST_BINS), _MOST_BINS)) + 1)
    densities = [_rebin(edges, counts, bounds) for _, edges, counts in histograms]
    return {
        "name": clean(name),
        "low": round_to(low),
        "high": round_to(high),
        "steps": [step for step, _, _ in histograms],
        "heights": [np.rint(100 * density / max(density.max(), 1e-300)).astype(int).tolist() for density in densities],
    }


def _histogram(value: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return edges and counts, or None if the value of the log is not a histogram."""
    try:
        edges, counts = np.asarray(value["edges"], float), np.asarray(value["counts"], float)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    fits = edges.ndim == counts.ndim == 1 and len(edges) == len(counts) + 1 >= 2
    if not fits or not np.isfinite(edges).all() or not np.isfinite(counts).all() or (np.diff(edges) < 0).any():
        return None
    return (edges, counts) if counts.sum() > 0 and (counts >= 0).all() and edges[-1] - edges[0] < np.inf else None


def _rebin(edges: np.ndarray, counts: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the fraction of values between `bounds`, with even values between `edges`."""
    if edges[0] == edges[-1]:
        share = np.zeros(len(bounds) - 1)
        share[min(int(np.searchsorted(bounds, edges[0], side="right")) - 1, len(share) - 1)] = 1
        return share
    below = np.concatenate([[0], np.cumsum(counts)]) / counts.sum()
    return np.diff(np.interp(bounds, edges, below))
