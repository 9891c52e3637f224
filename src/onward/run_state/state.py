"""The data model of a training run, in words that no framework owns.

Objects of a framework, a training model and the files of a checkpoint are all read into a `RunState`, and written from
one. What a file stores is kept as it is (`settings`, `state` of a schedule, `trees`). What it means is said in the
words of a recipe, with the slot names of a training model, so that a writer need not know where a run came from.
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


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one optimizer updates with the same settings."""

    optimizer: Spec | FunctionOptimizer | None = None
    """As a recipe has it, with all numbers and choices that matter, `variant` among them; `lr` is the rate before any
    schedule. None: unknown."""
    parameters: Sequence[Any] = ()
    """Names; numbers where a checkpoint stores no names."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Hyper-parameters as stored, by the names of the framework; `lr` is the rate at that moment."""
    rate: float | None = None
    """The learning rate of the next update, if a training model says it."""
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Hyper-parameters in words of a recipe, if the class is unknown."""
    name: str = ""
    """In a training model."""
    operators: tuple[str, ...] = ()
    """The operators of a training model that compute the update."""
    slots: tuple[str, ...] = ()
    """The names of its slots in a training model."""

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer; empty if it is unknown."""
        return "" if self.optimizer is None else self.optimizer.name

    @property
    def spec(self) -> Spec:
        """The optimizer as a recipe names it; an UnsupportedError if that has no name for it."""
        if isinstance(self.optimizer, Spec):
            return self.optimizer
        raise UnsupportedError(
            f"the optimizer `{self.optimizer_name}` is a function, and none that has a name in recipes",
            hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
        )

    @property
    def is_function(self) -> bool:
        """True if the optimizer has no name in recipes, but is a function that updates all parameters at once."""
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
    """Names of recipes that it can be, by what it keeps: one, several that keep the same, or none."""
    groups: tuple[ParameterGroup, ...]
    slots: Mapping[str | int, Mapping[str, Any]]
    """Tensors and single numbers of each parameter. The names are those of a recipe's optimizers (`exp_avg`,
    `momentum_buffer`), with `step` and `master`."""
    variant: str = "torch"
    """The framework whose arithmetic it has, if no group says its optimizer."""

    @property
    def title(self) -> str:
        """The families in words."""
        return " or ".join(self.families) or "of a kind that is not known"

    @property
    def has_names(self) -> bool:
        return all(isinstance(name, str) for group in self.groups for name in group.parameters)

    @property
    def count(self) -> int | None:
        """The largest number of updates of any parameter."""
        counts = [slots[COUNT] for slots in self.slots.values() if COUNT in slots]
        return max((count_of(each) for each in counts if is_number(each)), default=None)

    @property
    def tensors(self) -> Iterator[Tensor]:
        return (each for slots in self.slots.values() for each in slots.values() if isinstance(each, Tensor))


@dataclasses.dataclass(frozen=True)
class SchedulerState:
    """A scheduler of the learning rate, as a checkpoint stores it."""

    state: Mapping[str, Any]
    """As stored."""
    words: tuple[Spec, ...] | None = None
    """In words of a recipe, by steps of the scheduler; empty if the rate stays, None if unknown."""
    position: int | None = None
    """Steps of the scheduler so far."""
    every: int | None = None
    """Updates for each step of the scheduler. None: unknown, as loops may call `step()` after a batch or an epoch."""


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
    """The inference model, with its weights as they are now."""
    loss: Any
    """What `prepare` takes: such as `Spec("cross_entropy", {"label_smoothing": 0.1})`, or a list of several."""
    groups: Sequence[ParameterGroup]
    """With the names of the model."""
    state: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """All state beside the weights, by the names of a training model: slots of optimizers (`fc.weight/exp_avg`),
    averages, random keys. State that is missing has its initial value."""
    step: int = 0
    """Updates made so far."""
    schedule: Sequence[Spec] = ()
    """Of the learning rate, by updates; each but the last says `until` which."""
    clip: Mapping[str, Any] | None = None
    """How gradients are clipped: `{"norm": 1.0, "variant": "torch"}`. In a checkpoint, empty if they are not, and None
    if that is unknown."""
    statistics: Variance = "population"
    """Which variance BatchNormalization keeps."""
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further options of `prepare`: accumulate, ema, seed."""

    # ---- as a framework stores it, with its names ----

    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Parameters and buffers, where there is no model."""
    optimizers: tuple[OptimizerState, ...] = ()
    schedules: tuple[SchedulerState, ...] = ()
    since: int = 0
    """Updates since it was stored, if a training model that was made of it has been trained since."""
    progress: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Steps, epochs and the like."""
    randomness: tuple[RandomState, ...] = ()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The position in the training data."""
    scaler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the loss, for float16."""
    averages: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Averaged parameters."""
    average_decay: float | None = None
    """The part of an average that stays in each update, if averages continue."""
    average_updates: int | None = None
    """Updates of the averages. None: unknown."""
    accumulate: int | None = None
    """Batches for each update. None: unknown. 0: several, and their number is unknown."""
    waiting: int = 0
    """Batches since the last update. Only what is stored has their gradients."""
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further names of tensors."""
    keeps_order: bool = False
    """True if tensors are in the order of the module."""
    configuration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the model."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the training, such as the arguments of a trainer."""
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """How it was divided between processes."""
    trees: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All that was stored, by file; tensors are places."""

    @property
    def parameters(self) -> list[str]:
        return [name for group in self.groups for name in group.parameters]

    @property
    def stored_groups(self) -> list[ParameterGroup]:
        """The groups of all `optimizers`."""
        return [group for optimizer in self.optimizers for group in optimizer.groups]

    @property
    def has_names(self) -> bool:
        """True if the state of all `optimizers` is stored by name."""
        return all(optimizer.has_names for optimizer in self.optimizers)
