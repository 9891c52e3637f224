"""Checkpoints, and their formats: how each is recognized, read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onward.model import Model
from onward.run_state.state import ParameterGroup, RunState


@dataclasses.dataclass(frozen=True)
class Checkpoint(RunState):
    """A run state in files of a framework. What these do not say is None or empty."""

    model: Model | None = None  # type: ignore[assignment]
    loss: Any = None
    groups: Sequence[ParameterGroup] = ()
    step: int | None = None  # type: ignore[assignment]
    path: Path = Path()
    format: str = ""
    """The name of its format: `hf`, `deepspeed`."""
    title: str = ""
    """The format in words, with the version if one is stored: `Lightning 2.6.6`."""
    files: tuple[str, ...] = ()
    """Other files in its folder, such as of a tokenizer."""
    executes: tuple[str, ...] = ()
    """Classes and functions that it names, which a loader that trusts it would call."""
    remarks: tuple[str, ...] = ()
    """What you should know before you continue from it."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Return what an exact resume needs and is not in it."""
        unknown = [group for each in self.optimizers for group in each.groups if group.optimizer is None]
        lacks = {
            "optimizer": not self.optimizers,
            "names of what the optimizer keeps": any(not optimizer.has_names for optimizer in self.optimizers),
            "class of the optimizer": bool(unknown),
            "schedule": not self.schedules,
            "shape of the schedule": any(schedule.words is None for schedule in self.schedules),
            "progress": self.step is None,
            "updates for each step of the schedule": any(
                schedule.words and schedule.every is None and (not self.step or schedule.position != self.step)
                for schedule in self.schedules
            ),
            "state of random numbers": not self.randomness,
            "loss": self.loss is None and bool(self.optimizers),
            "gradient clipping": self.clip is None and bool(self.optimizers),
            "gradient accumulation": not self.accumulate and bool(self.optimizers),
            "decay of the averages": bool(self.averages) and self.average_decay is None,
        }
        return tuple(what for what, is_missing in lacks.items() if is_missing)


Order = Sequence[Sequence[str]]
"""Parameters in the order in which an optimizer was given them: in one part, or group by group."""


class Captured(NamedTuple):
    """What a checkpoint computes, where it holds that, too."""

    model: Model
    loss: Any
    """In words of a recipe; None where it is not known."""
    orders: Mapping[str, Order] = {}
    """In which an optimizer can have been given the parameters, by what says so, with names of the graph."""
    tied: Mapping[str, str] = {}
    """Further names of the checkpoint's tensors."""
    stored: Mapping[str, str] = {}
    """Names of the checkpoint's tensors -> names of the graph, where the framework has others in files."""
    probe: Callable[[Model, Any], None] | None = None
    """Compares the model, with its weights, under a loss with the module that it was captured of."""


class Format(NamedTuple):
    name: str
    """What users call it: `--to deepspeed`."""
    title: str
    matches: Callable[[Path], bool]
    """Whether a file or folder is of this format, by what is in it. Nothing large is read for that."""
    read: Callable[[Path], Checkpoint]
    write: Callable[[Checkpoint, Path], None] | None = None
    """Writes into a path that does not exist yet. The checkpoint may come from a training model, or from any reader."""
    is_folder: bool = True
    keeps: tuple[str, ...] = ()
    """What the format has a place for: fields of `Checkpoint`."""
    ending: str = ""
    """Of a file."""
    graph: Callable[[Path], Captured] | None = None
    """The model of a checkpoint, if that is an ONNX graph."""
    needs_names: bool = True
    """Whether what optimizers keep has names when it is written."""
    also: tuple[str, ...] = ()
    """Other names of it."""
