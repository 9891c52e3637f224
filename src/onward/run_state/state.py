"""The data model of a training run, independent of frameworks.

Objects of a framework, training models and files of checkpoints are read into a `RunState` and
written from one. Stored values are kept unchanged (`settings`, `state` of a schedule, `trees`).
Their meaning is stored in words of a recipe with slot names of a training model, so that writers
are independent of readers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.errors import UnsupportedError, list_names
from onward.model import Model
from onward.options import Variance
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import DOMAIN as FUNCTIONS
from onward.recipe.spec import Spec
from onward.run_state.tensors import Tensor, count_of, is_number

MASTER = "master"
"""The slot that holds a float32 copy of a parameter of a narrower type."""
COUNT = "step"
"""The slot that holds the number of updates of a parameter."""
RUN_ITSELF = "run the training model itself: `onward.engines.start(model, engine=...)`"
"""The hint of an error about a training model that objects of a framework cannot represent."""


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that an optimizer updates with the same settings."""

    optimizer: Spec | FunctionOptimizer | None = None
    """Optimizer of a recipe, with all numbers and choices that have an effect, such as `variant`.
    `lr` is the rate before any schedule. None: unknown."""
    parameters: Sequence[Any] = ()
    """Names; numbers where a checkpoint stores no names."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Hyper-parameters as stored, by the framework's names; `lr` is the current rate."""
    rate: float | None = None
    """Learning rate of the next update; None without a training model."""
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Hyper-parameters in words of a recipe, if the class is unknown."""
    name: str = ""
    """Name in a training model."""
    operators: tuple[str, ...] = ()
    """The operators of a training model that compute the update."""
    slots: tuple[str, ...] = ()
    """The names of its slots in a training model."""

    @property
    def optimizer_name(self) -> str:
        """Return the name of the optimizer; empty if it is unknown."""
        return "" if self.optimizer is None else self.optimizer.name

    @property
    def spec(self) -> Spec:
        """Return the optimizer as a recipe names it; raise an UnsupportedError without a name."""
        if isinstance(self.optimizer, Spec):
            return self.optimizer
        raise UnsupportedError(
            f"the optimizer `{self.optimizer_name}` is a function without a name in recipes", hint=RUN_ITSELF
        )

    @property
    def is_function(self) -> bool:
        """True if the optimizer is a function without a name in recipes."""
        is_call = any(operator.startswith(f"{FUNCTIONS}.") for operator in self.operators)
        return is_call or isinstance(self.optimizer, FunctionOptimizer)

    @property
    def lr(self) -> float:
        if isinstance(self.optimizer, FunctionOptimizer):
            return self.optimizer.lr
        if "lr" not in self.spec.options:
            raise UnsupportedError(
                f"the training model has no learning rate for {list_names(self.parameters, 3)}",
                hint="`onward check` names the damage",
            )
        return float(self.spec.options["lr"])


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """An optimizer with its state, as a checkpoint stores it."""

    families: tuple[str, ...]
    """Possible names in recipes, by its slots: one, several with the same slots, or none."""
    groups: tuple[ParameterGroup, ...]
    slots: Mapping[str | int, Mapping[str, Any]]
    """Tensors and single numbers of each parameter, by their names in recipes (`exp_avg`,
    `momentum_buffer`), with `step` and `master`."""
    variant: str = "torch"
    """Framework whose arithmetic it uses, if no group names its optimizer."""

    @property
    def title(self) -> str:
        return " or ".join(self.families) or "of an unknown kind"

    @property
    def has_names(self) -> bool:
        return all(isinstance(name, str) for group in self.groups for name in group.parameters)

    @property
    def count(self) -> int | None:
        """Return the largest number of updates of any parameter."""
        counts = [slots[COUNT] for slots in self.slots.values() if COUNT in slots]
        return max((count_of(count) for count in counts if is_number(count)), default=None)

    @property
    def tensors(self) -> Iterator[Tensor]:
        return (value for slots in self.slots.values() for value in slots.values() if isinstance(value, Tensor))


@dataclasses.dataclass(frozen=True)
class SchedulerState:
    """A scheduler of the learning rate, as a checkpoint stores it."""

    state: Mapping[str, Any]
    """State as stored."""
    words: tuple[Spec, ...] | None = None
    """Schedules by steps of the scheduler; empty for a constant rate, None if unknown."""
    position: int | None = None
    """Steps of the scheduler so far."""
    every: int | None = None
    """Updates for each step of the scheduler. None: unknown, as loops may call `step()` after a
    batch or an epoch."""


@dataclasses.dataclass(frozen=True)
class RandomState:
    """The state of a random number generator. Only that generator can read it."""

    kind: str
    """`Python`, `numpy`, `torch, CPU`, `torch, CUDA`, `jax` or such."""
    state: Any
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class RunState:
    """A training run at some moment."""

    model: Model
    """Inference model with the current weights."""
    loss: Any
    """Loss for `prepare`: such as `Spec("cross_entropy", {"label_smoothing": 0.1})`, or a list."""
    groups: Sequence[ParameterGroup]
    """Groups with names of the model."""
    state: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """All state beside the weights, by the names of a training model: slots of optimizers
    (`fc.weight/exp_avg`), averages, random keys. State that is missing has its initial value."""
    step: int = 0
    """Updates made so far."""
    schedule: Sequence[Spec] = ()
    """Schedules of the learning rate, by updates; all but the last have `until`."""
    clip: Mapping[str, Any] | None = None
    """Gradient clipping: `{"norm": 1.0, "variant": "torch"}`. In a checkpoint, empty without
    clipping and None if unknown."""
    statistics: Variance = "population"
    """Variance that BatchNormalization stores."""
    updates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Statistics that the model itself computes: tensor -> the value that replaces it in training."""
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further options of `prepare`: accumulate, ema, seed."""

    # ---- as a framework stores it, with its names ----

    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Parameters and buffers, if `model` is None."""
    optimizers: tuple[OptimizerState, ...] = ()
    schedules: tuple[SchedulerState, ...] = ()
    since: int = 0
    """Updates that a training model made after the checkpoint was stored."""
    progress: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Steps, epochs and the like."""
    randomness: tuple[RandomState, ...] = ()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The position in the training data."""
    scaler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Loss scaler for float16."""
    averages: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Averaged parameters."""
    average_decay: float | None = None
    """Decay of the averages, if they continue."""
    average_updates: int | None = None
    """Updates of the averages. None: unknown."""
    accumulate: int | None = None
    """Batches for each update. None: unknown. 0: several, and their number is unknown."""
    waiting: int = 0
    """Batches since the last update. Their gradients are only in the stored files."""
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further names of tensors."""
    keeps_order: bool = False
    """True if tensors are in the order of the module."""
    configuration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Configuration of the model."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the training, such as those of a trainer."""
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Division among processes."""
    trees: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All stored trees, by file, with tensors as locations."""

    @property
    def parameters(self) -> list[str]:
        return [name for group in self.groups for name in group.parameters]

    @property
    def stored_groups(self) -> list[ParameterGroup]:
        """Return the groups of all `optimizers`."""
        return [group for optimizer in self.optimizers for group in optimizer.groups]

    @property
    def stored_slots(self) -> Iterator[tuple[str | int, str, Any]]:
        """Yield parameter, slot and value of the state of all `optimizers`."""
        for optimizer in self.optimizers:
            for name, slots in optimizer.slots.items():
                yield from ((name, slot, value) for slot, value in slots.items())

    @property
    def own_optimizers(self) -> tuple[OptimizerState, ...]:
        """Return the optimizers of the module; those of other modules in its files have no names."""
        return tuple(optimizer for optimizer in self.optimizers if optimizer.has_names) or self.optimizers

    @property
    def own_schedules(self) -> tuple[SchedulerState, ...]:
        """Return the schedules of `own_optimizers`, if optimizers have one each."""
        if len(self.schedules) != len(self.optimizers):
            return self.schedules
        own = [any(optimizer is other for other in self.own_optimizers) for optimizer in self.optimizers]
        return tuple(schedule for schedule, is_own in zip(self.schedules, own, strict=True) if is_own)

    @property
    def has_names(self) -> bool:
        """True if the state of all `optimizers` is stored by name."""
        return all(optimizer.has_names for optimizer in self.optimizers)
