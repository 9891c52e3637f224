"""Checkpoints and their formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onward.model import Model
from onward.run_state.state import ParameterGroup, RunState


@dataclasses.dataclass(frozen=True)
class Checkpoint(RunState):
    """Run state in files of a framework. What the files do not store is None or empty."""

    model: Model | None = None  # type: ignore[assignment]
    loss: Any = None
    groups: Sequence[ParameterGroup] = ()
    step: int | None = None  # type: ignore[assignment]
    path: Path = Path()
    format: str = ""
    """The name of its format: `hf`, `deepspeed`."""
    module: str = ""
    """The name of its module, if the files have several."""
    title: str = ""
    """The format in words, with the version if one is stored: `Lightning 2.6.6`."""
    files: tuple[str, ...] = ()
    """Other files in its folder, such as those of a tokenizer."""
    executes: tuple[str, ...] = ()
    """Classes and functions that it names, which a trusting loader would call."""
    remarks: tuple[str, ...] = ()
    """Facts to know before you continue from it."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Return what an exact resume needs and the checkpoint does not hold."""
        lacks = {
            "optimizer": not self.optimizers,
            "parameter names of the optimizer": not self.has_names,
            "class of the optimizer": any(group.optimizer is None for group in self.stored_groups),
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
        return tuple(name for name, is_missing in lacks.items() if is_missing)


Order = Sequence[Sequence[str]]
"""Parameters in the order of an optimizer: in one list, or one list per group."""


class Captured(NamedTuple):
    """Model that a checkpoint computes, with its loss."""

    model: Model
    loss: Any
    """In words of a recipe; None if unknown."""
    orders: Mapping[str, Order] = {}
    """Possible orders of the optimizer's parameters, by origin, with names of the graph."""
    tied: Mapping[str, str] = {}
    """Further names of the checkpoint's tensors."""
    stored: Mapping[str, str] = {}
    """Names of the checkpoint's tensors -> names of the graph, if they differ in files."""
    frozen: frozenset[str] = frozenset()
    """Weights of the model that the checkpoint does not store, such as those below adapters."""
    probe: Callable[[Model, Any], None] | None = None
    """Compares the model and its weights with the module that it was captured from."""


class Format(NamedTuple):
    """Format of checkpoints."""

    name: str
    """Name on the command line: `--to deepspeed`."""
    title: str
    matches: Callable[[Path], bool]
    """True for a file or folder of this format, by its content. Reads nothing large."""
    read: Callable[[Path], Checkpoint]
    write: Callable[[Checkpoint, Path], None] | None = None
    """Writes to a new path. The checkpoint may come from a training model or any reader."""
    is_folder: bool = True
    keeps: tuple[str, ...] = ()
    """Fields of `Checkpoint` that the format stores; empty: all."""
    ending: str = ""
    """Of a file."""
    graph: Callable[[Path], Captured] | None = None
    """Returns the model of a checkpoint, if it is an ONNX graph."""
    needs_names: bool = True
    """True if optimizer state needs names to be written."""
    also: tuple[str, ...] = ()
    """Other names."""

    @property
    def keeps_optimizers(self) -> bool:
        return "optimizers" in self.keeps or not self.keeps
