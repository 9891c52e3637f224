"""The loop: batches in, metrics out, and a folder from which the run can go on at any time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from onward.errors import TrainingError
from onward.model.state import states
from onward.run import Engine
from onward.train.data import Batch, Batches
from onward.train.folder import BEST, LAST, LOG, Run
from onward.train.log import Log
from onward.train.metrics import METRICS, Metric, make
from onward.train.progress import Progress
from onward.train.tensorboard import EventWriter

BINS = 30


@dataclasses.dataclass(frozen=True)
class Measures:
    """What is measured on validation data, and on which output and input of the model."""

    names: tuple[str, ...] = ()
    output: str | None = None
    target: str | None = None

    def make(self) -> dict[str, Metric]:
        return {name: make(name) for name in self.names if name != "perplexity"}


@dataclasses.dataclass(frozen=True)
class Settings:
    epochs: int
    monitor: str = "loss"
    """What decides which model is the best: a metric of the validation data."""
    patience: int | None = None
    """Epochs without an improvement after which the run ends."""
    save_every: float = 60.0
    """Seconds after which the state is saved, also within an epoch."""
    tensorboard: bool = False
    quiet: bool = False


@dataclasses.dataclass
class Place:
    """Where a run stands: it is saved with the state, and is all that is needed to go on."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that are done."""
    samples: int = 0
    best: float | None = None
    since_best: int = 0

    @classmethod
    def of(cls, fact: Mapping[str, Any] | None) -> Place:
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in (fact or {}).items() if name in known})


class Loop:
    """One run, from where it stands to its end."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        batches: Batches,
        validation: Batches | None,
        measures: Measures,
        settings: Settings,
    ):
        self.run, self.engine, self.batches, self.validation = run, engine, batches, validation
        self.measures, self.settings = measures, settings
        self.at = Place.of(engine.model.step(engine.index).fact("train.progress"))
        self._interrupted = threading.Event()

    def __call__(self, opening: dict[str, Any]) -> str:
        """Go on until the end; why it ended. `opening` is what the log says first."""
        total = self.batches.per_epoch
        with contextlib.ExitStack() as stack:
            self.log = stack.enter_context(Log(self.run.path / LOG))
            self.progress = stack.enter_context(
                Progress(self.settings.epochs, total, done=self.at.step, quiet=self.settings.quiet)
            )
            self.board = (
                stack.enter_context(EventWriter(self.run.path, step=self.at.step))
                if self.settings.tensorboard
                else None
            )
            stack.enter_context(self._until_interrupted())
            started = time.perf_counter()
            if self.at.step:
                self.log.write("resume", step=self.at.step, time=time.time())
            else:
                self.log.write("start", time=time.time(), steps_per_epoch=total, epochs=self.settings.epochs, **opening)
                self._save()
                self._validate()
            try:
                reason = self._epochs()
            except TrainingError:
                self._end("not_finite", started)
                raise
            self._end(reason, started)
            return reason

    # ---- epochs and steps --------------------------------------------------------------------------------------------

    def _epochs(self) -> str:
        for epoch in range(self.at.epoch, self.settings.epochs):
            if not self._epoch(epoch):
                return "interrupted"
            self.at.epoch, self.at.batch = epoch + 1, 0
            self._look_at_weights()
            results = self._validate()
            self.progress.epoch(results)
            self._save()
            patience = self.settings.patience
            if patience is not None and self.at.since_best >= patience:
                return "early_stopping"
            if self._interrupted.is_set():
                return "interrupted" if epoch + 1 < self.settings.epochs else "finished"
        return "finished"

    def _epoch(self, epoch: int) -> bool:
        """The batches of an epoch that are left; whether it was finished."""
        saved = time.monotonic()
        first = True
        for batch in self.batches.epoch(epoch, start=self.at.batch):
            if first:
                self._look_at_gradients(batch)
                first = False
            self._step(epoch, batch)
            if self._interrupted.is_set():
                return self.at.batch == self.batches.per_epoch
            if time.monotonic() - saved > self.settings.save_every:
                self._save()
                saved = time.monotonic()
        return True

    def _step(self, epoch: int, batch: Batch) -> None:
        start = time.perf_counter()
        metrics = {name: float(value) for name, value in self.engine.step(batch).items() if value.size == 1}
        seconds = time.perf_counter() - start
        loss = metrics["loss"]
        if not math.isfinite(loss):
            self.engine.step_back()
            raise TrainingError(
                f"the loss of step {self.at.step + 1} is {loss}: the state before it was kept in `{self.run.path}`",
                hint="try a smaller learning rate or `--clip norm:1`, and look for NaN in the data",
            )
        samples = _samples(batch)
        self.at.step += 1
        self.at.batch += 1
        self.at.samples += samples
        step = self.at.step
        self.log.write("step", step=step, epoch=epoch, samples=self.at.samples, seconds=seconds, **metrics)
        if self.board is not None:
            self.board.scalars(step, {f"train/{name}": value for name, value in metrics.items()})
        self.progress.step(loss, samples)

    # ---- now and then ------------------------------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        """Measure the model on the validation data, and keep it if it is the best so far."""
        if self.validation is None:
            self.run.export(self.engine.updated(), LAST)
            return {}
        results = evaluated(self.engine, self.validation.epoch(0), self.measures)
        self.log.write("validation", step=self.at.step, epoch=self.at.epoch, **results)
        if self.board is not None:
            self.board.scalars(self.at.step, {f"validation/{name}": value for name, value in results.items()})
        value = results.get(self.settings.monitor, math.nan)
        best = self.at.best
        if math.isfinite(value) and (best is None or _is_better(self.settings.monitor, value, best)):
            self.at.best, self.at.since_best = value, 0
            self.run.export(self.engine.updated(), BEST)
            self.log.write("save", step=self.at.step, best=True)
        else:
            self.at.since_best += 1
        return results

    def _look_at_gradients(self, batch: Batch) -> None:
        norms = {name: float(np.linalg.norm(g.astype(np.float64))) for name, g in self.engine.gradients(batch).items()}
        self.log.write("gradients", step=self.at.step, norms=norms)

    def _look_at_weights(self) -> None:
        parameters = {s.name for s in states(self.engine.model, self.engine.index) if s.role == "parameter"}
        histograms = {}
        for name, array in self.engine.state().items():
            if name in parameters and np.isfinite(array).all():
                counts, edges = np.histogram(array.astype(np.float64), bins=BINS)
                histograms[name] = {"edges": edges.tolist(), "counts": counts.tolist()}
                if self.board is not None:
                    self.board.histogram(self.at.step, name, edges.tolist(), counts.tolist())
        self.log.write("weights", step=self.at.step, histograms=histograms)

    def _save(self) -> None:
        self.run.save(self.engine.updated(), dataclasses.asdict(self.at))
        self.log.write("save", step=self.at.step, best=False)

    def _end(self, reason: str, started: float) -> None:
        model = self.engine.updated()
        self.run.save(model, dataclasses.asdict(self.at))
        self.run.export(model, LAST)
        self.log.write("end", step=self.at.step, reason=reason, seconds=time.perf_counter() - started)

    @contextlib.contextmanager
    def _until_interrupted(self) -> Iterator[None]:
        """The first Ctrl-C lets the step finish; a second one ends the program as usual."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            signal.signal(signal.SIGINT, before)
            self._interrupted.set()
            self.progress.say("finishing the step, then saving; Ctrl-C again to stop at once")

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def evaluated(engine: Engine, batches: Iterable[Batch], measures: Measures) -> dict[str, float]:
    """The metrics of a model over all batches; the loss is the mean over samples."""
    metrics = measures.make()
    total, count = 0.0, 0
    for batch in batches:
        results = engine.evaluate(batch)
        samples = _samples(batch)
        total, count = total + float(results["loss"]) * samples, count + samples
        if metrics and measures.output is not None and measures.target is not None:
            for metric in metrics.values():
                metric.add(results[measures.output], batch[measures.target])
    loss = total / count if count else math.nan
    found = {"loss": loss} | {name: metric.result() for name, metric in metrics.items()}
    if "perplexity" in measures.names:
        found["perplexity"] = math.exp(min(loss, 700.0))
    return found


def _is_better(monitor: str, value: float, best: float) -> bool:
    name = monitor.partition(":")[0]
    higher = name in METRICS and getattr(METRICS[name], "higher_is_better", True)
    return value > best if higher else value < best


def _samples(batch: Batch) -> int:
    return max((len(array) for array in batch.values() if array.ndim), default=1)
