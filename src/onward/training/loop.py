"""The loop: batches in, metrics out. What is seen and saved of it is the business of those who watch it."""

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
from onward.recipe.metrics import Measures
from onward.training.callbacks import (
    BestWatcher,
    Callback,
    LogWatcher,
    NotFiniteError,
    Saver,
    StatisticsWatcher,
    Status,
)
from onward.training.config import PLACEHOLDER, Config
from onward.training.data import Batch, Batches
from onward.training.feed import Feed, evaluate, samples_in, using_averages
from onward.training.folder import Folder
from onward.training.log import Log, NoLog
from onward.training.progress import Progress
from onward.training.run import LOG, Place, Run

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Within it, the first Ctrl-C (or SIGTERM) only sets `wanted`; a second one ends the program as usual.

    Signals are heard in the main thread alone, so elsewhere this does nothing. One that is ignored stays so: a shell
    starts jobs in the background like that, for which Ctrl-C is not meant.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._wanted = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        return self._wanted.is_set()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self._wanted.set()
        with contextlib.suppress(RuntimeError):  # it may come in the middle of printing something else
            self._say("finishing the step, then saving; Ctrl-C again to stop at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}


_WAYS_OUT = "try a smaller learning rate or `clip` (`--clip norm:1`), and look for extreme values in the data"


class Loop:
    """One run, from where it stands to its end."""

    def __init__(self, run: Folder, engine: Engine, config: Config, feed: Feed, measures: Measures, at: Place):
        self.run, self.engine, self.config, self.feed, self.measures, self.at = run, engine, config, feed, measures, at
        self._is_new = not at.log
        self._left_out = False
        self._saver = Saver(run, config.save_every, at)

    def __call__(self, notes: Sequence[str] = (), callbacks: Sequence[Callback] = (), quiet: bool = False) -> None:
        """Go on until the end. `notes` are said to the user first."""
        with self._writing(), contextlib.ExitStack() as stack:
            self._open(stack, notes, callbacks, quiet)
            for note in notes:
                self.status.say(note)
            if not self._is_new and self.at.epoch >= self.config.epochs:  # as the log shows without a note
                self.status.say(f"{self.at.epoch} of {self.config.epochs} epochs are done")
            try:
                self.engine.group.wait()  # until all have read what may be written from now on
                if self._is_new:
                    self.status.results = self._validate()
                for watcher in self._watchers:
                    self._started.append(watcher)
                    self._tell([watcher], "start")
                self._interruption = stack.enter_context(Interruption(self.status.say))
                self._train()
                self._saver.save(self.status)
                if problems := self._end():
                    raise problems[0]
            except NotFiniteError as error:
                raise self._stop_at(error) from None
            except Exception as error:
                if not isinstance(error, WriteError):  # then nothing more can be saved
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
        """The log, as it was when the state was saved, and all else that shows how it goes."""
        config, at = self.config, self.at
        self.run.rewind(at)
        is_first = self.engine.group.is_first
        log = stack.enter_context(Log(self.run.path / LOG)) if is_first else NoLog()
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
        self.status = Status(
            Run(self.run.path), self.engine, at, config.epochs, self._per_epoch, log.write, progress.say
        )
        self._saver.files = [file for file in (log, board) if isinstance(file, Log | Callback)]
        self._callbacks = list(callbacks)
        self._watchers: list[Callback] = [
            LogWatcher(log, config, [note for note in notes if self._is_new or note not in self.feed.notes]),
            *([board] if board is not None else []),
            *([StatisticsWatcher(board)] if config.statistics and not self.engine.is_sharded else []),
            BestWatcher(self.run, self.measures, config.patience),
            progress,
            *self._callbacks,
            self._saver,
        ]
        self._on_step = [watcher for watcher in self._watchers if type(watcher).step is not Callback.step]
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
                if self._must_end():  # before the next batch, for which one may have to wait
                    return
            results = self._validate(self._interruption)
            if self._must_end():  # then what was measured is not of all data, and is measured again
                return
            status.loss, status.results = at.loss, results
            at.epoch, at.batch, at.losses, at.counted = at.epoch + 1, 0, 0.0, 0
            self._tell(self._watchers, "epoch")
        status.stop("finished")

    def _must_end(self) -> bool:
        """Whether a process has a reason to end. All end together."""
        wanted, stopped = self.engine.group.any(self._interruption.wanted, self.status.reason is not None)
        if wanted or stopped:
            self.status.stop("interrupted" if wanted else "stopped")
        return self.status.reason is not None

    @property
    def _per_epoch(self) -> int | None:
        """Steps in an epoch."""
        batches = self.feed.training.per_epoch
        return None if batches is None else batches // self.engine.batches

    def _remaining(self) -> Iterator[tuple[Batch, ...]]:
        """What the steps of an epoch that are left take; batches that do not fill a round of several are left out."""
        count = self.engine.batches
        batches = self.feed.training.epoch(self.at.epoch, start=self.at.batch * count)
        while len(together := tuple(itertools.islice(batches, count))) == count:
            yield together

    def _fits(self, batches: Sequence[Batch]) -> bool:
        size, sizes = self.feed.size, {samples_in(batch) for batch in batches}
        if size is None or sizes == {size}:
            return True
        if not self._left_out:
            text = f"a batch of {min(sizes)} was left out, since the model takes {size}; so will be others"
            self.status.say(text)
        self._left_out = True
        return False

    def _step(self, batches: tuple[Batch, ...]) -> None:
        at, status, engine = self.at, self.status, self.engine
        start = time.perf_counter()
        found = engine.step(batches if engine.batches > 1 else batches[0])
        metrics = {name: float(value) for name, value in found.items() if value.size == 1}
        status.seconds = time.perf_counter() - start
        if engine.loss not in metrics:
            raise TrainingError(
                "nothing says what is minimised: the step has no `Gradient`, and no output that leads to one",
                hint="run it with an engine: `onward.engines.start`",
            )
        loss = metrics[engine.loss]
        if not math.isfinite(loss):  # the engine has kept the state as it was
            raise NotFiniteError(f"the loss of step {at.step + 1:,} is {loss}", loss)
        samples = sum(map(samples_in, batches))
        at.step, at.batch, at.samples = at.step + 1, at.batch + 1, at.samples + samples
        at.losses, at.counted = at.losses + loss * samples, at.counted + samples
        status.batches, status.samples, status.loss, status.metrics = batches, samples, loss, {"loss": loss} | metrics
        self._tell(self._on_step, "step")

    def _validate(self, unless: Interruption | None = None) -> dict[str, float]:
        """The results on the validation data; on some of it if it is interrupted, and none if there is none."""
        if self.feed.validation is None:
            return {}

        def batches(source: Batches) -> Iterator[tuple[Batch, int]]:
            for index, batch in enumerate(source.epoch(0)):
                if unless is not None and unless.wanted and self.engine.group.size == 1:
                    return  # of several processes, all or none would have to
                if self._fits([batch]):
                    yield batch, source.samples(index) if source.is_padded else samples_in(batch)

        with using_averages(self.engine):
            return evaluate(self.engine, batches(self.feed.validation), self.measures)

    # ---- watchers ----------------------------------------------------------------------------------------------------

    def _tell(self, watchers: Sequence[Callback], hook: str) -> None:
        for watcher in watchers:
            try:
                getattr(watcher, hook)(self.status)
            except Exception as error:
                if watcher in self._callbacks:
                    raise self._blame(watcher, hook, error) from error
                with self._writing():
                    raise

    def _blame(self, callback: Callback, hook: str, error: Exception) -> TrainingError:
        where = f"the callback `{type(callback).__name__}` failed in `{hook}`, after step {self.at.step:,}"
        again = f"`onward.resume({str(self.run.path)!r}, callbacks=...)` goes on" if self._can_go_on else "start again"
        return TrainingError(f"{where}: {type(error).__name__}: {message_of(error)}", hint=f"mend it; then {again}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Say what a folder that cannot be written to means for the run."""
        try:
            yield
        except WriteError as error:
            raise WriteError(error.message, hint=self._way_on()) from error
        except Error:
            raise
        except OSError as error:
            text = f"could not write to `{self.run.path}`: {error.strerror or error}"
            raise WriteError(text, hint=self._way_on()) from error

    def _way_on(self) -> str:
        saved = self._saver.saved
        if saved is None or not self._can_go_on:
            return "make room, if that is the cause, and start again: nothing was saved yet"
        return f"make room, if that is the cause; then continue from step {saved[0]:,} with {self._resumption}"

    @property
    def _resumption(self) -> str:
        """What continues the run: the command line has no data that came from Python."""
        stored = self.config.to_json()
        given = [name for name in ("data", "validation") if stored.get(name) == PLACEHOLDER]
        if not given:
            return f"`onward train --resume {self.run.path}`"
        arguments = ", ".join(name if name == "data" else f"{name}={name}" for name in given)
        return f"`onward.resume({str(self.run.path)!r}, {arguments})`"

    # ---- ending ------------------------------------------------------------------------------------------------------

    @property
    def _can_go_on(self) -> bool:
        """Whether there is something to go on with: of a run that fails before its first step, nothing is kept."""
        return self.at.step > 0 or not self._is_new

    def _end(self) -> list[Exception]:
        """Tell all watchers, the last one first, whatever they raise."""
        self.status.seconds = time.perf_counter() - self._began
        problems = []
        while self._started:
            try:
                self._tell([self._started.pop()], "end")
            except Exception as error:
                problems.append(error)
        return problems

    def _save_after_failure(self, error: BaseException) -> None:
        if self._can_go_on and not self.engine.is_sharded:  # others may be in the midst of a step
            with contextlib.suppress(Exception):  # what went wrong first is what counts
                self._saver.save(self.status)
                text = f"saved after step {self.at.step:,}: once the cause is removed, continue with {self._resumption}"
                if isinstance(error, DataError):
                    text += "; if you repaired the data, add `--data-changed` (`data_changed=True`)"
                self.status.say(text)

    def _stop_at(self, error: NotFiniteError) -> TrainingError:
        """Keep the last state that is good: the one before the step, or else the one that was saved."""
        with contextlib.suppress(NotFiniteError):
            self._saver.save(self.status)
        self.status.reason = "not_finite"
        self.status.loss = self.status.loss if error.loss is None else error.loss
        self._end()
        if self._saver.saved is None:
            return TrainingError(f"{error}: the model itself is not sound", hint="look for NaN in its weights")
        if not self._can_go_on:
            return TrainingError(str(error), hint=_WAYS_OUT)
        return TrainingError(
            f"{error}: the state after step {self._saver.saved[0]:,} was kept in `{self.run.path}`", hint=_WAYS_OUT
        )
