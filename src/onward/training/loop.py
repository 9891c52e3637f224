"""The loop: batches in, metrics out, and a folder from which the run can go on at any time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.engines import Engine
from onward.errors import DataError, Error, TrainingError, WriteError
from onward.model import Model
from onward.model.state import all_states
from onward.training.data import Batch, Batches
from onward.training.evaluation import Measures, averaged, evaluated, samples_in
from onward.training.folder import BEST, LAST, LOG, Place, Run
from onward.training.interruption import Interruption
from onward.training.log import Log
from onward.training.progress import Progress
from onward.training.tensorboard import EventWriter

_BINS = 30
_LOOK_EVERY = 500
"""Steps after which the gradients are looked at again, in epochs that are longer."""
_SHORT = 1.0
"""Seconds. Epochs that are shorter are not saved one by one."""


_WAYS_OUT = "try a smaller learning rate or `clip` (`--clip-norm 1`), and look for extreme values in the data"


@dataclasses.dataclass(frozen=True)
class Settings:
    epochs: int
    patience: int | None = None
    """Epochs without an improvement after which the run ends."""
    save_every: float = 60.0
    """Seconds after which the state is saved, also within an epoch."""
    tensorboard: bool = False
    quiet: bool = False
    size: int | None = None
    """The only size of batch that the model takes; others, which a stream may have, are left out."""


class _NotFiniteError(Exception):
    """What is not finite, and the loss if it is that."""

    def __init__(self, what: str, loss: float | None = None):
        super().__init__(what)
        self.loss = loss


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
        at: Place,
    ):
        self.run, self.engine, self.batches, self.validation = run, engine, batches, validation
        self.measures, self.settings, self.at = measures, settings, at
        self._is_new = not at.log
        self._saved = None if self._is_new else (at.step, at.epoch, at.batch)
        self._saved_at = time.monotonic()
        self._left_out = False

    def __call__(self, opening: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
        """Go on until the end; why it ended. `opening` is what the log says first, `notes` are said to the user."""
        started = time.perf_counter()
        with self._writing(), contextlib.ExitStack() as stack:
            self._open(stack)
            for note in notes:
                self.progress.say(note)
            try:
                self._begin(opening)
                self._interruption = stack.enter_context(Interruption(self.progress.say))
                reason = self._epochs()
                self._save()
                self._end(reason, started)
                return reason
            except _NotFiniteError as error:
                raise self._stopped(error, started) from None
            except WriteError:  # then nothing more can be saved
                raise
            except Exception as error:
                if self._can_go_on:
                    self._fail(started)
                if isinstance(error, OSError) and not isinstance(error, Error):
                    raise DataError(f"the data could not be read: {error}") from error
                raise

    @property
    def _can_go_on(self) -> bool:
        """Whether there is something to go on with: of a run that fails before its first step, nothing is kept."""
        return self.at.step > 0 or not self._is_new

    def _fail(self, started: float) -> None:
        with contextlib.suppress(Exception):  # what went wrong first is what counts
            self._save()
            self._end("failed", started)
            self.progress.say(f"saved after step {self.at.step:,}: `onward train --resume {self.run.path}` goes on")

    def _open(self, stack: contextlib.ExitStack) -> None:
        """The log, as it was when the state was saved, and all else that shows how it goes."""
        self.run.rewind(self.at)
        self.log = stack.enter_context(Log(self.run.path / LOG))
        settings, step = self.settings, self.at.step
        self.progress = stack.enter_context(Progress(settings.epochs, self._per_epoch, done=step, quiet=settings.quiet))
        self.engine.on_compile = self.progress.say
        self.board = stack.enter_context(EventWriter(self.run.path)) if settings.tensorboard else None

    def _begin(self, opening: Mapping[str, Any]) -> None:
        if self.at.log:
            self._write("save", step=self.at.step, best=False)  # as the file proves from which it goes on
            self._write("resume", step=self.at.step, time=time.time())
            return
        epochs = self.settings.epochs
        self._write("start", time=time.time(), steps_per_epoch=self._per_epoch, epochs=epochs, **opening)
        self._judge(self._measured())
        self._save()

    # ---- epochs and steps --------------------------------------------------------------------------------------------

    def _epochs(self) -> str:
        while (reason := self._reason_to_end()) is None:
            if self._interruption.wanted or not self._epoch():
                return "interrupted"
            results = self._measured(self._interruption)
            if self._interruption.wanted:  # then what was measured is not of all data, and is measured again
                return "interrupted"
            loss = self._end_epoch()
            self._look_at_weights()
            self._judge(results)
            self._save(after=min(self.settings.save_every, _SHORT))
            self.progress.epoch(loss, results)
        return reason

    def _end_epoch(self) -> float:
        """Write the loss of the epoch down: the mean over its samples."""
        at, loss = self.at, self.at.loss
        at.epoch, at.batch, at.losses, at.counted = at.epoch + 1, 0, 0.0, 0
        self._write("epoch", step=at.step, epoch=at.epoch, loss=loss)
        self._plot("epoch", {"loss": loss})
        return loss

    def _reason_to_end(self) -> str | None:
        if self.settings.patience is not None and self.at.since_best >= self.settings.patience:
            return "early_stopping"
        return "finished" if self.at.epoch >= self.settings.epochs else None

    def _epoch(self) -> bool:
        """The batches of an epoch that are left; whether it was finished."""
        for batch in self._left():
            if not self._fits(batch):
                self.at.batch += 1
                continue
            if self.at.batch == 0 or self.at.step % _LOOK_EVERY == 0:
                self._look_at_gradients(batch)
            self._step(batch)
            if self._interruption.wanted:  # before the next batch, for which one may have to wait
                return False
            self._save(after=self.settings.save_every)
        return True

    @property
    def _per_epoch(self) -> int | None:
        """Steps in an epoch."""
        batches = self.batches.per_epoch
        return None if batches is None else batches // self.engine.batches

    def _left(self) -> Iterator[Batch | tuple[Batch, ...]]:
        """What the steps of an epoch that are left take; batches that do not fill a round of several are left out."""
        count = self.engine.batches
        batches = self.batches.epoch(self.at.epoch, start=self.at.batch * count)
        if count == 1:
            yield from batches
            return
        while len(together := tuple(itertools.islice(batches, count))) == count:
            yield together

    def _fits(self, batch: Batch | tuple[Batch, ...]) -> bool:
        sizes = {samples_in(one) for one in _all(batch)}
        if self.settings.size is None or sizes == {self.settings.size}:
            return True
        if not self._left_out:
            text = (
                f"a batch of {min(sizes)} was left out, since the model takes {self.settings.size}; so will be others"
            )
            self.progress.say(text)
        self._left_out = True
        return False

    def _step(self, batch: Batch | tuple[Batch, ...]) -> None:
        start = time.perf_counter()
        metrics = {name: float(value) for name, value in self.engine.step(batch).items() if value.size == 1}
        seconds = time.perf_counter() - start
        if self.engine.loss not in metrics:
            raise TrainingError(
                "nothing says what is minimised: the step has no `Gradient`, and no output that leads to one",
                hint="run it with an engine: `onward.engines.start`",
            )
        loss = metrics[self.engine.loss]
        if not math.isfinite(loss):  # the engine has kept the state as it was
            raise _NotFiniteError(f"the loss of step {self.at.step + 1:,} is {loss}", loss)
        at, samples = self.at, sum(map(samples_in, _all(batch)))
        at.step, at.batch, at.samples = at.step + 1, at.batch + 1, at.samples + samples
        at.losses, at.counted = at.losses + loss * samples, at.counted + samples
        shown = {"loss": loss} | metrics
        self._write("step", step=at.step, epoch=at.epoch, samples=at.samples, seconds=seconds, **shown)
        self._plot("train", shown)
        self.progress.step(loss, samples)

    # ---- validation --------------------------------------------------------------------------------------------------

    def _measured(self, unless: Interruption | None = None) -> dict[str, float]:
        """The results on the validation data; on some of it if it is interrupted, and none if there is none."""
        if self.validation is None:
            return {}

        def batches(source: Batches) -> Iterator[tuple[Batch, int]]:
            for index, batch in enumerate(source.epoch(0)):
                if unless is not None and unless.wanted:
                    return
                if self._fits(batch):
                    yield batch, source.samples(index) if source.is_padded else samples_in(batch)

        with averaged(self.engine):
            return evaluated(self.engine, batches(self.validation), self.measures)

    def _judge(self, results: Mapping[str, float]) -> None:
        """Write results down, and keep the model if it is the best so far."""
        if not results:
            return
        at = self.at
        self._write("validation", step=at.step, epoch=at.epoch, **results)
        self._plot("validation", results)
        value = results[self.measures.monitor]
        if self.measures.is_better(value, at.best):
            at.best, at.since_best = value, 0
            self.run.export(self.engine.updated(), BEST)
            self._write("save", step=at.step, best=True)
        elif at.epoch:  # the model as it was given is measured, too, but no epoch
            at.since_best += 1

    # ---- a closer look -----------------------------------------------------------------------------------------------

    def _look_at_gradients(self, batch: Batch | tuple[Batch, ...]) -> None:
        gradients = self.engine.gradients(_all(batch)[0])
        norms = {name: float(np.linalg.norm(g.astype(np.float64))) for name, g in gradients.items()}
        self._write("gradients", step=self.at.step, norms=norms)

    def _look_at_weights(self) -> None:
        parameters = {s.name for s in self.engine.states() if s.role == "parameter"}
        histograms = {}
        for name, array in self.engine.state().items():
            if name in parameters and np.isfinite(array).all():
                counts, edges = np.histogram(array.astype(np.float64), bins=_BINS)
                histograms[name] = {"edges": edges.tolist(), "counts": counts.tolist()}
                if self.board is not None:
                    self.board.histogram(self.at.step, name, edges.tolist(), counts.tolist())
        self._write("weights", step=self.at.step, histograms=histograms)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def _write(self, event: str, **values: Any) -> None:
        with self._writing():
            self.log.write(event, **values)

    def _plot(self, section: str, values: Mapping[str, float]) -> None:
        if self.board is not None:
            with self._writing():
                self.board.scalars(self.at.step, {f"{section}/{name}": value for name, value in values.items()})

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Say what a folder that cannot be written to means for the run."""
        try:
            yield
        except WriteError as error:
            raise WriteError(str(error), hint=self._way_on()) from error
        except Error:
            raise
        except OSError as error:
            text = f"could not write to `{self.run.path}`: {error.strerror or error}"
            raise WriteError(text, hint=self._way_on()) from error

    def _way_on(self) -> str:
        if self._saved is None or not self._can_go_on:
            return "make room, if that is the cause, and start again: nothing was saved yet"
        again = f"`onward train --resume {self.run.path}`"
        return f"make room, if that is the cause; then {again} goes on from step {self._saved[0]:,}"

    # ---- saving and ending -------------------------------------------------------------------------------------------

    def _save(self, after: float = 0.0) -> None:
        """Save, unless that was done here already, or less than so many seconds ago."""
        here = (self.at.step, self.at.epoch, self.at.batch)
        if here == self._saved or time.monotonic() - self._saved_at < after:
            return
        model = self.engine.updated() if self.at.step else self.engine.model.copy()  # whose tensors are in files
        if strange := _not_finite(model):
            raise _NotFiniteError(f"`{strange}` holds NaN or infinity after step {self.at.step:,}")
        with self._writing():
            self.log.flush()
            if self.board is not None:
                self.board.flush()
            self.run.written(self.at)
        self.run.save(model, self.at)
        self._saved, self._saved_at = here, time.monotonic()
        self._write("save", step=self.at.step, best=False)

    def _stopped(self, error: _NotFiniteError, started: float) -> TrainingError:
        """Keep the last state that is good: the one before the step, or else the one that was saved."""
        with contextlib.suppress(_NotFiniteError):
            self._save()
        if self._saved is None:
            return TrainingError(f"{error}: the model itself is not sound", hint="look for NaN in its weights")
        if not self._can_go_on:
            return TrainingError(str(error), hint=_WAYS_OUT)
        self._end("not_finite", started, **({"loss": error.loss} if error.loss is not None else {}))
        return TrainingError(
            f"{error}: the state after step {self._saved[0]:,} was kept in `{self.run.path}`",
            hint=_WAYS_OUT,
        )

    def _end(self, reason: str, started: float, **more: float) -> None:
        """The last inference model is that of the state which was saved."""
        self.run.export(self.run.model, LAST)
        self._write("end", step=self.at.step, reason=reason, seconds=time.perf_counter() - started, **more)


def _all(batch: Batch | tuple[Batch, ...]) -> tuple[Batch, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _not_finite(model: Model) -> str | None:
    """A weight that training has made NaN or infinite."""
    for state in all_states(model):
        tensor = state.value.const_value
        if state.role in ("parameter", "statistics") and tensor is not None and not np.isfinite(tensor.numpy()).all():
            return state.name
    return None
