"""Callbacks: told how a run goes, and able to stop it. What Onward itself watches runs with are callbacks, too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.engines import Engine
    from onward.training.data import Batch
    from onward.training.run import Place, Run


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
