"""What a model is measured by: the losses of a training model, the metrics that suit them, and which is the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onward.errors import RecipeError
from onward.model import Model
from onward.recipe.losses import LOSSES
from onward.recipe.losses.classes import NO_LABEL
from onward.recipe.metrics import METRICS, OF_CLASSES, Metric, make
from onward.recipe.spec import lookup, parse

OF_LOSS = "perplexity"
"""The metric that comes from the loss alone."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """One loss: what it compares, and how."""

    name: str
    """In full: `cross_entropy`, not `ce`."""
    output: str | None = None
    target: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def axis(self) -> int:
        """Along which the output has classes."""
        return int(self.options.get("axis", 1))

    @property
    def by_number(self) -> bool:
        """Whether targets are numbers of classes."""
        return self.name == "nll" or (self.name == "cross_entropy" and "target" not in self.options)


def objectives(training: Model) -> list[Objective]:
    """The losses of all steps, as far as the model says which they are."""
    return [
        Objective(
            LOSSES[fact["name"]].name if fact.get("name") in LOSSES else str(fact.get("name")),
            fact.get("output"),
            next(iter(fact.get("inputs") or ()), None),
            fact.get("options") or {},
        )
        for step in training.steps
        for fact in step.fact("train.loss") or []
    ]


@dataclasses.dataclass(frozen=True)
class Labels:
    """An input that holds classes by number."""

    name: str
    count: int
    ignored: int | None
    """The number that means none."""


def labels_of(training: Model) -> Labels | None:
    shapes = {value.name: value.shape for value in training.graph.outputs}
    for loss in objectives(training):
        shape = shapes.get(loss.output)
        if not loss.by_number or loss.target is None or shape is None or len(shape) < 2:
            continue
        if isinstance(count := shape[loss.axis], int):
            # The standard's operator ignores what it is told to; smoothed cross-entropy is a function of our own.
            unsaid = NO_LABEL if loss.options.get("label_smoothing") else None
            return Labels(loss.target, count, loss.options.get("ignore_index", unsaid))
    return None


@dataclasses.dataclass(frozen=True)
class Measures:
    """What is measured on validation data, and on which output and input of the model."""

    names: tuple[str, ...] = ()
    output: str | None = None
    target: str | None = None
    monitor: str = "loss"
    """What decides which model is the best."""
    axis: int = 1
    """Along which the output has classes."""
    threshold: float | None = None
    """Above which an output means yes, where each is a decision of its own."""
    are_classes: bool = False
    """Whether targets are numbers of classes."""
    ignored: int | None = None
    """The number that means none of them."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name == OF_LOSS:
                continue
            make(name)  # which refuses what there is not
            if self.are_classes and parse(name).name not in OF_CLASSES:
                raise RecipeError(
                    f"`{name}` compares amounts, and the targets of this loss are numbers of classes",
                    hint=f"for these there are {', '.join(OF_CLASSES)} and {OF_LOSS}",
                )
        lookup("metric to monitor", self.monitor, dict.fromkeys(("loss", *self.names)))
        if any(name != OF_LOSS for name in self.names) and (self.output is None or self.target is None):
            raise RecipeError(
                f"`{self.names[0]}` compares predictions with targets, and the loss of this model does not say which",
                hint="only `perplexity` comes from the loss alone",
            )

    def make(self) -> dict[str, Metric]:
        return {name: make(name, threshold=self.threshold) for name in self.names if name != OF_LOSS}

    def countable(self, targets: np.ndarray) -> np.ndarray:
        """Targets as metrics take them: what is negative does not count."""
        return np.where(targets == self.ignored, -1, targets) if self.are_classes else targets

    def is_better(self, value: float, best: float | None) -> bool:
        if best is None or not math.isfinite(value):
            return math.isfinite(value)
        return value > best if self.higher_is_better else value < best

    @property
    def higher_is_better(self) -> bool:
        """Whether what is monitored is."""
        metric = METRICS.get(parse(self.monitor).name)
        return metric is not None and metric.higher_is_better


_SUITABLE = {
    **dict.fromkeys(("cross_entropy", "nll", "binary_cross_entropy", "bce_with_logits", "hinge"), "accuracy"),
    **dict.fromkeys(("mse", "l1", "huber", "smooth_l1"), "mae"),
}
"""What to measure, where the loss is the only one and nothing else is said."""
_THRESHOLDS = {"binary_cross_entropy": 0.5, "bce_with_logits": 0.0, "hinge": 0.0, "squared_hinge": 0.0}
"""Losses of decisions, and the outputs above which they mean yes."""


def chosen_metrics(training: Model, given: Sequence[str] | str | None, monitor: str | None) -> tuple[str, ...]:
    """What is measured: what is given, or suits the loss, and what is monitored."""
    losses = objectives(training)
    if given is None:
        given = (_SUITABLE[losses[0].name],) if len(losses) == 1 and losses[0].name in _SUITABLE else ()
    chosen = (given,) if isinstance(given, str) else tuple(given)
    return chosen if monitor in (None, "loss", *chosen) else (*chosen, str(monitor))


def measures_of(training: Model, metrics: Sequence[str], monitor: str | None) -> Measures:
    """What is measured, by the loss of a training model; the first metric is monitored unless another is said."""
    loss = next(iter(objectives(training)), Objective(""))
    labels = labels_of(training)
    return Measures(
        tuple(metrics),
        loss.output,
        loss.target,
        monitor or (metrics[0] if metrics else "loss"),
        axis=loss.axis,
        threshold=_THRESHOLDS.get(loss.name),
        are_classes=loss.by_number,
        ignored=labels.ignored if labels is not None and labels.name == loss.target else None,
    )
