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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor
from onward.errors import RecipeError
from onward.model import Model
from onward.model.core import values
from onward.model.state import PREPROCESSING, ROLE_KEY
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

    @property
    def kept(self) -> int:
        """The number of values that it keeps in memory, which grows with the data."""
        return 0


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
        scores, labels, _ = items(predictions, targets, self._threshold)
        self._add(scores, labels)

    @abstractmethod
    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        """Add rows of scores with a class index each; or a table of decisions with 0 or 1 each."""

    def _choose(self, scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the chosen and the right classes as indices."""
        if labels.dtype == bool:
            return (scores > (self._threshold or 0.0)).reshape(-1).astype(np.int64), labels.reshape(-1).astype(np.int64)
        return scores.argmax(1), labels


def items(
    predictions: np.ndarray, targets: np.ndarray, threshold: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scores [items, classes], a class index each, and the row of each.

    For decisions, labels are booleans [items, decisions]. Items without a label are left out.
    """
    positions = predictions.size // max(predictions.shape[0] * (predictions.shape[1] if predictions.ndim > 1 else 1), 1)
    rows = np.repeat(np.arange(len(predictions)), positions)
    if threshold is not None or predictions.ndim < 2 or predictions.shape[1] == 1:
        _check_sizes(predictions, targets)
        scores, labels = (np.atleast_2d(x.T).T for x in (predictions, (targets > 0.5).reshape(predictions.shape)))
        scores, labels = (np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]) for x in (scores, labels))
        return scores, labels, rows
    indices = targets.argmax(1) if targets.shape == predictions.shape else targets
    _check_sizes(predictions[:, 0], indices)
    scores = np.moveaxis(predictions, 1, -1).reshape(-1, predictions.shape[1])
    indices = indices.reshape(-1).astype(np.int64)
    counts = indices >= 0
    return (scores, indices, rows) if counts.all() else (scores[counts], indices[counts], rows[counts])


def probabilities(scores: np.ndarray, kind: str | None, decisions: bool = False) -> np.ndarray:
    """Return scores as probabilities along the last axis; each decision has its own.

    `kind` is `logits`, `probabilities` or `log-probabilities` (default: read off the values).
    """
    if kind is None:
        is_one = decisions or np.allclose(scores.sum(-1), 1, atol=1e-3)
        kind = "probabilities" if (scores >= 0).all() and (scores <= 1).all() and is_one else "logits"
    if kind == "probabilities":
        return scores
    if kind == "log-probabilities":
        return np.exp(scores)
    if decisions:
        return np.exp(-np.logaddexp(0, -scores))
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


class Sums(NamedTuple):
    """Counts of classes, on the last axis: chosen rightly, chosen, and present."""

    hits: np.ndarray
    chosen: np.ndarray
    present: np.ndarray
    are_decisions: bool

    def mean(self, parts: np.ndarray, wholes: np.ndarray, positive: bool, counted: np.ndarray) -> np.ndarray:
        """Return the mean of `parts / wholes` over the `counted` classes, or that of the second alone."""
        shares = np.divide(parts, wholes, out=np.zeros(parts.shape), where=wholes > 0)
        if positive and shares.shape[-1] == 2:
            return np.asarray(shares[..., 1])
        number = counted.sum(-1)
        mean = np.where(counted, shares, 0.0).sum(-1) / np.maximum(number, 1)
        return np.asarray(np.where(number > 0, mean, np.nan))

    @property
    def occurs(self) -> np.ndarray:
        return self.chosen + self.present > 0


class Accuracy(_OfClasses):
    """The share of labels that have the highest score."""

    @staticmethod
    def of(sums: Sums) -> np.ndarray:
        return np.asarray(sums.hits.sum(-1) / sums.present.sum(-1))

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


class ExactMatch(Accuracy):
    """The share of rows of which all decisions are right."""

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        right = (scores > (self._threshold or 0.0)) == labels if labels.dtype == bool else scores.argmax(1) == labels
        self._count(right.reshape(len(right), -1).all(1))


class Confusion(_OfClasses):
    """Counts of label and chosen class; one table for classes, or one for each kind of decision.

    Of two classes the second is positive; else the mean over classes counts.
    """

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__(threshold)
        self.tables = np.zeros((0, 0, 0), np.int64)
        """[kinds of decisions, 2, 2] or [1, classes, classes]; label first."""
        self.are_decisions = False

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        self.are_decisions = labels.dtype == bool
        if self.are_decisions:
            kinds = scores.shape[1]
            cells = 4 * np.arange(kinds) + 2 * labels + (scores > (self._threshold or 0.0))
            self._grow((kinds, 2, 2))
            self.tables += np.bincount(cells.reshape(-1), minlength=4 * kinds).reshape(kinds, 2, 2)
            return
        self._grow((1, *(max(2, scores.shape[1], int(labels.max(initial=0)) + 1),) * 2))
        np.add.at(self.tables[0], (labels, scores.argmax(1)), 1)

    def merge(self, other: Self) -> None:
        self.are_decisions |= other.are_decisions
        self._grow(other.tables.shape)
        kinds, classes, _ = other.tables.shape
        self.tables[:kinds, :classes, :classes] += other.tables

    def _grow(self, shape: Sequence[int]) -> None:
        more = [(0, max(wanted - size, 0)) for wanted, size in zip(shape, self.tables.shape, strict=True)]
        self.tables = np.pad(self.tables, more) if any(after for _, after in more) else self.tables

    def sums(self) -> Sums:
        table = self.tables.sum(0)
        return Sums(np.diag(table), table.sum(0), table.sum(1), self.are_decisions)

    @staticmethod
    @abstractmethod
    def of(sums: Sums) -> np.ndarray:
        """Return the metric of counts; further axes come first."""

    def result(self) -> float:
        return float(self.of(self.sums())) if self.tables.size else float("nan")


class Precision(Confusion):
    """The share of chosen items that are right."""

    @staticmethod
    def of(sums: Sums) -> np.ndarray:
        return sums.mean(sums.hits, sums.chosen, True, sums.occurs)


class Recall(Confusion):
    """The share of right items that were chosen."""

    @staticmethod
    def of(sums: Sums) -> np.ndarray:
        return sums.mean(sums.hits, sums.present, True, sums.occurs)


class F1(Confusion):
    """The harmonic mean of precision and recall."""

    @staticmethod
    def of(sums: Sums) -> np.ndarray:
        return sums.mean(2 * sums.hits, sums.chosen + sums.present, True, sums.occurs)


class BalancedAccuracy(Confusion):
    """The mean recall of the classes that are present, also of two."""

    @staticmethod
    def of(sums: Sums) -> np.ndarray:
        return sums.mean(sums.hits, sums.present, False, sums.present > 0)


class MCC(Confusion):
    """Matthews' correlation coefficient of labels and choices."""

    @staticmethod
    def of(sums: Sums) -> np.ndarray:
        hits, chosen, present = (x.astype(np.float64) for x in sums[:3])
        total = present.sum(-1)
        covariance = hits.sum(-1) * total - (chosen * present).sum(-1)
        scale = np.sqrt((total**2 - (chosen**2).sum(-1)) * (total**2 - (present**2).sum(-1)))
        return np.asarray(np.divide(covariance, scale, out=np.zeros(scale.shape), where=scale > 0))


class IoU(Confusion):
    """The intersection over the union of label and choice; of classes the mean, also of two."""

    @staticmethod
    def of(sums: Sums) -> np.ndarray:
        return sums.mean(sums.hits, sums.chosen + sums.present - sums.hits, sums.are_decisions, sums.occurs)


class Dice(Confusion):
    """Twice the intersection over the sum of sizes; of classes the mean, also of two."""

    @staticmethod
    def of(sums: Sums) -> np.ndarray:
        return sums.mean(2 * sums.hits, sums.chosen + sums.present, sums.are_decisions, sums.occurs)


class Ranking(_OfClasses):
    """A metric of the order of scores, which keeps all of them; mean over classes."""

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__(threshold)
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []
        self._areas: list[tuple[float, float]] = []  # of each class, once computed: sorting takes long

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        self._batches.append((scores, labels))
        self._areas.clear()

    def merge(self, other: Self) -> None:
        self._batches += other._batches
        self._areas.clear()

    @property
    def kept(self) -> int:
        return sum(scores.size for scores, _ in self._batches)

    def _mean(self, kind: int) -> float:
        """Return the mean over classes of one of `_areas_of`."""
        if not self._areas:
            self._areas.extend(_areas_of(*pair) for pair in self._of_classes())
        areas = [pair[kind] for pair in self._areas if not math.isnan(pair[kind])]
        return float(np.mean(areas)) if areas else float("nan")

    def best_threshold(self, scores: str | None) -> tuple[float, float] | None:
        """Return the probability from which a yes gives the best F1, and that F1; None for several classes."""
        pairs = list(self._of_classes(scores))
        if len(pairs) != 1 or not pairs[0][1].any():
            return None
        ranked, hits, count = _ranked(*pairs[0])
        f1 = 2 * hits / (count + hits[-1])
        return float(ranked[f1.argmax()]), float(f1.max())

    def _of_classes(self, kind: str | None = "") -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield scores and membership of each class; scores are probabilities if `kind` says what they are."""
        if not self._batches:
            return
        scores, labels = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        if labels.dtype == bool:
            scores = scores if kind == "" else probabilities(scores.astype(np.float64), kind, True)
            yield from ((scores[:, i], labels[:, i]) for i in range(scores.shape[1]))
        elif kind != "" and scores.shape[1] == 2:
            yield probabilities(scores.astype(np.float64), kind)[:, 1], labels == 1
        else:
            yield from ((chances, labels == i) for i, chances in _chances(scores).items())


class AUC(Ranking):
    """The probability that an item of a class scores higher than another; mean over classes."""

    def result(self) -> float:
        return self._mean(0)


class AveragePrecision(Ranking):
    """The area below the curve of precision over recall, in steps; mean over classes."""

    def result(self) -> float:
        return self._mean(1)


def _areas_of(scores: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Return the areas below the ROC curve and below that of precision over recall; NaN without both kinds of items."""
    if not positive.any():
        return float("nan"), float("nan")
    _, hits, count = _ranked(scores, positive)
    gains, misses = np.diff(hits, prepend=0), np.diff(count - hits, prepend=0)
    pairs = int(hits[-1]) * int(count[-1] - hits[-1])
    area = float(np.sum(misses * (2 * hits - gains))) / 2 / pairs if pairs else float("nan")
    return area, float(np.sum(gains * hits / count) / hits[-1])


def _ranked(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distinct scores in descending order, and how many positive and all items have at least that score."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    return ranked[last], np.cumsum(positive[order])[last], last + 1


def _chances(scores: np.ndarray) -> dict[int, np.ndarray]:
    """Return scores that grow with class probabilities and compare across samples."""
    scores = scores.astype(np.float64)
    if scores.shape[1] == 2:
        return {1: scores[:, 1] - scores[:, 0]}
    return dict(enumerate(probabilities(scores, None).T))


class _OfProbabilities(_OfClasses):
    """A metric of probabilities. `scores` says what the output is, as for `probabilities`."""

    higher_is_better = False

    def __init__(self, threshold: float | None = None, scores: str | None = None) -> None:
        super().__init__(threshold)
        self._scores = scores

    def merge(self, other: Self) -> None:
        for name, sum_of_other in vars(other).items():
            if not name.startswith("_"):
                setattr(self, name, getattr(self, name) + sum_of_other)


class LogLoss(_OfProbabilities):
    """The mean of -log p of the right class."""

    def __init__(self, threshold: float | None = None, scores: str | None = None) -> None:
        super().__init__(threshold, scores)
        self.total, self.count = 0.0, 0

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        losses = self.losses(scores, labels)
        self.total, self.count = self.total + float(losses.sum()), self.count + losses.size

    def losses(self, scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return -log p of each item, in float64; probabilities are kept from 0, as in scikit-learn."""
        are_decisions = labels.dtype == bool
        wide = scores.astype(np.float64)
        if self._scores == "logits":
            if are_decisions:
                return np.logaddexp(0, np.where(labels, -wide, wide))
            of_label = np.take_along_axis(wide, labels[:, None], 1)[:, 0]
            most = wide.max(1)
            return np.asarray(np.log(np.exp(wide - most[:, None]).sum(1)) + most - of_label)
        p = probabilities(wide, self._scores, are_decisions)
        p = np.where(labels, p, 1 - p) if are_decisions else np.take_along_axis(p, labels[:, None], 1)[:, 0]
        least = float(np.finfo(scores.dtype if scores.dtype.kind == "f" else np.float32).eps)
        return np.asarray(-np.log(np.clip(p, least, 1 - least)))

    def result(self) -> float:
        return self.total / self.count if self.count else float("nan")


class CalibrationError(_OfProbabilities):
    """ECE: how far confidence is from the share of right answers, mean over items in `bins` equal bins.

    Confidence is the probability of the chosen class; for a decision, that of yes.
    """

    def __init__(self, bins: int = 15, threshold: float | None = None, scores: str | None = None) -> None:
        super().__init__(threshold, scores)
        self._bins = int(bins)
        self.counts, self.confidences, self.rights = (np.zeros(self._bins) for _ in range(3))

    def _add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        p = probabilities(scores.astype(np.float64), self._scores, labels.dtype == bool)
        if labels.dtype == bool:
            confidence, right = p.reshape(-1), labels.reshape(-1)
        else:
            confidence, right = p.max(1, initial=0), scores.argmax(1) == labels
        edges = np.linspace(0, 1, self._bins + 1)
        bins = np.clip(np.digitize(confidence, edges) - 1, 0, self._bins - 1)
        self.counts += np.bincount(bins, minlength=self._bins)
        self.confidences += np.bincount(bins, confidence, minlength=self._bins)
        self.rights += np.bincount(bins, right, minlength=self._bins)

    def result(self) -> float:
        total = self.counts.sum()
        return float(np.abs(self.confidences - self.rights).sum() / total) if total else float("nan")


# ---- amounts ---------------------------------------------------------------------------------------------------------


class _OfAmounts(Metric):
    """Differences to targets in float64, and sums for the variance of targets, per column."""

    def __init__(self) -> None:
        self._count = 0
        self._absolute, self._squared, self._relative, self._mean, self._variation = (np.zeros(()) for _ in range(5))
        """The last is the sum of squares of differences to the mean."""

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        _check_sizes(predictions, targets)
        expected = targets.astype(np.float64).reshape(len(targets), -1)
        difference = predictions.astype(np.float64).reshape(expected.shape) - expected
        batch = type(self)()
        batch._count, batch._mean = len(expected), expected.mean(0)
        batch._absolute, batch._squared = np.abs(difference).sum(0), np.square(difference).sum(0)
        batch._relative = (np.abs(difference) / np.maximum(np.abs(expected), np.finfo(np.float64).eps)).sum(0)
        batch._variation = np.square(expected - batch._mean).sum(0)
        self.merge(batch)

    def merge(self, other: Self) -> None:
        if not other._count:
            return
        self._absolute, self._squared = self._absolute + other._absolute, self._squared + other._squared
        self._relative = self._relative + other._relative
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


class MSE(_OfAmounts):
    """The mean squared difference."""

    higher_is_better = False

    def result(self) -> float:
        return float(np.mean(self._squared / self._count)) if self._count else float("nan")


class MAPE(_OfAmounts):
    """The mean of absolute differences divided by absolute targets."""

    higher_is_better = False

    def result(self) -> float:
        return float(np.mean(self._relative / self._count)) if self._count else float("nan")


class R2(_OfAmounts):
    """The share of the variance that predictions explain; the mean over columns."""

    def result(self) -> float:
        if not self._count:
            return float("nan")
        perfect = np.where(self._squared == 0, 1.0, 0.0)  # for constant targets, as scikit-learn
        varies = self._variation > 0
        return float(np.mean(np.where(varies, 1 - self._squared / np.where(varies, self._variation, 1.0), perfect)))


class MedianError(Metric):
    """The median absolute difference, mean over columns. Keeps all differences."""

    higher_is_better = False

    def __init__(self) -> None:
        self._differences: list[np.ndarray] = []

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        _check_sizes(predictions, targets)
        difference = predictions.astype(np.float64).reshape(len(targets), -1) - targets.reshape(len(targets), -1)
        self._differences.append(difference.astype(np.float32))

    def merge(self, other: Self) -> None:
        self._differences += other._differences

    @property
    def kept(self) -> int:
        return sum(map(np.size, self._differences))

    def result(self) -> float:
        if not self._differences:
            return float("nan")
        return float(np.median(np.abs(np.concatenate(self._differences)), 0).mean())

    def summary(self) -> dict[str, float]:
        """Return mean, deviation and quartiles of predictions minus targets."""
        if not self._differences:
            return {}
        residuals = np.concatenate(self._differences).astype(np.float64)
        names = ("min", "25%", "median", "75%", "max")
        quartiles = np.quantile(residuals, [0, 0.25, 0.5, 0.75, 1])
        return {"mean": float(residuals.mean()), "std": float(residuals.std())} | dict(
            zip(names, map(float, quartiles), strict=True)
        )


METRICS: Mapping[str, type[Metric]] = {
    "accuracy": Accuracy,
    "top_k": TopK,
    "exact_match": ExactMatch,
    "balanced_accuracy": BalancedAccuracy,
    "precision": Precision,
    "recall": Recall,
    "f1": F1,
    "mcc": MCC,
    "auc": AUC,
    "pr_auc": AveragePrecision,
    "iou": IoU,
    "dice": Dice,
    "log_loss": LogLoss,
    "ece": CalibrationError,
    "mse": MSE,
    "rmse": RMSE,
    "mae": MAE,
    "r2": R2,
    "mape": MAPE,
    "median_error": MedianError,
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


class Metrics:
    """Several metrics by name. Those that accumulate the same sums share them."""

    def __init__(self, names: Sequence[str], most: float = math.inf, **defaults: Any):
        self._metrics = {name: make(name, **defaults) for name in names}
        self._keys = {name: (_adding(type(metric)), str(parse(name).options)) for name, metric in self._metrics.items()}
        self._sums = {self._keys[name]: metric for name, metric in self._metrics.items()}
        self._most = most
        self.dropped: list[str] = []
        """Metrics that would keep more than `most` values."""

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        for key, metric in list(self._sums.items()):
            metric.add(predictions, targets)
            if metric.kept > self._most:
                del self._sums[key]
                self.dropped += [name for name in self._metrics if self._keys[name] == key]

    def gather(self, gather: Callable[[Metric], Sequence[Metric]]) -> None:
        """Add the sums of other processes: `gather` returns those of all."""
        for key, metric in self._sums.items():
            self._sums[key], *others = gather(metric)
            for other in others:
                self._sums[key].merge(other)

    def __iter__(self) -> Iterator[Metric]:
        """Yield a metric for each kind of sums."""
        return iter(self._sums.values())

    def results(self) -> dict[str, float]:
        kept = {name: metric for name, metric in self._metrics.items() if name not in self.dropped}
        for name, metric in kept.items():
            vars(metric).update(vars(self._sums[self._keys[name]]))
        return {name: metric.result() for name, metric in kept.items()}


def _adding(cls: type[Metric]) -> type:
    """Return the class that defines what a metric accumulates."""
    return next(base for base in cls.__mro__ if {"add", "_add"} & vars(base).keys())


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

    @property
    def ignored(self) -> int | None:
        """Class index that is ignored."""
        # Only smoothed cross-entropy, a function of Onward, ignores a label by default.
        return self.options.get("ignore_index", NO_LABEL if self.options.get("label_smoothing") else None)


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
    shapes = {value.name: value.shape for value in values(training.graph)}  # a loss may read an inner value
    for loss in objectives(training):
        shape = shapes.get(loss.output)
        if not loss.by_number or loss.target is None or shape is None or len(shape) < 2:
            continue
        if isinstance(count := shape[loss.axis], int):
            return Labels(loss.target, count, loss.ignored)
    return None


_CLASS_NAMES = ("classlabels_strings", "value_strings")
"""Attributes of `ai.onnx.ml`, and of the Constant that a trainable LinearClassifier looks up."""


def class_names(model: Model, count: int) -> tuple[str, ...]:
    """Return the names that the model gives to its classes, in the order of their numbers; () if it has none."""
    lists: set[tuple[str, ...]] = set()
    for node in model.graph:
        if node.metadata_props.get(ROLE_KEY) == PREPROCESSING:  # a tokenizer has texts, too
            continue
        lists.update(tuple(a.as_strings()) for name, a in node.attributes.items() if name in _CLASS_NAMES)
        table = constant_tensor(node.inputs[0]) if node.op_type in ("Gather", "ArrayFeatureExtractor") else None
        if table is not None and table.dtype is ir.DataType.STRING:
            lists.add(tuple(name.decode() if isinstance(name, bytes) else str(name) for name in table.numpy().flat))
    lists = {names for names in lists if len({name for name in names if name.strip()}) == count == len(names)}
    return lists.pop() if len(lists) == 1 else ()


Pair = tuple[np.ndarray, np.ndarray]


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
    scores: str | None = None
    """What the output is: `logits`, `probabilities` or `log-probabilities`, if known."""

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

    def make(self, most: float = math.inf) -> Metrics:
        names = [name for name in self.names if name != OF_LOSS]
        return Metrics(names, most, threshold=self.threshold, scores=self.scores)

    def pairs(self, results: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray], samples: int) -> Pair:
        """Return predictions with classes on axis 1, and targets; negative class indices do not count."""
        assert self.output is not None and self.target is not None
        predictions, targets = results[self.output][:samples], batch[self.target][:samples]
        if self.axis != 1 and predictions.ndim > 1:
            predictions = np.moveaxis(predictions, self.axis, 1)
        if self.are_classes and self.ignored is not None:
            targets = np.where(targets == self.ignored, -1, targets)
        return predictions, targets

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
SCORES = {
    "cross_entropy": "logits",
    "bce_with_logits": "logits",
    "nll": "log-probabilities",
    "binary_cross_entropy": "probabilities",
}
"""Losses of classes -> what they take."""


def chosen_metrics(training: Model, metrics: Sequence[str] | str | None, monitor: str | None) -> tuple[str, ...]:
    """Return the names of metrics: `metrics`, or that of the loss, and the monitored one."""
    losses = objectives(training)
    if metrics is None:
        metrics = (_SUITABLE[losses[0].name],) if len(losses) == 1 and losses[0].name in _SUITABLE else ()
    chosen = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    return chosen if monitor in (None, "loss", *chosen) else (*chosen, str(monitor))


def measures_of(training: Model, metrics: Sequence[str], monitor: str | None) -> Measures:
    """Return the metrics for the loss of a training model (default monitor: the first)."""
    objective, labels = next(iter(objectives(training)), Objective("")), labels_of(training)
    ignored = labels.ignored if labels is not None and labels.name == objective.target else None
    return measures_for(objective, metrics, monitor, ignored)


def measures_for(
    objective: Objective,
    metrics: Sequence[str],
    monitor: str | None = None,
    ignored: int | None = None,
    scores: str | None = None,
) -> Measures:
    """Return the metrics for a loss. `scores` says what its output is (default: what the loss takes)."""
    threshold = _THRESHOLDS.get(objective.name)
    return Measures(
        tuple(metrics),
        objective.output,
        objective.target,
        monitor or (metrics[0] if metrics else "loss"),
        axis=objective.axis,
        threshold=threshold if threshold is None or scores != "probabilities" else 0.5,
        are_classes=objective.by_number,
        ignored=ignored,
        scores=scores or SCORES.get(objective.name),
    )
