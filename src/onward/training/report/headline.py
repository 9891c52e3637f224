"""What the run was about and how it went, in words and a few numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.errors import first_line
from onward.inspect import Summary, describe
from onward.inspect.formatting import amount, quantity, setting
from onward.inspect.render import step_rows
from onward.training.progress import duration, short
from onward.training.report.history import History, Series

_WANTED_ROWS = {"loss", "optimizer", "schedule", "clipping", "accumulate", "average", "loss scale"}


@dataclass(frozen=True)
class Card:
    label: str
    value: str
    note: str


def summary_of(folder: Path) -> tuple[Summary | None, str | None]:
    """What the training model says about itself, or why it does not."""
    path = folder / "training.onnx"
    if not path.exists():
        return None, "There is no training.onnx in the folder, so this page knows only what the log says."
    try:
        return describe(path), None
    except Exception as error:  # whatever is wrong with it: a page without it is better than none
        return None, f"training.onnx cannot be read ({first_line(error)}), so this page knows only what the log says."


def best_step(history: History) -> int | None:
    """Where the best model was saved, or else the lowest loss of validation was seen."""
    if history.best is not None:
        return history.best
    loss = history.validation.get("loss", Series())
    good = [(value, step) for step, value in zip(loss.steps, loss.values, strict=True) if math.isfinite(value)]
    return int(min(good)[1]) if good else None


# ---- cards -----------------------------------------------------------------------------------------------------------


def cards(history: History, summary: Summary | None) -> Iterator[Card]:
    found = sorted((name for name, series in history.validation.items() if series), key=lambda name: name == "loss")
    for name in found[:3]:
        yield _result_card(
            f"validation {name}" if name == "loss" else name, history.validation[name], best_step(history)
        )
    loss = history.train.get("loss")
    if loss and (late := _late(loss)) is not None:
        value, of = (history.epochs.values[-1], "epoch") if history.epochs else (late, "steps")
        yield Card("training loss", short(value), f"mean of the last {of}; first {short(loss.values[0])}")
    if history.step:
        epochs = history.epochs_at(history.step)
        yield Card("steps", f"{history.step:,}", f"{epochs:.3g} epochs" if epochs is not None else "")
    yield Card("time", duration(history.seconds), _sittings(history))
    if history.speed:
        middle = statistics.median(history.speed.values)
        yield Card("throughput", f"{middle:,.0f}" if middle >= 10 else short(middle), "samples per second, median")
    if trained := _parameters_card(history, summary):
        yield trained


def _result_card(label: str, series: Series, at: int | None) -> Card:
    best, last = series.at(at) if at is not None else None, series.values[-1]
    if best is None:
        return Card(label, short(last), "at the end")
    note = f"best model, after step {at:,}"
    return Card(label, short(best), note if best == last else f"{note}; last {short(last)}")


def _late(series: Series) -> float | None:
    """The mean of the last twentieth, at least of ten, as far as they are numbers."""
    late = [value for value in series.values[-max(len(series) // 20, 10) :] if math.isfinite(value)]
    return sum(late) / len(late) if late else None


def _sittings(history: History) -> str:
    resumes = sum(event.kind == "resume" for event in history.events)
    return f"in {resumes + 1} sittings" if resumes else "in one go"


def _parameters_card(history: History, summary: Summary | None) -> Card | None:
    if summary is not None and summary.parameters["trained"].tensors:
        part = summary.parameters["trained"]
        return Card("parameters", f"{part.numbers:,}", f"trained, in {quantity(part.tensors, 'tensor')}")
    number = history.start.get("parameters")
    return Card("parameters", f"{number:,}", "trained") if isinstance(number, int) else None


# ---- facts -----------------------------------------------------------------------------------------------------------


def facts(history: History, config: dict[str, Any], summary: Summary | None) -> Iterator[tuple[str, str]]:
    """Labels, and texts beside them."""
    start = history.start
    yield from _fact("model", start.get("model"))
    if summary is not None and summary.parameters["trained"].tensors:
        frozen = summary.parameters["frozen"]
        kept = f"; frozen: {amount(frozen)}" if frozen.tensors else ""
        yield "trained", amount(summary.parameters["trained"]) + kept
    yield from _recipe(start, summary)
    for label in ("data", "validation", "batch_size", "seed"):
        yield from _fact(label.replace("_", " "), config.get(label))
    epochs = start.get("epochs")
    if isinstance(epochs, int):
        each = f" of {quantity(history.steps_per_epoch, 'step')}" if history.steps_per_epoch else ""
        yield "planned", quantity(epochs, "epoch") + each
    ran = [setting(start[key]) for key in ("engine", "device") if start.get(key)]
    if ran:
        yield "ran on", ", ".join(ran)


def _recipe(start: dict[str, Any], summary: Summary | None) -> Iterator[tuple[str, str]]:
    """As the model has it; as the log has it where there is no model."""
    if summary is not None and summary.steps:
        label = ""
        for name, content in step_rows(summary, summary.steps[0]):
            label = name or label
            if label in _WANTED_ROWS:
                yield name, content if isinstance(content, str) else ", ".join(content)
        return
    recipe = start.get("recipe")
    for name, content in recipe.items() if isinstance(recipe, dict) else ():
        yield from _fact(str(name), content)


def _fact(label: str, value: Any) -> Iterator[tuple[str, str]]:
    if value is not None and value != "" and value != [] and value != {}:
        with suppress(RecursionError):
            yield label, setting(value)
