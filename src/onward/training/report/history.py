"""The history of a run, put together from its log. Whatever a line lacks is left out; nothing in it is believed."""

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

_KNOWN = {"event", "step", "epoch", "time", "lr", "samples", "seconds", "best"}
"""What is no metric in the events `step` and `validation`."""
_MOST_SNAPSHOTS = 96
_LARGEST, _LONGEST = 2**53, 1e10
"""Steps beyond which floats do not count, and seconds, which are 300 years."""


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
    """Something that happened at a moment of the run, other than training itself."""

    kind: str
    step: int
    text: str
    time: float | None = None


@dataclass
class History:
    """What a log tells. Steps that were made again after a resume are there once, as they were made last."""

    start: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Series] = field(default_factory=dict)
    validation: dict[str, Series] = field(default_factory=dict)
    epochs: Series = field(default_factory=Series)
    """The mean loss of each epoch, at its end."""
    rate: Series = field(default_factory=Series)
    speed: Series = field(default_factory=Series)
    """Samples per second."""
    norms: dict[str, Series] = field(default_factory=dict)
    weights: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Steps, and the histograms of parameters at them: all, or evenly chosen ones where there are many."""
    events: list[Event] = field(default_factory=list)
    reason: str | None = None
    """Why the run ended; None where it goes on, or was killed."""
    steps_per_epoch: int | None = None
    recounts: list[tuple[int, int, int]] = field(default_factory=list)
    """Where other data began: the step, the epochs until then, and the steps of an epoch from there."""
    failure: str = ""
    """What was not finite, in words."""
    step: int = 0
    """Steps made."""
    seconds: float = 0.0
    best: int | None = None
    """The step after which the best model was saved."""
    _session: float = 0.0
    _seen: tuple[int, float] | None = (0, 0.0)
    """The last step that told how many samples were seen so far, and how many."""

    def read(self, events: Iterable[dict[str, Any]]) -> History:
        for event in events:
            step = _whole(event.get("step", 0))
            reader = getattr(self, f"_read_{event.get('event')}", None)
            if reader is not None and step is not None:
                reader(step, event)
        self.seconds += self._session
        return self

    def epochs_at(self, step: float) -> float | None:
        """Return how many epochs were made after a step; None where nobody knows how long they are."""
        begin, epochs, length = self._count_at(step)
        return epochs + (step - begin) / length if length else None

    def _count_at(self, step: float) -> tuple[int, int, int | None]:
        counts = [(0, 0, self.steps_per_epoch), *self.recounts]
        return [one for one in counts if one[0] < step or not one[0]][-1]

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
        if self.steps_per_epoch is None and event.get("epoch") == 1:  # nobody knew, but now the first one is over
            self.steps_per_epoch = step - 1 or None
        for name in event.keys() - _KNOWN:
            self._add(self.train, name, step, event[name])
        if (rate := _number(event.get("lr"))) is not None:
            self.rate.add(step, rate)
        self._add_speed(step, event)

    def _add_speed(self, step: int, event: dict[str, Any]) -> None:
        """Samples of a step over its time. Not each step need have a line, so that samples are those of several."""
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
        for name in event.keys() - _KNOWN:
            self._add(self.validation, name, step, event[name])

    def _read_save(self, step: int, event: dict[str, Any]) -> None:
        """The state was saved, or the best model, or one and then the other, which is told once."""
        is_best = event.get("best") is True
        if is_best:
            self.best = step
        last = self.events[-1] if self.events else None
        if last and last.kind == "save" and last.step == step:
            is_best = is_best or last.text != "saved"
            self.events.pop()
        self._add_event("save", step, "saved, the best so far" if is_best else "saved", event)

    def _read_resume(self, step: int, event: dict[str, Any]) -> None:
        self.seconds, self._session = self.seconds + self._session, 0.0
        self.reason = None
        epoch, batch, length = (_whole(event.get(name)) for name in ("epoch", "batch", "steps_per_epoch"))
        if epoch is not None and batch is not None and length:
            begin = step - batch
            self.recounts = [one for one in self.recounts if one[0] < begin]
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

    def _add_event(self, kind: str, step: int, text: str, event: dict[str, Any]) -> None:
        time = _number(event.get("time"))
        self.events.append(Event(kind, step, text, time if time is not None and math.isfinite(time) else None))

    def _forget_from(self, step: int) -> None:
        """The run went back to its last save: what came after it is no part of its history."""
        for series in (
            self.rate,
            self.speed,
            self.epochs,
            *self.train.values(),
            *self.validation.values(),
            *self.norms.values(),
        ):
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
"""Why a run ended: in a word, whether that is good, and as an event."""


def _spell(value: float | None) -> str:
    """A number that is not finite, as people write it."""
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
    resumes = sum(event.kind == "resume" for event in history.events)
    sittings = f"in {resumes + 1} sittings" if resumes else "in one go"
    yield Card("time", duration(history.seconds), sittings)
    if history.speed:
        middle = statistics.median(history.speed.values)
        yield Card("throughput", f"{middle:,.0f}" if middle >= 10 else short(middle), "samples per second, median")
    if summary is not None and summary.parameters["trained"].tensors:
        part = summary.parameters["trained"]
        yield Card("parameters", f"{part.numbers:,}", f"trained, in {quantity(part.tensors, 'tensor')}")
    elif isinstance(number := history.start.get("parameters"), int):
        yield Card("parameters", f"{number:,}", "trained")


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
