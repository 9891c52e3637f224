"""What the page draws, as data: curves over steps, a map of gradients, histograms of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from onward.inspect.formatting import clean
from onward.training.progress import short
from onward.training.report.headline import best_step
from onward.training.report.history import ENDS, History, Series
from onward.training.report.layers import MOST_LINES, gradient_lines, gradient_map, weight_histograms
from onward.training.report.thinning import curve, round_to

Chart = dict[str, Any]

_MOST_METRICS = 12
_MARKED = {"resume": "resumed", **{reason: word for reason, (word, kind, _) in ENDS.items() if kind != "good"}}
_MOST_MARKS = 40


def charts(history: History) -> Chart:
    """Everything that the script of the page needs."""
    norms = {name: series for name, series in history.norms.items() if series}
    many = len(norms) > MOST_LINES
    return {
        "last": history.step,
        "per_epoch": history.steps_per_epoch,
        "marks": [
            {"x": event.step, "kind": event.kind, "text": _MARKED[event.kind]}
            for event in history.events
            if event.kind in _MARKED
        ][-_MOST_MARKS:],
        "curves": list(_curves(history)),
        "norms": _chart("gradient norms", gradient_lines(norms), log=True) if norms and not many else None,
        "map": gradient_map(norms) if many else None,
        "histograms": weight_histograms(history),
    }


def _curves(history: History) -> Iterator[Chart]:
    names = dict.fromkeys(["loss", *history.validation, *history.train])
    for name in list(names)[:_MOST_METRICS]:
        series = [
            {"name": role, "role": role, **curve(found)}
            for role, found in (("training", history.train.get(name)), ("validation", history.validation.get(name)))
            if found
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
    """The chart for those who do not see it."""
    told = []
    for item in series[:MOST_LINES]:
        points = [(x, y) for x, y in zip(item["x"], item["y"], strict=True) if y is not None]
        if points:
            (first, start), (last, end) = points[0], points[-1]
            told.append(f"{item['name']}: {short(start)} at step {first:,}, {short(end)} at step {last:,}")
    return "; ".join(told)


def _best(history: History, name: str) -> Chart | None:
    step, series = best_step(history), history.validation.get(name, Series())
    value = series.at(step) if step is not None else None
    return {"x": step, "y": round_to(value)} if value is not None and math.isfinite(value) else None


def _spans_decades(history: History, name: str) -> bool:
    """Whether a logarithmic scale shows more: values are positive, and the largest is a hundred times the least."""
    found = [series for series in (history.train.get(name), history.validation.get(name)) if series]
    values = [value for series in found for value in series.values if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)
