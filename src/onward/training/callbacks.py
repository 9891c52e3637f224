"""Callbacks: told how a run goes, and able to stop it. What Onward itself watches runs with are callbacks, too."""

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
from onward.training.log import Log, NoLog
from onward.training.run import BEST, Place
from onward.training.sharded_saves import Background, ShardedSaves

if TYPE_CHECKING:
    from onward.engines import Engine
    from onward.training.data import Batch
    from onward.training.run import Place, Run
    from onward.training.tensorboard import EventWriter


@dataclasses.dataclass
class Status:
    """A run while it goes on: where it stands, what came out of the last step, and what one may ask for."""

    run: Run
    """Its folder."""
    engine: Engine
    """What trains. `engine.updated()` is a copy of the training model as it is now."""
    place: Place
    """Where it stands, as it is saved: `step`, `epoch`, `samples`, `best` ..."""
    epochs: int
    """How many there are to be."""
    steps_per_epoch: int | None
    """None where nobody knows it."""
    log: Callable[..., None]
    """Adds an event to the log of the run: `status.log("note", step=status.step, text="...")`."""
    say: Callable[[str], None]
    """Prints a line, above the bar of progress."""
    batches: tuple[Batch, ...] = ()
    """What the last step took: one batch, or those of a round of steps."""
    samples: int = 0
    """How many samples that were."""
    seconds: float = 0.0
    """How long the last step took; at the end, how long it took since the run was started or resumed."""
    loss: float = math.nan
    """Of the last step; after an epoch, the mean over its samples."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of the last step: `loss`, and what else the training model gives, such as `lr`."""
    results: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The latest on validation data, if there are any: `loss`, and metrics."""
    reason: str | None = None
    """Why it ends: `"finished"`, `"early_stopping"`, `"stopped"`, `"interrupted"`, `"not_finite"` or `"failed"`."""

    @property
    def step(self) -> int:
        """How many steps were made."""
        return self.place.step

    @property
    def epoch(self) -> int:
        """How many epochs were finished."""
        return self.place.epoch

    def stop(self, reason: str = "stopped") -> None:
        """Let the run end after this step or epoch. It is saved, and may be resumed."""
        self.reason = self.reason or reason


class Callback:
    """Told how a run goes: override what you need.

    `onward.train(..., callbacks=[MyCallback()])`. Each is called with the same `Status`. What it raises ends the run,
    whose state is saved before.
    """

    def start(self, status: Status) -> Any:
        """The run starts or goes on (then `status.step` is not 0); the model was validated as it is."""

    def step(self, status: Status) -> Any:
        """A step was made."""

    def epoch(self, status: Status) -> Any:
        """An epoch was finished, and validated."""

    def end(self, status: Status) -> Any:
        """The run is over and saved; `status.reason` says why. Also called after an error."""


# ---- watchers --------------------------------------------------------------------------------------------------------


_BINS = 30
_LOOK_EVERY = 500
"""Steps after which gradients are looked at again, in epochs that are longer."""
_SHORT = 1.0
"""Seconds. Epochs that are shorter are not saved one by one."""


class NotFiniteError(Exception):
    """What is not finite, and the loss if it is that."""

    def __init__(self, what: str, loss: float | None = None):
        super().__init__(what)
        self.loss = loss


class LogWatcher(Callback):
    """Writes what happens into the log of the run."""

    def __init__(self, log: Log | NoLog, config: Config, notes: Sequence[str] = ()):
        self._log, self._config, self._notes, self._time = log, config, notes, time.time()

    def start(self, status: Status) -> None:
        if status.place.log:
            self._log.write("save", step=status.step, best=False)  # as the file proves from which it goes on
            counts = {"epoch": status.epoch, "batch": status.place.batch, "steps_per_epoch": status.steps_per_epoch}
            self._log.write("resume", step=status.step, time=time.time(), **counts)
            self._write_notes(status)
            return
        config, engine = self._config, status.engine
        parameters = [state.value.const_value for state in engine.states() if state.role == "parameter"]
        self._log.write(
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
        self._log.write("step", step=at.step, epoch=at.epoch, samples=at.samples, seconds=seconds, **status.metrics)

    def epoch(self, status: Status) -> None:
        self._log.write("epoch", step=status.step, epoch=status.epoch, loss=status.loss)
        self._write_results(status)

    def end(self, status: Status) -> None:
        loss = {} if math.isfinite(status.loss) or status.reason != "not_finite" else {"loss": status.loss}
        self._log.write("end", step=status.step, reason=status.reason, seconds=status.seconds, **loss)

    def _write_notes(self, status: Status) -> None:
        for note in self._notes:
            self._log.write("note", step=status.step, text=note)

    def _write_results(self, status: Status) -> None:
        if status.results:
            self._log.write("validation", step=status.step, epoch=status.epoch, **status.results)


class StatisticsWatcher(Callback):
    """Looks closer: norms of gradients once in an epoch, or every 500 steps, and histograms of weights after it."""

    def __init__(self, board: EventWriter | None):
        self._board = board

    def step(self, status: Status) -> None:
        if status.place.batch == 1 or status.step % _LOOK_EVERY == 0:
            gradients = status.engine.gradients(status.batches[0])
            norms = {name: float(np.linalg.norm(g.astype(np.float64))) for name, g in gradients.items()}
            status.log("gradients", step=status.step, norms=norms)

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


class BestWatcher(Callback):
    """Keeps the model with the best results on validation data, and stops when it gets no better for long enough."""

    def __init__(self, folder: Folder, measures: Measures, patience: int | None):
        self._folder, self._measures, self._patience = folder, measures, patience

    def start(self, status: Status) -> None:
        self.epoch(status)  # the model as it was given is measured, too; one that goes on is not measured again

    def epoch(self, status: Status) -> None:
        at, value = status.place, status.results.get(self._measures.monitor)
        if value is not None and self._measures.is_better(value, at.best):
            at.best, at.since_best = value, 0
            with status.engine.snapshot() as model:
                if model is not None:
                    self._folder.export(model, BEST)
            status.log("save", step=at.step, best=True)
        elif value is not None and at.epoch:
            at.since_best += 1
        if self._patience is not None and at.since_best >= self._patience:
            status.stop("early_stopping")


class Saver(Callback):
    """Saves the state now and then. It comes last, so that what others note about the run is saved with it."""

    def __init__(self, folder: Folder, every: float, at: Place):
        self._folder, self._every = folder, every
        self.files: list[Log | EventWriter] = []
        """What is written out before it saves."""
        self._saved_at = time.monotonic()
        self.saved = (at.step, at.epoch, at.batch) if at.log else None
        """Where the run stood when it was last saved: steps, epochs, batches."""
        self._sharded: ShardedSaves | None = None
        self._under_way: tuple[Background, tuple[int, int, int]] | None = None
        """A save that goes on in the background, and where the run stood."""

    def start(self, status: Status) -> None:
        self.save(status)

    def step(self, status: Status) -> None:
        if self._under_way is not None and self._under_way[0].is_done:
            self._finish(status)
        self._save_after(self._every, status)

    def epoch(self, status: Status) -> None:
        self._save_after(min(self._every, _SHORT), status)

    def end(self, status: Status) -> None:
        """The last inference model is that of the state which was saved."""
        self._finish(status)
        self._folder.export_last()

    def _save_after(self, seconds: float, status: Status) -> None:
        """Save if that is so long ago, by the clock of the first of several processes."""
        group = status.engine.group
        (is_due,) = group.any(group.is_first and time.monotonic() - self._saved_at >= seconds)
        if is_due:
            self.save(status)

    def save(self, status: Status) -> None:
        """Save, unless that was done here already. What several processes hold is written while steps go on."""
        at, engine = status.place, status.engine
        here = (at.step, at.epoch, at.batch)
        if here == (self._under_way[1] if self._under_way else self.saved):
            return
        self._finish(status)
        if at.step and (strange := engine.find_not_finite()):
            raise NotFiniteError(f"`{strange}` holds NaN or infinity after step {at.step:,}")
        for file in self.files:
            file.flush()
        self._folder.note_lengths(at)
        self._saved_at = time.monotonic()
        if at.step and (parts := engine.shards()) is not None:
            self._sharded = self._sharded or ShardedSaves(self._folder, engine)
            self._under_way = self._sharded.begin(parts, at), here
            return
        # What has not been trained yet has its tensors in files.
        with engine.snapshot() if at.step else contextlib.nullcontext(engine.model.copy()) as model:
            if model is not None:
                self._folder.save(model, at)
        self._saved_at = time.monotonic()
        self._note(status, here)

    def _finish(self, status: Status) -> None:
        """Wait for a save that is under way, if one is."""
        if self._under_way is not None:
            (save, here), self._under_way = self._under_way, None
            save.finish()
            self._note(status, here)

    def _note(self, status: Status, here: tuple[int, int, int]) -> None:
        self.saved = here
        status.log("save", step=here[0], best=False)
