"""Progress of a run: epoch, loss, metrics, samples per second, time left.

On a terminal it is a progress bar, redrawn a few times a second; elsewhere a few plain lines.
Drawing happens inside `step`, without a thread, so nothing is drawn between steps. Most calls
only add numbers.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from onward.training.callbacks import Callback, Status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

_REDRAW, _LINE = 0.2, 5.0
"""Seconds between two redraws of the bar, and between two plain lines."""
_MEMORY = 50
"""Number of steps that the displayed loss is averaged over, about."""


class Progress(Callback):
    """Shows the progress of a run.

    A resumed run begins after `done` steps, `epoch` epochs and `batch` steps of an epoch. If
    `steps_per_epoch` is None, the first epoch determines it.
    """

    def __init__(
        self,
        epochs: int,
        steps_per_epoch: int | None = None,
        *,
        done: int = 0,
        epoch: int = 0,
        batch: int = 0,
        quiet: bool = False,
        console: Console | None = None,
    ):
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._first = self._steps = done
        self._epoch, self._epoch_start = epoch, done - batch
        self._samples, self._loss, self._weight = 0, 0.0, 0.0
        self._metrics: dict[str, float] = {}
        if not quiet and console is None:
            from rich.console import Console

            console = Console(stderr=True)
        self._console = None if quiet else console
        self._bar = _bar(self._console) if self._console and self._console.is_terminal else None
        self._started = self._epoch_started = time.perf_counter()
        self._due = self._started + (_REDRAW if self._bar else math.inf if quiet else _LINE)
        self._rate, self._rate_at, self._rate_samples = 0.0, self._started, 0

    # ---- events ------------------------------------------------------------------------------------------------------

    def step(self, status: Status) -> None:
        """Add a step. A loss that is not finite is left out of the average."""
        self._steps += 1
        self._samples += status.samples
        loss = status.loss
        if loss - loss == 0:  # finite
            keep = 1 - 1 / _MEMORY
            self._loss = keep * self._loss + loss
            self._weight = keep * self._weight + 1
        now = time.perf_counter()
        if now >= self._due:
            self._show(now)

    def epoch(self, status: Status) -> None:
        """Print the line of an epoch."""
        now, loss = time.perf_counter(), status.loss
        self._epoch += 1
        self._steps_per_epoch = self._steps_per_epoch or self._steps - self._epoch_start
        self._metrics = dict(status.results)
        fields = [f"epoch {self._epoch}/{self._epochs}", f"loss {short(loss) if math.isfinite(loss) else '-'}"]
        fields += [f"{'validation loss' if name == 'loss' else name} {short(v)}" for name, v in self._metrics.items()]
        self.say("  ".join([*fields, duration(now - self._epoch_started)]))
        self._epoch_start = self._steps
        self._epoch_started = self._rate_at = now  # validation does not count for samples per second
        self._rate_samples = self._samples
        if self._bar:
            self._show(now)
        elif self._console:
            self._due = now + _LINE

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._console:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar; printed lines stay."""
        if self._bar:
            self._bar.stop()

    # ---- display -----------------------------------------------------------------------------------------------------

    def _show(self, now: float) -> None:
        self._measure(now)
        left = (self._epochs - self._epoch) * self._steps_per_epoch if self._steps_per_epoch else None
        total = None if left is None else self._epoch_start + left
        epoch = f"epoch {min(self._epoch + 1, self._epochs)}/{self._epochs}"
        facts = [f"loss {short(self._loss / self._weight) if self._weight else '-'}"]
        facts += [f"{name} {short(value)}" for name, value in list(self._metrics.items())[:2] if name != "loss"]
        facts += [f"{self._rate:,.0f} samples/s"]
        if total:  # validation and saving included
            seconds = (now - self._started) / max(self._steps - self._first, 1) * max(total - self._steps, 0)
            facts.append(f"{duration(seconds)} left")
        if self._bar:
            self._due = now + _REDRAW
            self._bar.update(self._bar.task_ids[0], completed=self._steps, total=total, description=epoch)
            self._bar.update(self._bar.task_ids[0], facts="  ".join(facts), refresh=True)
        else:
            self._due = now + _LINE
            self.say("  ".join([epoch, f"step {self._steps:,}{f'/{total:,}' if total else ''}", *facts]))

    def _measure(self, now: float) -> None:
        """Update samples per second, an average in which the latest measurement counts half."""
        if now == self._rate_at:
            return
        rate = (self._samples - self._rate_samples) / (now - self._rate_at)
        self._rate = (self._rate + rate) / 2 if self._rate else rate
        self._rate_at, self._rate_samples = now, self._samples


def _bar(console: Console) -> Bar:
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}", markup=False),
    )
    bar = Bar(*columns, console=console, auto_refresh=False, transient=True)
    bar.add_task("starting", total=None, facts="")
    bar.start()
    return bar


@contextlib.contextmanager
def showing_rows(total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show the progress of rows on a terminal. Yield a function that takes the number of rows so far."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda rows: None
        return
    bar = _bar(console)
    start = due = time.perf_counter()

    def advance(rows: int) -> None:
        nonlocal due
        if (now := time.perf_counter()) < due:
            return
        due, rate = now + _REDRAW, rows / max(now - start, 1e-9)
        facts = [f"{rows:,} rows", f"{rate:,.0f} rows/s"]
        facts += [f"{duration((total - rows) / rate)} left"] if total else []
        bar.update(bar.task_ids[0], completed=rows, total=total, description="", facts="  ".join(facts), refresh=True)

    try:
        yield advance
    finally:
        bar.stop()


def short(value: float) -> str:
    """Return a number as `0.0213`, `1.32e-05` or `nan`."""
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return seconds as `0.8 s`, `1:05` or `2:10:00`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
