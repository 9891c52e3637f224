"""Callbacks: notified of the progress of a run, and able to stop it. Onward's own are here, too."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.recipe.metrics import Measures
from onward.training.config import Config
from onward.training.folder import Folder
from onward.training.log import Log
from onward.training.run import BEST, Position
from onward.training.sharded_saves import BackgroundTask, ShardedSaves

if TYPE_CHECKING:
    from onward.engines import Engine
    from onward.training.data import Batch
    from onward.training.run import Position, Run
    from onward.training.tensorboard import EventWriter


@dataclasses.dataclass
class Status:
    """State of a run in progress: position, results of the last step, and actions for callbacks."""

    run: Run
    """The run, with its folder."""
    engine: Engine
    """The engine. `engine.updated()` returns a copy of the training model in its current state."""
    place: Position
    """Position of the run, as it is saved: `step`, `epoch`, `samples`, `best` ..."""
    epochs: int
    """Total number of epochs."""
    steps_per_epoch: int | None
    """Steps per epoch; None if unknown."""
    log: Callable[..., None]
    """Add an event to the log of the run: `status.log("note", step=status.step, text="...")`."""
    say: Callable[[str], None]
    """Print a line above the progress bar."""
    batches: tuple[Batch, ...] = ()
    """Batches of the last step: one, or those of a round of steps."""
    samples: int = 0
    """Number of samples in the last step."""
    seconds: float = 0.0
    """Duration of the last step; at the end, the time since the run was started or resumed."""
    loss: float = math.nan
    """Loss of the last step; after an epoch, the mean over its samples."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the last step: `loss`, and other outputs of the training model, such as `lr`."""
    results: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Latest results on validation data, if any: `loss` and metrics."""
    reason: str | None = None
    """Reason for the end: `"finished"`, `"early_stopping"`, `"stopped"`, `"interrupted"`,
    `"not_finite"` or `"failed"`.
    """

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return self.place.step

    @property
    def epoch(self) -> int:
        """Return the number of finished epochs."""
        return self.place.epoch

    def stop(self, reason: str = "stopped") -> None:
        """Stop the run after this step or epoch. It is saved and can be resumed."""
        self.reason = self.reason or reason


class Callback:
    """Base class of callbacks. Override the methods you need.

    Pass it with `onward.train(..., callbacks=[MyCallback()])`. All methods get the same `Status`.
    An exception saves the state and ends the run.
    """

    def start(self, status: Status) -> Any:
        """Handle the start of a run, after its first validation, or a resume (`status.step > 0`)."""

    def step(self, status: Status) -> Any:
        """Handle the end of a step."""

    def epoch(self, status: Status) -> Any:
        """Handle the end of an epoch, after its validation."""

    def end(self, status: Status) -> Any:
        """Handle the end of the run, after its save or an error. `status.reason` is the reason."""


# ---- Onward's own callbacks ------------------------------------------------------------------------------------------


_BINS = 30
_GRADIENTS_EVERY = 500
"""Steps between two measurements of gradients, in longer epochs."""
_SHORT = 1.0
"""Seconds. Shorter epochs are not saved one by one."""


class NotFiniteError(Exception):
    """A value is NaN or infinite. `loss` is set if it is the loss."""

    def __init__(self, message: str, loss: float | None = None):
        super().__init__(message)
        self.loss = loss


class LogCallback(Callback):
    """Writes the events of a run to its log."""

    def __init__(self, config: Config, notes: Sequence[str] = ()):
        self._config, self._notes, self._time = config, notes, time.time()

    def start(self, status: Status) -> None:
        if status.place.log:
            status.log("save", step=status.step, best=False)  # the loaded file proves this save
            counts = {"epoch": status.epoch, "batch": status.place.batch, "steps_per_epoch": status.steps_per_epoch}
            status.log("resume", step=status.step, time=time.time(), **counts)
            self._write_notes(status)
            return
        config, engine = self._config, status.engine
        parameters = [state.value.const_value for state in engine.states() if state.role == "parameter"]
        status.log(
            "start",
            time=self._time,
            steps_per_epoch=status.steps_per_epoch,
            epochs=status.epochs,
            model=config.title,
            parameters=sum(tensor.size for tensor in parameters if tensor is not None),
            recipe=engine.model.step().fact("train.recipe"),
            augmentation=engine.model.step().fact("train.augmentation"),
            config=config.to_json(),
            device=config.device,
            engine=config.engine,
        )
        self._write_notes(status)
        self._write_results(status)

    def step(self, status: Status) -> None:
        at, seconds = status.place, status.seconds
        status.log("step", step=at.step, epoch=at.epoch, samples=at.samples, seconds=seconds, **status.metrics)

    def epoch(self, status: Status) -> None:
        status.log("epoch", step=status.step, epoch=status.epoch, loss=status.loss)
        self._write_results(status)

    def end(self, status: Status) -> None:
        loss = {} if math.isfinite(status.loss) or status.reason != "not_finite" else {"loss": status.loss}
        status.log("end", step=status.step, reason=status.reason, seconds=status.seconds, **loss)

    def _write_notes(self, status: Status) -> None:
        for note in self._notes:
            status.log("note", step=status.step, text=note)

    def _write_results(self, status: Status) -> None:
        if status.results:
            status.log("validation", step=status.step, epoch=status.epoch, **status.results)


class StatisticsCallback(Callback):
    """Logs gradient norms once per epoch or 500 steps, and weight histograms once per epoch."""

    def __init__(self, board: EventWriter | None):
        self._board, self._has_warned = board, False

    def step(self, status: Status) -> None:
        if status.place.batch == 1 or status.step % _GRADIENTS_EVERY == 0:
            gradients = status.engine.gradients(status.batches[0])
            norms = {name: float(np.linalg.norm(g.astype(np.float64))) for name, g in gradients.items()}
            status.log("gradients", step=status.step, norms=norms)
            if norms and not any(norms.values()) and not self._has_warned:
                self._has_warned = True
                text = f"all gradients of step {status.step} are 0, as behind a Sigmoid that saturates"
                status.say(text)
                status.log("note", step=status.step, text=text)

    def epoch(self, status: Status) -> None:
        parameters = {state.name for state in status.engine.states() if state.role == "parameter"}
        histograms = {}
        for name, array in status.engine.state().items():
            if name in parameters and np.isfinite(array).all():
                counts, edges = np.histogram(array.astype(np.float64), bins=_BINS)
                histograms[name] = {"edges": edges.tolist(), "counts": counts.tolist()}
                if self._board is not None:
                    self._board.histogram(status.step, name, edges.tolist(), counts.tolist())
        status.log("weights", step=status.step, histograms=histograms)


class BestModelCallback(Callback):
    """Saves the model with the best validation result, and stops early after `patience` epochs."""

    def __init__(self, folder: Folder, measures: Measures, patience: int | None):
        self._folder, self._measures, self._patience = folder, measures, patience

    def start(self, status: Status) -> None:
        self.epoch(status)  # the original model counts; a resumed run has no results here

    def epoch(self, status: Status) -> None:
        at, value = status.place, status.results.get(self._measures.monitor)
        if value is not None and self._measures.is_better(value, at.best):
            at.best, at.since_best = value, 0
            with status.engine.snapshot() as model:
                if model is not None:
                    self._folder.export(model, BEST, status.results)
            status.log("save", step=at.step, best=True)
        elif value is not None and at.epoch:
            at.since_best += 1
        if self._patience is not None and at.since_best >= self._patience:
            status.stop("early_stopping")


class Saver(Callback):
    """Saves the state at intervals. It is the last callback, to save what the others changed."""

    def __init__(self, folder: Folder, every: float, at: Position):
        self._folder, self._every = folder, every
        self.files: list[Log | EventWriter] = []
        """Files to flush before a save."""
        self._saved_at = time.monotonic()
        self.saved = (at.step, at.epoch, at.batch) if at.log else None
        """Position at the last save: steps, epochs, batches."""
        self._sharded: ShardedSaves | None = None
        self._background: tuple[BackgroundTask, tuple[int, int, int]] | None = None
        """A save in the background, and its position."""

    def start(self, status: Status) -> None:
        self.save(status)

    def step(self, status: Status) -> None:
        if self._background is not None and self._background[0].is_done:
            self._finish(status)
        self._save_after(self._every, status)

    def epoch(self, status: Status) -> None:
        self._save_after(min(self._every, _SHORT), status)

    def end(self, status: Status) -> None:
        """Wait for the last save, and export its inference model."""
        self._finish(status)
        self._folder.export_last()

    def _save_after(self, seconds: float, status: Status) -> None:
        """Save if the last save was that long ago, by the clock of the first process."""
        group = status.engine.group
        (is_due,) = group.any(group.is_first and time.monotonic() - self._saved_at >= seconds)
        if is_due:
            self.save(status)

    def save(self, status: Status) -> None:
        """Save, unless this position is saved. Sharded state is written while steps continue."""
        now, engine = status.place, status.engine
        position = (now.step, now.epoch, now.batch)
        if position == (self._background[1] if self._background else self.saved):
            return
        self._finish(status)
        if now.step and (name := engine.find_not_finite()):
            raise NotFiniteError(f"`{name}` holds NaN or infinity after step {now.step:,}")
        for file in self.files:
            file.flush()
        self._folder.note_lengths(now)
        self._saved_at = time.monotonic()
        if now.step and (parts := engine.shards()) is not None:
            self._sharded = self._sharded or ShardedSaves(self._folder, engine)
            self._background = self._sharded.begin(parts, now), position
            return
        # Before the first step, the tensors are still in the user's files.
        with engine.snapshot() if now.step else contextlib.nullcontext(engine.model) as model:
            if model is not None:
                self._folder.save(model, now)
        self._saved_at = time.monotonic()
        self._note(status, position)

    def _finish(self, status: Status) -> None:
        """Wait for a save in the background, if any."""
        if self._background is not None:
            (save, position), self._background = self._background, None
            save.finish()
            self._note(status, position)

    def _note(self, status: Status, position: tuple[int, int, int]) -> None:
        self.saved = position
        status.log("save", step=position[0], best=False)
