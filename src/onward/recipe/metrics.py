"""Metrics of predictions, accumulated batch by batch.

accuracy = make("accuracy")
accuracy.add(logits, labels)        # as often as there are batches
accuracy.result()
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor
from onward.errors import RecipeError
from onward.model import Model
from onward.model.core import values
from onward.recipe.losses import LOSSES
from onward.recipe.losses.definitions import NO_LABEL
from onward.recipe.spec import check_options, lookup, parse


class Metric(ABC):
    """An accumulated metric. It is NaN if nothing was added."""

    higher_is_better = True

    @abstractmethod
    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None: ...

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Add the sums of another process."""

    @abstractmethod
    def result(self) -> float: ...


def _check_sizes(predictions: np.ndarray, targets: np.ndarray) -> None:
    if predictions.size != targets.size or len(predictions) != len(targets):
        shapes = f"{list(predictions.shape)} and {list(targets.shape)}"
        raise RecipeError(
            f"predictions and targets of a metric differ in shape: {shapes}",
            hint="choose other metrics, or `metrics=[]` for the loss alone",
        )


# ---- classes ---------------------------------------------------------------------------------------------------------


class _OfClasses(Metric):
    """A metric of classes: scores along the second axis; targets are class indices or scores.

    With a `threshold` or a single score, each score is a yes-or-no decision. Negative labels, such
    as -100, do not count.
    """

    def __init__(self, threshold: float | None = None) -> None:
        self._threshold = threshold

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        if self._threshold is not None or predictions.ndim < 2 or predictions.shape[1] == 1:
            _check_sizes(predictions, targets)
            self._add(predictions.reshape(len(predictions), -1), (targets > 0.5).reshape(len(predictions), -1))
            return
        labels = targets.argmax(1) if targets.shape == predictions.shape else targets
        _check_sizes(predictions[:, 0], labels)
        scores = np.moveaxis(predictions, 1, -1).reshape(-1, predictions.shape[1])
        labels = labels.reshape(-1).astype(np.int64)
        self._add(scores[labels >= 0], labels[labels >= 0])

    @abstractmethod
    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        """Add rows of scores with a class index each; or a table of decisions with 0 or 1 each."""

    def _choose(self, scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the chosen and the right classes as indices."""
        if labels.dtype == bool:
            return (scores > (self._threshold or 0.0)).reshape(-1).astype(np.int64), labels.reshape(-1).astype(np.int64)
        return scores.argmax(1), labels


class Accuracy(_OfClasses):
    """The share of labels that have the highest score."""

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__(threshold)
        self._right = self._all = 0

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        chosen, right = self._choose(scores, labels)
        self._count(chosen == right)

    def _count(self, right: np.ndarray) -> None:
        self._right += int(np.sum(right))
        self._all += len(right)

    def merge(self, other: Self) -> None:
        self._right, self._all = self._right + other._right, self._all + other._all

    def result(self) -> float:
        return self._right / self._all if self._all else float("nan")


class TopK(Accuracy):
    """The share of labels that are among the k highest scores."""

    def __init__(self, k: int = 5) -> None:
        super().__init__()
        self._k = int(k)

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        own = np.take_along_axis(scores, labels.reshape(-1, 1).astype(np.int64), axis=1)
        self._count(np.sum(scores > own, axis=1) < self._k)


class _Confusion(_OfClasses):
    """Counts of label and chosen class. Of two classes the second is positive; else the mean
    counts."""

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__(threshold)
        self._counts = np.zeros((0, 0), np.int64)

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        chosen, right = self._choose(scores, labels)
        classes = max(2, scores.shape[1] if labels.dtype != bool else 2, int(right.max(initial=0)) + 1)
        counts = np.zeros((classes, classes), np.int64)
        np.add.at(counts, (right, chosen), 1)
        self._add_counts(counts)

    def merge(self, other: Self) -> None:
        self._add_counts(other._counts)

    def _add_counts(self, counts: np.ndarray) -> None:
        total = np.zeros((max(len(counts), len(self._counts)),) * 2, np.int64)
        for table in (counts, self._counts):
            total[: len(table), : len(table)] += table
        self._counts = total

    def _average_over_classes(self, hits: np.ndarray, whole: np.ndarray) -> float:
        of_classes = np.divide(hits, whole, out=np.zeros(len(hits)), where=whole > 0)
        if len(of_classes) == 2:
            return float(of_classes[1])
        present = self._counts.sum(0) + self._counts.sum(1) > 0
        return float(of_classes[present].mean()) if present.any() else float("nan")


class Precision(_Confusion):
    """The share of chosen items that are right."""

    def result(self) -> float:
        return self._average_over_classes(np.diag(self._counts), self._counts.sum(0))


class Recall(_Confusion):
    """The share of right items that were chosen."""

    def result(self) -> float:
        return self._average_over_classes(np.diag(self._counts), self._counts.sum(1))


class F1(_Confusion):
    """The harmonic mean of precision and recall."""

    def result(self) -> float:
        return self._average_over_classes(2 * np.diag(self._counts), self._counts.sum(0) + self._counts.sum(1))


class AUC(_OfClasses):
    """The probability that an item of a class scores higher than another; mean over classes."""

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__(threshold)
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        self._batches.append((scores, labels))

    def merge(self, other: Self) -> None:
        self._batches += other._batches

    def result(self) -> float:
        if not self._batches:
            return float("nan")
        scores, labels = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        if labels.dtype == bool:
            areas = [_area(scores[:, i], labels[:, i]) for i in range(scores.shape[1])]
        else:
            areas = [_area(chances, labels == i) for i, chances in _chances(scores).items()]
        areas_of_classes = [area for area in areas if area == area]
        return float(np.mean(areas_of_classes)) if areas_of_classes else float("nan")


def _chances(scores: np.ndarray) -> dict[int, np.ndarray]:
    """Return scores that grow with class probabilities and compare across samples."""
    scores = scores.astype(np.float64)
    if scores.shape[1] == 2:
        return {1: scores[:, 1] - scores[:, 0]}
    if (scores < 0).any() or not np.allclose(scores.sum(1), 1, atol=1e-3):
        powers = np.exp(scores - scores.max(1, keepdims=True))
        scores = powers / powers.sum(1, keepdims=True)
    return dict(enumerate(scores.T))


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    if positive.all() or not positive.any():
        return float("nan")
    _, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[where]
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(scores) - count)))


# ---- amounts ---------------------------------------------------------------------------------------------------------


class _OfAmounts(Metric):
    """Differences to targets in float64, and sums for the variance of targets, per column."""

    def __init__(self) -> None:
        self._count = 0
        self._absolute, self._squared, self._mean, self._variation = (np.zeros(()) for _ in range(4))
        """The sum of squares of differences to the mean."""

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        _check_sizes(predictions, targets)
        expected = targets.astype(np.float64).reshape(len(targets), -1)
        difference = predictions.astype(np.float64).reshape(expected.shape) - expected
        batch = type(self)()
        batch._count, batch._mean = len(expected), expected.mean(0)
        batch._absolute, batch._squared = np.abs(difference).sum(0), np.square(difference).sum(0)
        batch._variation = np.square(expected - batch._mean).sum(0)
        self.merge(batch)

    def merge(self, other: Self) -> None:
        if not other._count:
            return
        self._absolute, self._squared = self._absolute + other._absolute, self._squared + other._squared
        shift, total = other._mean - self._mean, self._count + other._count  # Chan et al. 1979: sums of variances
        self._variation = self._variation + other._variation + shift**2 * (self._count * other._count / total)
        self._mean = self._mean + shift * (other._count / total)
        self._count = total


class MAE(_OfAmounts):
    """The mean absolute difference."""

    higher_is_better = False

    def result(self) -> float:
        return float(np.mean(self._absolute / self._count)) if self._count else float("nan")


class RMSE(_OfAmounts):
    """The root of the mean squared difference."""

    higher_is_better = False

    def result(self) -> float:
        return float(np.sqrt(np.mean(self._squared / self._count))) if self._count else float("nan")


class R2(_OfAmounts):
    """The share of the variance that predictions explain; the mean over columns."""

    def result(self) -> float:
        if not self._count:
            return float("nan")
        perfect = np.where(self._squared == 0, 1.0, 0.0)  # for constant targets, as scikit-learn
        varies = self._variation > 0
        return float(np.mean(np.where(varies, 1 - self._squared / np.where(varies, self._variation, 1.0), perfect)))


METRICS: Mapping[str, type[Metric]] = {
    "accuracy": Accuracy,
    "top_k": TopK,
    "precision": Precision,
    "recall": Recall,
    "f1": F1,
    "auc": AUC,
    "mae": MAE,
    "rmse": RMSE,
    "r2": R2,
}


OF_CLASSES = tuple(name for name, metric in METRICS.items() if issubclass(metric, _OfClasses))
"""Metrics of class indices; others are of amounts."""


def make(spec: str, **defaults: Any) -> Metric:
    """Return the metric of a spec such as `"top_k:k=5"`. `defaults` fill options that it has."""
    parsed = parse(spec)
    metric = lookup("metric", parsed.name, METRICS)
    parameters = inspect.signature(metric).parameters
    check_options(f"the metric `{parsed.name}`", parsed.options, parameters)
    return metric(**{**{name: value for name, value in defaults.items() if name in parameters}, **parsed.options})


# ---- the metrics of a training model ---------------------------------------------------------------------------------


OF_LOSS = "perplexity"
"""The metric that comes from the loss alone."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss and its arguments."""

    name: str
    """The full name: `cross_entropy`, not `ce`."""
    output: str | None = None
    target: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def axis(self) -> int:
        """Axis of classes in the output."""
        return int(self.options.get("axis", 1))

    @property
    def by_number(self) -> bool:
        """True if targets are class indices."""
        return self.name == "nll" or (self.name == "cross_entropy" and "target" not in self.options)


def objectives(training: Model) -> list[Objective]:
    """Return the losses of all steps that the model records."""
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
    """An input that holds class indices."""

    name: str
    count: int
    ignored: int | None
    """The ignored class index."""


def labels_of(training: Model) -> Labels | None:
    shapes = {value.name: value.shape for value in values(training.graph)}
    for loss in objectives(training):
        shape = shapes.get(loss.output)
        if not loss.by_number or loss.target is None or shape is None or len(shape) < 2:
            continue
        if isinstance(count := shape[loss.axis], int):
            # Only smoothed cross-entropy, a function of Onward, ignores a label by default.
            default = NO_LABEL if loss.options.get("label_smoothing") else None
            return Labels(loss.target, count, loss.options.get("ignore_index", default))
    return None


_CLASS_NAMES = ("classlabels_strings", "value_strings")
"""Attributes of `ai.onnx.ml`, and of the Constant that a trainable LinearClassifier looks up."""


def class_names(model: Model, count: int) -> tuple[str, ...]:
    """Return the names that the model gives to its classes, in the order of their numbers; () if it has none."""
    lists = set()
    for node in model.graph:
        lists.update(tuple(a.as_strings()) for name, a in node.attributes.items() if name in _CLASS_NAMES)
        table = constant_tensor(node.inputs[0]) if node.op_type in ("Gather", "ArrayFeatureExtractor") else None
        if table is not None and table.dtype is ir.DataType.STRING:
            lists.add(tuple(name.decode() if isinstance(name, bytes) else str(name) for name in table.numpy().flat))
    lists = {names for names in lists if len(names) == count}
    return lists.pop() if len(lists) == 1 else ()


@dataclasses.dataclass(frozen=True)
class Measures:
    """Metrics on validation data, with the output and the input that they compare."""

    names: tuple[str, ...] = ()
    output: str | None = None
    target: str | None = None
    monitor: str = "loss"
    """The metric that decides which model is the best."""
    axis: int = 1
    """Axis of classes in the output."""
    threshold: float | None = None
    """Threshold above which an output means yes, for independent decisions."""
    are_classes: bool = False
    """True if targets are class indices."""
    ignored: int | None = None
    """The ignored class index."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name == OF_LOSS:
                continue
            make(name)  # raises if it is unknown
            if self.are_classes and parse(name).name not in OF_CLASSES:
                raise RecipeError(
                    f"`{name}` compares amounts, but the targets are class indices",
                    hint=f"choose among {', '.join(OF_CLASSES)} and {OF_LOSS}",
                )
        lookup("metric to monitor", self.monitor, dict.fromkeys(("loss", *self.names)))
        if any(name != OF_LOSS for name in self.names) and (self.output is None or self.target is None):
            raise RecipeError(
                f"`{self.names[0]}` needs predictions and targets, which the loss does not name",
                hint=f"choose `{OF_LOSS}`, which needs the loss alone",
            )

    def make(self) -> dict[str, Metric]:
        return {name: make(name, threshold=self.threshold) for name in self.names if name != OF_LOSS}

    def countable(self, targets: np.ndarray) -> np.ndarray:
        """Return targets as metrics take them: negative class indices are ignored."""
        return np.where(targets == self.ignored, -1, targets) if self.are_classes else targets

    def is_better(self, value: float, best: float | None) -> bool:
        if best is None or not math.isfinite(value):
            return math.isfinite(value)
        return value > best if self.higher_is_better else value < best

    @property
    def higher_is_better(self) -> bool:
        """True if a larger value of the monitored metric is better."""
        metric = METRICS.get(parse(self.monitor).name)
        return metric is not None and metric.higher_is_better


_SUITABLE = {
    **dict.fromkeys(("cross_entropy", "nll", "binary_cross_entropy", "bce_with_logits", "hinge"), "accuracy"),
    **dict.fromkeys(("mse", "l1", "huber", "smooth_l1"), "mae"),
}
"""The default metric by the name of the only loss."""
_THRESHOLDS = {"binary_cross_entropy": 0.5, "bce_with_logits": 0.0, "hinge": 0.0, "squared_hinge": 0.0}
"""Losses of decisions -> the threshold above which their output means yes."""


def chosen_metrics(training: Model, metrics: Sequence[str] | str | None, monitor: str | None) -> tuple[str, ...]:
    """Return the names of metrics: `metrics`, or that of the loss, and the monitored one."""
    losses = objectives(training)
    if metrics is None:
        metrics = (_SUITABLE[losses[0].name],) if len(losses) == 1 and losses[0].name in _SUITABLE else ()
    chosen = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    return chosen if monitor in (None, "loss", *chosen) else (*chosen, str(monitor))


def measures_of(training: Model, metrics: Sequence[str], monitor: str | None) -> Measures:
    """Return the metrics for the loss of a training model (default monitor: the first)."""
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
