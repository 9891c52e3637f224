"""What a checkpoint holds, whatever wrote it: tensors where they lie, and facts about the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.tensors import Tensor


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that an optimizer treats alike."""

    settings: Mapping[str, Any]
    """Hyper-parameters by the names of the framework; `lr` is the rate at that moment."""
    parameters: tuple[str | int, ...]
    """Names; numbers where the checkpoint has no names."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    families: tuple[str, ...]
    """What it can be, by what it keeps: one name, several that keep the same, or none."""
    groups: tuple[Group, ...]
    slots: Mapping[str | int, Mapping[str, Any]]
    """What it keeps for each parameter: tensors, and single numbers."""

    @property
    def has_names(self) -> bool:
        return all(isinstance(name, str) for group in self.groups for name in group.parameters)

    @property
    def tensors(self) -> Iterator[Tensor]:
        return (each for slots in self.slots.values() for each in slots.values() if isinstance(each, Tensor))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    path: Path
    format: str
    tensors: Mapping[str, Tensor]
    """Parameters and buffers, by their names there."""
    optimizers: tuple[Optimizer, ...] = ()
    schedules: tuple[Mapping[str, Any], ...] = ()
    progress: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Steps, epochs and the like, by their names there."""
    randomness: tuple[str, ...] = ()
    """The generators of random numbers whose state it has."""
    configuration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it says of the model."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it says of the training, such as the arguments of a trainer."""
    trees: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All of it, as it was stored, by file; tensors are places."""
    executes: tuple[str, ...] = ()
    """Classes and functions that it names, which a loader that trusts it would call."""
    remarks: tuple[str, ...] = ()
    """What whoever goes on with it should know."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What an exact resume needs and is not in it."""
        lacks = {
            "optimizer": not self.optimizers,
            "names of what the optimizer keeps": any(not optimizer.has_names for optimizer in self.optimizers),
            "class of the optimizer": any(len(optimizer.families) != 1 for optimizer in self.optimizers),
            "schedule": not self.schedules,
            "progress": not self.progress,
            "state of random numbers": not self.randomness,
        }
        return tuple(what for what, is_missing in lacks.items() if is_missing)
