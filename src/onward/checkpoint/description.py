"""What a checkpoint holds, whatever wrote it: tensors where they lie, and facts about the training.

What is stored is kept as it is (`settings`, `state`, `trees`). What it means is said in the words of a recipe, with the
names that a training model has for slots, so that whoever writes another format need not know where it came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onward.recipe.spec import Spec
from onward.run_state.tensors import Tensor, count_of, is_number

MASTER = "master"
"""The slot that holds a parameter in float32 where the model has it in a narrower type."""
COUNT = "step"
"""The slot that holds how many updates of a parameter there were."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that an optimizer treats alike."""

    settings: Mapping[str, Any]
    """Hyper-parameters by the names of the framework, as stored; `lr` is the rate at that moment."""
    parameters: tuple[str | int, ...]
    """Names; numbers where the checkpoint has no names."""
    optimizer: Spec | None = None
    """Class, variant and numbers in words of a recipe; `lr` is the rate before any schedule. None: not known."""
    rate: float | None = None
    """The learning rate at the moment, where a training model says it."""
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Hyper-parameters in words of a recipe, where the class is not known."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    families: tuple[str, ...]
    """What it can be, by what it keeps: one name, several that keep the same, or none."""
    groups: tuple[Group, ...]
    slots: Mapping[str | int, Mapping[str, Any]]
    """What it keeps for each parameter: tensors, and single numbers. The names are those of a recipe's optimizers
    (`exp_avg`, `momentum_buffer`), with `step` and `master`."""
    variant: str = "torch"
    """Whose arithmetic it has, where no group says its optimizer."""

    @property
    def title(self) -> str:
        """What it can be, in words."""
        return " or ".join(self.families) or "of a kind that is not known"

    @property
    def has_names(self) -> bool:
        return all(isinstance(name, str) for group in self.groups for name in group.parameters)

    @property
    def count(self) -> int | None:
        """How many updates there were of any parameter, at most."""
        counts = [slots[COUNT] for slots in self.slots.values() if COUNT in slots]
        return max((count_of(each) for each in counts if is_number(each)), default=None)

    @property
    def tensors(self) -> Iterator[Tensor]:
        return (each for slots in self.slots.values() for each in slots.values() if isinstance(each, Tensor))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate moves."""

    state: Mapping[str, Any]
    """As stored."""
    words: tuple[Spec, ...] | None = None
    """In words of a recipe, by steps of the scheduler; none where the rate stays, None where it is not known."""
    position: int | None = None
    """Steps of the scheduler so far."""
    every: int | None = None
    """Updates for each step of the scheduler. None: not known, as loops may call `step()` after a batch or an epoch."""


@dataclasses.dataclass(frozen=True)
class RandomState:
    """The state of a generator of random numbers. It means something to that generator only, and is kept for it."""

    kind: str
    """`Python`, `numpy`, `torch, CPU`, `torch, CUDA`, `jax` or such."""
    state: Any
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    path: Path
    format: str
    """The name of its format: `hf`, `deepspeed`."""
    title: str
    """What it is in words, with the version where one is stored: `Lightning 2.6.6`."""
    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Parameters and buffers, by their names there."""
    optimizers: tuple[Optimizer, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    step: int | None = None
    """Updates made so far."""
    since: int = 0
    """Updates since it was stored, where a training model that was made of it has gone on."""
    progress: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Steps, epochs and the like, by their names there."""
    randomness: tuple[RandomState, ...] = ()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Where in its data the training is."""
    scaler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the loss, for float16."""
    averages: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Averaged parameters, by name, beside those that are trained."""
    average_decay: float | None = None
    """How much of an average stays in each update, where averages go on."""
    average_updates: int | None = None
    """Updates of the averages. None: not known."""
    clip: Mapping[str, Any] | None = None
    """How gradients are clipped, in words of a recipe: `{"norm": 1.0, "variant": "torch"}`. Empty: they are not
    clipped. None: not known."""
    accumulate: int | None = None
    """Batches for each update. None: not known. 0: several, and their number is not known."""
    waiting: int = 0
    """Batches since the last update, whose gradients are in what is stored, and not in what is said here."""
    loss: Any = None
    """In words of a recipe."""
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further names of tensors."""
    keeps_order: bool = False
    """Whether tensors are in the order of the module."""
    configuration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it says of the model."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it says of the training, such as the arguments of a trainer."""
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """How it was spread over processes."""
    files: tuple[str, ...] = ()
    """Other files in its folder, such as of a tokenizer."""
    trees: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All of it, as it was stored, by file; tensors are places."""
    executes: tuple[str, ...] = ()
    """Classes and functions that it names, which a loader that trusts it would call."""
    remarks: tuple[str, ...] = ()
    """What whoever goes on with it should know."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What an exact resume needs and is not in it."""
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
