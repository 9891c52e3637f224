"""The training loop: batches in, metrics out. Callbacks log, show and save the run."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from onward.engines import Engine
from onward.errors import (
    MEMORY_HINT,
    DataError,
    Error,
    OutOfMemoryError,
    TrainingError,
    WriteError,
    lacks_memory,
    message_of,
)
from onward.inspect.formatting import quantity
from onward.recipe.metrics import Measures
from onward.recipe.objective import is_impossible
from onward.run_state.reading import read_terms
from onward.training.callbacks import (
    BestModelCallback,
    Callback,
    LogCallback,
    NotFiniteError,
    Saver,
    StatisticsCallback,
    Status,
)
from onward.training.config import PLACEHOLDER, Config
from onward.training.data import Batch, Batches
from onward.training.feed import Feed, evaluate, samples_in, using_averages
from onward.training.folder import Folder
from onward.training.log import Log
from onward.training.progress import Progress
from onward.training.run import LOG, Position, Run

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Turns the first Ctrl-C (or SIGTERM) into `is_requested`; a second one ends the program.

    Signals arrive in the main thread only, so elsewhere this does nothing. An ignored signal stays
    ignored: shells start background jobs like that.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._event = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def is_requested(self) -> bool:
        return self._event.is_set()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self._event.set()
        with contextlib.suppress(RuntimeError):  # the signal may interrupt another print
            self._say("finishing the step and saving; press Ctrl-C again to stop at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}


_MOST_OVERFLOWS = 20
"""Losses in a row that are not finite before a run with a dynamic loss scale ends."""
_NOT_FINITE_HINT = "try a smaller learning rate, `clip` (`--clip norm:1`), or check the data for extreme values"


class Loop:
    """A run from its current position to its end."""

    def __init__(self, run: Folder, engine: Engine, config: Config, feed: Feed, measures: Measures, at: Position):
        self.run, self.engine, self.config, self.feed, self.measures, self.at = run, engine, config, feed, measures, at
        self._is_new = not at.log
        self._has_dropped = False
        self._overflows = 0
        """Losses in a row that were not finite."""
        has_scaler = any(state.role == "scaler" for state in self.engine.states())
        self._most_overflows = _MOST_OVERFLOWS if has_scaler else 0
        self._saver = Saver(run, config.save_every, at)

    def __call__(self, notes: Sequence[str] = (), callbacks: Sequence[Callback] = (), quiet: bool = False) -> None:
        """Train until the end. `notes` are printed first."""
        with self._writing(), contextlib.ExitStack() as stack:
            self._open(stack, notes, callbacks, quiet)
            for note in notes:
                self.status.say(note)
            if not self._is_new and self.at.epoch >= self.config.epochs:  # not logged: the log shows it anyway
                more = f"ask for more than {self.at.epoch}: `--epochs {self.at.epoch + 3}`"
                self.status.say(f"the run has made {quantity(self.at.epoch, 'epoch')}; {more}")
            try:
                self.engine.group.wait()  # until all processes have read the files that are now written
                if self._is_new:
                    self.status.results = self._validate()
                for callback in self._callbacks:
                    self._started.append(callback)
                    self._notify([callback], "start")
                self._interruption = stack.enter_context(Interruption(self.status.say))
                self._train()
                self._saver.save(self.status)
                if problems := self._end():
                    raise problems[0]
            except NotFiniteError as error:
                raise self._stop_at(error) from None
            except Exception as error:
                if not isinstance(error, WriteError):  # after a write error, saving would fail too
                    self._save_after_failure(error)
                self.status.reason = "failed"
                self._end()
                if lacks_memory(error) and not isinstance(error, Error):
                    raise OutOfMemoryError("not enough memory for this batch", hint=MEMORY_HINT) from error
                if isinstance(error, OSError) and not isinstance(error, Error):
                    raise DataError(f"the data could not be read: {error}") from error
                raise

    def _open(
        self, stack: contextlib.ExitStack, notes: Sequence[str], callbacks: Sequence[Callback], quiet: bool
    ) -> None:
        """Open the log at the last save, and create the callbacks."""
        config, at = self.config, self.at
        self.run.rewind(at)
        is_first = self.engine.group.is_first
        log = stack.enter_context(Log(self.run.path / LOG)) if is_first else None
        write = log.write if log is not None else lambda event, /, **values: None  # the first process writes
        board = None
        if config.tensorboard and is_first:
            from onward.training.tensorboard import EventWriter

            board = stack.enter_context(EventWriter(self.run.path))
        quiet = quiet or not is_first
        progress = stack.enter_context(
            Progress(config.epochs, self._per_epoch, done=at.step, epoch=at.epoch, batch=at.batch, quiet=quiet)
        )
        self.engine.on_compile = progress.say
        if self.engine.group.size == self.engine.batches == 1:
            self.engine.rows = self.feed.training.rows
        self.status = Status(Run(self.run.path), self.engine, at, config.epochs, self._per_epoch, write, progress.say)
        self._saver.files = [file for file in (log, board) if file is not None]
        self._user_callbacks = list(callbacks)
        self._callbacks: list[Callback] = [
            LogCallback(config, [note for note in notes if self._is_new or note not in self.feed.notes]),
            *([board] if board is not None else []),
            *([StatisticsCallback(board)] if config.statistics and not self.engine.is_sharded else []),
            BestModelCallback(self.run, self.measures, config.patience),
            progress,
            *self._user_callbacks,
            self._saver,
        ]
        self._on_step = [callback for callback in self._callbacks if type(callback).step is not Callback.step]
        self._started: list[Callback] = []
        self._began = time.perf_counter()

    # ---- epochs and steps --------------------------------------------------------------------------------------------

    def _train(self) -> None:
        at, status = self.at, self.status
        while at.epoch < self.config.epochs and not self._must_end():
            for batch in self._remaining():
                if not self._fits(batch):
                    at.batch += 1
                    continue
                self._step(batch)
                if self._must_end():  # before the wait for the next batch
                    return
            results = self._validate(self._interruption)
            if self._must_end():  # the validation was interrupted and is repeated on resume
                return
            status.loss, status.results = at.loss, results
            at.epoch, at.batch, at.losses, at.counted = at.epoch + 1, 0, 0.0, 0
            self._notify(self._callbacks, "epoch")
        status.stop("finished")

    def _must_end(self) -> bool:
        """True if any process has a reason to end. All processes end together."""
        is_interrupted, stopped = self.engine.group.any(self._interruption.is_requested, self.status.reason is not None)
        if is_interrupted or stopped:
            self.status.stop("interrupted" if is_interrupted else "stopped")
        return self.status.reason is not None

    @property
    def _per_epoch(self) -> int | None:
        """Return the number of steps per epoch."""
        batches = self.feed.training.per_epoch
        return None if batches is None else batches // self.engine.batches

    def _remaining(self) -> Iterator[tuple[Batch, ...]]:
        """Yield the batches of the remaining steps of the epoch. An incomplete round is dropped."""
        count = self.engine.batches
        batches = self.feed.training.epoch(self.at.epoch, start=self.at.batch * count)
        while len(round_batches := tuple(itertools.islice(batches, count))) == count:
            yield round_batches

    def _fits(self, batches: Sequence[Batch]) -> bool:
        size, sizes = self.feed.size, {samples_in(batch) for batch in batches}
        if size is None or sizes == {size}:
            return True
        if not self._has_dropped:
            self.status.say(f"dropping batches that do not have {size} samples, such as one with {min(sizes)}")
        self._has_dropped = True
        return False

    def _step(self, batches: tuple[Batch, ...]) -> None:
        at, status, engine = self.at, self.status, self.engine
        start = time.perf_counter()
        outputs = engine.step(batches if engine.batches > 1 else batches[0])
        metrics = {name: float(value) for name, value in outputs.items() if value.size == 1}
        status.seconds = time.perf_counter() - start
        if engine.loss not in metrics:
            raise TrainingError(
                "the step has no loss: no `Gradient`, and no output that leads to one",
                hint="run such a step with `onward.engines.start(model)`",
            )
        loss = metrics[engine.loss]
        is_finite = math.isfinite(loss)
        self._overflows = 0 if is_finite else self._overflows + 1
        if self._overflows > self._most_overflows:  # the engine keeps the previous state
            raise NotFiniteError(f"the loss of step {at.step + 1:,} is {loss}", loss)
        samples = sum(map(samples_in, batches))
        at.step, at.batch, at.samples = at.step + 1, at.batch + 1, at.samples + samples
        if is_finite:
            at.losses, at.counted = at.losses + loss * samples, at.counted + samples
        status.batches, status.samples, status.loss, status.metrics = batches, samples, loss, {"loss": loss} | metrics
        self._notify(self._on_step, "step")
        if -math.inf < loss < 0 and (hint := self._why_impossible(loss)) is not None:
            raise TrainingError(f"the loss of step {at.step:,} is {loss:.4g}, but cannot be negative", hint=hint)

    def _why_impossible(self, loss: float) -> str | None:
        """Return a hint if the loss of the recipe cannot be this negative number."""
        model = self.engine.model
        if len(model.steps) > 1 or model.step().fact("train.distill") is not None:
            return None
        recipe = model.step().fact("train.recipe")
        if isinstance(recipe, dict) and "sample_weight" in recipe:
            return None
        terms = read_terms(model.step())
        return is_impossible([(term.name, term.options, term.scale) for term in terms], loss)

    def _validate(self, interruption: Interruption | None = None) -> dict[str, float]:
        """Return the results on the validation data, if any; on part of it if interrupted."""
        if self.feed.validation is None:
            return {}

        def batches(source: Batches) -> Iterator[tuple[Batch, int]]:
            for index, batch in enumerate(source.epoch(0)):
                if interruption is not None and interruption.is_requested and self.engine.group.size == 1:
                    return  # several processes would have to stop at the same batch
                if self._fits([batch]):
                    yield batch, source.samples(index) if source.is_padded else samples_in(batch)

        with using_averages(self.engine):
            return evaluate(self.engine, batches(self.feed.validation), self.measures)

    # ---- callbacks ---------------------------------------------------------------------------------------------------

    def _notify(self, callbacks: Sequence[Callback], hook: str) -> None:
        for callback in callbacks:
            try:
                getattr(callback, hook)(self.status)
            except Exception as error:
                if callback in self._user_callbacks:
                    fact = f"the callback `{type(callback).__name__}` failed in `{hook}`, after step {self.at.step:,}"
                    resumption = f"`onward.resume({str(self.run.path)!r}, callbacks=...)`"
                    raise TrainingError(
                        f"{fact}: {type(error).__name__}: {message_of(error)}",
                        hint=f"fix it, then {resumption if self._is_resumable else 'start again'}",
                    ) from error
                with self._writing():
                    raise

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Add the state of the run to errors of a folder that cannot be written."""
        try:
            yield
        except WriteError as error:
            raise WriteError(error.message, hint=self._disk_hint()) from error
        except Error:
            raise
        except OSError as error:
            text = f"could not write to `{self.run.path}`: {error.strerror or error}"
            raise WriteError(text, hint=self._disk_hint()) from error

    def _disk_hint(self) -> str:
        saved = self._saver.saved
        if saved is None or not self._is_resumable:
            return "free disk space if the disk is full, and start again: nothing was saved yet"
        return f"free disk space if the disk is full, then continue from step {saved[0]:,} with {self._resumption}"

    @property
    def _resumption(self) -> str:
        """Return the command that resumes the run, or the call if data came from Python."""
        stored = self.config.to_json()
        python_data = [name for name in ("data", "validation") if stored.get(name) == PLACEHOLDER]
        if not python_data:
            return f"`onward train --resume {self.run.path}`"
        arguments = ", ".join(name if name == "data" else f"{name}={name}" for name in python_data)
        return f"`onward.resume({str(self.run.path)!r}, {arguments})`"

    # ---- ending ------------------------------------------------------------------------------------------------------

    @property
    def _is_resumable(self) -> bool:
        """True if there is a save to resume: not before the first step of a new run."""
        return self.at.step > 0 or not self._is_new

    def _end(self) -> list[Exception]:
        """Call `end` of the started callbacks in reverse order, and return their exceptions."""
        self.status.seconds = time.perf_counter() - self._began
        problems = []
        while self._started:
            try:
                self._notify([self._started.pop()], "end")
            except Exception as error:
                problems.append(error)
        return problems

    def _save_after_failure(self, error: BaseException) -> None:
        if self._is_resumable and not self.engine.is_sharded:  # sharded: other processes may be in a step
            with contextlib.suppress(Exception):  # the first error matters more
                self._saver.save(self.status)
                text = f"saved after step {self.at.step:,}; fix the cause, then continue with {self._resumption}"
                if isinstance(error, DataError):
                    text += "; if you changed the data, add `--data-changed` (`data_changed=True`)"
                self.status.say(text)

    def _stop_at(self, error: NotFiniteError) -> TrainingError:
        """Save the last finite state: before the step, or else the last save."""
        with contextlib.suppress(NotFiniteError):
            self._saver.save(self.status)
        self.status.reason = "not_finite"
        self.status.loss = self.status.loss if error.loss is None else error.loss
        self._end()
        if self._saver.saved is None:
            return TrainingError(f"{error}: the original model is not finite", hint="check its weights for NaN")
        if not self._is_resumable:
            return TrainingError(str(error), hint=_NOT_FINITE_HINT)
        return TrainingError(
            f"{error}: the state after step {self._saver.saved[0]:,} is saved in `{self.run.path}`",
            hint=_NOT_FINITE_HINT,
        )
