"""History of a run, from its log. Missing values are left out, and every value is checked."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onward.errors import first_line
from onward.inspect import Summary, describe
from onward.inspect.formatting import amount, quantity, setting
from onward.inspect.render import step_rows
from onward.training.progress import duration, short

_NOT_METRICS = {"event", "step", "epoch", "time", "lr", "samples", "seconds", "best"}
"""Keys of the events `step` and `validation` that are not metrics."""
_MOST_SNAPSHOTS = 96
_LARGEST, _LONGEST = 2**53, 1e10
"""Largest step (floats are exact up to here), and most seconds (300 years)."""


@dataclass
class Series:
    """Values by step, in the order of steps."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        if self.steps and step <= self.steps[-1]:
            self.forget(step)
        self.steps.append(step)
        self.values.append(value)

    def forget(self, step: int) -> None:
        """Drop this step and later ones."""
        start = bisect_left(self.steps, step)
        del self.steps[start:], self.values[start:]

    def at(self, step: float) -> float | None:
        index = bisect_left(self.steps, step)
        return self.values[index] if index < len(self.steps) and self.steps[index] == step else None

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Event:
    """Start, save, resume, note or end of a run."""

    name: str
    step: int
    text: str
    time: float | None = None


@dataclass
class History:
    """Series and events of a log. Steps repeated after a resume count once, with their last values."""

    start: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Series] = field(default_factory=dict)
    validation: dict[str, Series] = field(default_factory=dict)
    epochs: Series = field(default_factory=Series)
    """Mean loss of each epoch, at its end."""
    rate: Series = field(default_factory=Series)
    speed: Series = field(default_factory=Series)
    """Samples per second."""
    norms: dict[str, Series] = field(default_factory=dict)
    weights: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Steps, and histograms of parameters; every second one is dropped when there are too many."""
    events: list[Event] = field(default_factory=list)
    reason: str | None = None
    """Why the run ended; None if it is still training, or was killed."""
    steps_per_epoch: int | None = None
    recounts: list[tuple[int, int, int]] = field(default_factory=list)
    """Resumes with other data: the step, the epochs until then, and the steps per epoch from there."""
    failure: str = ""
    """Message about a loss that is not finite."""
    step: int = 0
    seconds: float = 0.0
    best: int | None = None
    """Step of the best model."""
    _session: float = 0.0
    _seen: tuple[int, float] | None = (0, 0.0)
    """The last step that recorded the number of samples so far, and that number."""

    def read(self, events: Iterable[dict[str, Any]]) -> History:
        for event in events:
            step = _whole(event.get("step", 0))
            reader = getattr(self, f"_read_{event.get('event')}", None)
            if reader is not None and step is not None:
                reader(step, event)
        self.seconds += self._session
        return self

    def epochs_at(self, step: float) -> float | None:
        """Return the number of epochs after a step, or None if their length is unknown."""
        begin, epochs, length = self._count_at(step)
        return epochs + (step - begin) / length if length else None

    def _count_at(self, step: float) -> tuple[int, int, int | None]:
        counts = [(0, 0, self.steps_per_epoch), *self.recounts]
        return [count for count in counts if count[0] < step or not count[0]][-1]

    # ---- events ------------------------------------------------------------------------------------------------------

    def _read_start(self, step: int, event: dict[str, Any]) -> None:
        self.start = event
        self.steps_per_epoch = _whole(event.get("steps_per_epoch")) or None
        self._add_event("start", step, "started", event)

    def _read_step(self, step: int, event: dict[str, Any]) -> None:
        loss = self.train.get("loss")
        if loss and step <= loss.steps[-1]:
            self._forget_from(step)
        self.reason = None
        self.step = step
        if (
            self.steps_per_epoch is None and event.get("epoch") == 1
        ):  # unknown at the start; now the first epoch is over
            self.steps_per_epoch = step - 1 or None
        for name in event.keys() - _NOT_METRICS:
            self._add(self.train, name, step, event[name])
        if (rate := _number(event.get("lr"))) is not None:
            self.rate.add(step, rate)
        self._add_speed(step, event)

    def _add_speed(self, step: int, event: dict[str, Any]) -> None:
        """Add the samples per second of a step. The log may skip steps, so samples are divided by their number."""
        seconds, samples = _seconds(event.get("seconds")), _number(event.get("samples"))
        if seconds is None:
            return
        self._session += seconds
        if samples is None:
            return
        if self._seen and step > self._seen[0] and samples > self._seen[1]:
            self.speed.add(step, (samples - self._seen[1]) / (step - self._seen[0]) / seconds)
        self._seen = (step, samples)

    def _read_gradients(self, step: int, event: dict[str, Any]) -> None:
        for name, value in _entries(event.get("norms")):
            self._add(self.norms, name, step, value)

    def _read_weights(self, step: int, event: dict[str, Any]) -> None:
        self.weights = [item for item in self.weights if item[0] < step]
        self.weights.append((step, dict(_entries(event.get("histograms")))))
        if len(self.weights) > 2 * _MOST_SNAPSHOTS:
            del self.weights[1::2]

    def _read_epoch(self, step: int, event: dict[str, Any]) -> None:
        if (loss := _number(event.get("loss"))) is not None:
            self.epochs.add(step, loss)

    def _read_validation(self, step: int, event: dict[str, Any]) -> None:
        for name in event.keys() - _NOT_METRICS:
            self._add(self.validation, name, step, event[name])

    def _read_save(self, step: int, event: dict[str, Any]) -> None:
        """Add a save of the state or of the best model; both after the same step are one event."""
        is_best = event.get("best") is True
        if is_best:
            self.best = step
        last = self.events[-1] if self.events else None
        if last and last.name == "save" and last.step == step:
            is_best = is_best or last.text != "saved"
            self.events.pop()
        self._add_event("save", step, "saved, the best so far" if is_best else "saved", event)

    def _read_resume(self, step: int, event: dict[str, Any]) -> None:
        self.seconds, self._session = self.seconds + self._session, 0.0
        self.reason = None
        epoch, batch, length = (_whole(event.get(name)) for name in ("epoch", "batch", "steps_per_epoch"))
        if epoch is not None and batch is not None and length:
            begin = step - batch
            self.recounts = [count for count in self.recounts if count[0] < begin]
            if self.epochs_at(begin) != epoch or self._count_at(begin + 1)[2] != length:
                self.recounts.append((begin, epoch, length))
        self._add_event("resume", step, f"resumed after {step:,} steps", event)

    def _read_note(self, step: int, event: dict[str, Any]) -> None:
        self._add_event("note", step, str(event.get("text", "")), event)

    def _read_end(self, step: int, event: dict[str, Any]) -> None:
        self.step = max(self.step, step)
        self.reason = str(event.get("reason", "finished"))
        seconds = _seconds(event.get("seconds"))
        _, _, text = ENDS.get(self.reason, ("", "", f"ended: {self.reason}"))
        if self.reason == "not_finite":
            self.failure = f"the loss of step {step + 1:,} was {_spell(_number(event.get('loss')))}"
            text = f"stopped: {self.failure}"
        if seconds is not None:
            self._session = seconds
            text += f" (after {duration(seconds)})"
        self._add_event(self.reason, step, text, event)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _add(self, to: dict[str, Series], name: str, step: int, value: Any) -> None:
        if (number := _number(value)) is not None:
            to.setdefault(name, Series()).add(step, number)

    def _add_event(self, name: str, step: int, text: str, event: dict[str, Any]) -> None:
        time = _number(event.get("time"))
        self.events.append(Event(name, step, text, time if time is not None and math.isfinite(time) else None))

    def _forget_from(self, step: int) -> None:
        """Drop this step and later ones: the run was resumed from an earlier save."""
        by_name = (self.train, self.validation, self.norms)
        for series in (self.rate, self.speed, self.epochs, *(series for group in by_name for series in group.values())):
            series.forget(step)
        self.weights = [item for item in self.weights if item[0] < step]
        if self.best is not None and self.best >= step:
            self.best = None
        self._seen = None


ENDS = {
    "finished": ("finished", "good", "finished"),
    "early_stopping": ("stopped early", "good", "stopped early: no longer getting better"),
    "stopped": ("stopped", "good", "stopped by a callback"),
    "interrupted": ("interrupted", "open", "interrupted, and saved"),
    "failed": ("failed", "bad", "failed, and saved"),
    "not_finite": ("loss not finite", "bad", ""),
}
"""Reason for the end of a run -> its name, its style in the page, and its text as an event."""


def _spell(value: float | None) -> str:
    if value is None or math.isfinite(value):
        return "not finite"
    return "NaN" if math.isnan(value) else "infinite" if value > 0 else "minus infinity"


def _entries(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _seconds(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and 0 < number < _LONGEST else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < _LARGEST else None


# ---- headline --------------------------------------------------------------------------------------------------------


_RECIPE_ROWS = {"loss", "optimizer", "schedule", "clipping", "accumulate", "average", "loss scale"}


def summary_of(folder: Path) -> tuple[Summary | None, str | None]:
    """Return the description of the training model, or a remark that it is missing or damaged."""
    path = folder / "training.onnx"
    if not path.exists():
        return None, "training.onnx is missing: this page shows the log only."
    try:
        return describe(path), None
    except Exception as error:  # a report without the model is better than none
        return None, f"training.onnx cannot be read ({first_line(error)}): this page shows the log only."


def best_step(history: History) -> int | None:
    """Return the step of the best model, or else of the lowest validation loss."""
    if history.best is not None:
        return history.best
    loss = history.validation.get("loss", Series())
    good = [(value, step) for step, value in zip(loss.steps, loss.values, strict=True) if math.isfinite(value)]
    return int(min(good)[1]) if good else None


# ---- cards -----------------------------------------------------------------------------------------------------------


def cards(history: History, summary: Summary | None) -> Iterator[tuple[str, str, str]]:
    """Yield labels, values and notes of the main results."""
    metrics = sorted((name for name, series in history.validation.items() if series), key=lambda name: name == "loss")
    for name in metrics[:3]:
        yield _result_card(
            f"validation {name}" if name == "loss" else name, history.validation[name], best_step(history)
        )
    loss = history.train.get("loss")
    if loss and (late := _late(loss)) is not None:
        value, of = (history.epochs.values[-1], "epoch") if history.epochs else (late, "steps")
        yield ("training loss", short(value), f"mean of the last {of}; first {short(loss.values[0])}")
    if history.step:
        epochs = history.epochs_at(history.step)
        yield ("steps", f"{history.step:,}", f"{epochs:.3g} epochs" if epochs is not None else "")
    resumes = sum(event.name == "resume" for event in history.events)
    sittings = f"in {resumes + 1} sittings" if resumes else "in one go"
    yield ("time", duration(history.seconds), sittings)
    if history.speed:
        middle = statistics.median(history.speed.values)
        yield ("throughput", f"{middle:,.0f}" if middle >= 10 else short(middle), "samples per second, median")
    if summary is not None and summary.parameters["trained"].tensors:
        trained = summary.parameters["trained"]
        yield ("parameters", f"{trained.numbers:,}", f"trained, in {quantity(trained.tensors, 'tensor')}")
    elif isinstance(number := history.start.get("parameters"), int):
        yield ("parameters", f"{number:,}", "trained")


def _result_card(label: str, series: Series, at: int | None) -> tuple[str, str, str]:
    best, last = series.at(at) if at is not None else None, series.values[-1]
    if best is None:
        return (label, short(last), "at the end")
    note = f"best model, after step {at:,}"
    return (label, short(best), note if best == last else f"{note}; last {short(last)}")


def _late(series: Series) -> float | None:
    """Return the mean of the finite values in the last twentieth, or in the last ten if those are more."""
    late = [value for value in series.values[-max(len(series) // 20, 10) :] if math.isfinite(value)]
    return sum(late) / len(late) if late else None


# ---- facts -----------------------------------------------------------------------------------------------------------


def facts(history: History, config: dict[str, Any], summary: Summary | None) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about the model, the recipe and the run."""
    start = history.start
    yield from _fact("model", start.get("model"))
    if summary is not None and summary.parameters["trained"].tensors:
        frozen = summary.parameters["frozen"]
        others = f"; frozen: {amount(frozen)}" if frozen.tensors else ""
        yield "trained", amount(summary.parameters["trained"]) + others
    if summary is not None and summary.steps:
        yield from recipe_rows(summary)
    elif isinstance(recipe := start.get("recipe"), dict):
        for name, content in recipe.items():
            yield from _fact(str(name), content)
    for label in ("data", "validation", "batch_size", "seed"):
        yield from _fact(label.replace("_", " "), config.get(label))
    epochs = start.get("epochs")
    if isinstance(epochs, int):
        length = f" of {quantity(history.steps_per_epoch, 'step')}" if history.steps_per_epoch else ""
        yield "planned", quantity(epochs, "epoch") + length
    ran = [setting(start[key]) for key in ("engine", "device") if start.get(key)]
    if ran:
        yield "ran on", ", ".join(ran)


def recipe_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows of the first step about its recipe. The label of further sections of a schedule is empty."""
    label = ""
    for name, content in step_rows(summary, summary.steps[0]):
        label = name or label
        if label in _RECIPE_ROWS:
            yield name, content if isinstance(content, str) else ", ".join(content)


def _fact(label: str, value: Any) -> Iterator[tuple[str, str]]:
    if value is not None and value != "" and value != [] and value != {}:
        with suppress(RecursionError):
            yield label, setting(value)
