"""Metrics of predictions, added up batch by batch.

accuracy = make("accuracy")
accuracy.add(logits, labels)        # as often as there are batches
accuracy.result()
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from onward.recipe.spec import check_options, lookup, parse


class Metric(ABC):
    """A number that sums up predictions. Scores are logits or probabilities, classes along the second axis."""

    higher_is_better = True

    @abstractmethod
    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None: ...

    @abstractmethod
    def result(self) -> float: ...


class Accuracy(Metric):
    """The share of labels that have the highest score."""

    def __init__(self) -> None:
        self._right = self._all = 0

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        chosen, labels = _chosen(predictions), _labels(targets, predictions)
        counted = labels >= 0  # a negative label, such as -100, says: do not count
        self._right += int(np.sum((chosen == labels) & counted))
        self._all += int(np.sum(counted))

    def result(self) -> float:
        return self._right / self._all if self._all else float("nan")


class TopK(Metric):
    """The share of labels that are among the k highest scores."""

    def __init__(self, k: int = 5) -> None:
        self._k, self._right, self._all = int(k), 0, 0

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        k = min(self._k, predictions.shape[1])
        best = np.argpartition(-predictions, k - 1, axis=1)[:, :k] if k < predictions.shape[1] else None
        labels = _labels(targets, predictions)
        self._right += labels.size if best is None else int(np.sum(best == np.expand_dims(labels, 1)))
        self._all += labels.size

    def result(self) -> float:
        return self._right / self._all if self._all else float("nan")


class _Confusion(Metric):
    """Counts of label and chosen class; for two classes, the second is what is looked for, else the mean of all."""

    def __init__(self) -> None:
        self._counts = np.zeros((0, 0), np.int64)

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        chosen, labels = _chosen(predictions).reshape(-1), _labels(targets, predictions).reshape(-1)
        chosen, labels = chosen[labels >= 0], labels[labels >= 0]
        classes = max(2, predictions.shape[1] if predictions.ndim > 1 else 2, int(labels.max(initial=0)) + 1)
        grown = np.zeros((max(classes, len(self._counts)),) * 2, np.int64)
        grown[: len(self._counts), : len(self._counts)] = self._counts
        np.add.at(grown, (labels, chosen), 1)
        self._counts = grown

    def _averaged(self, of_classes: np.ndarray) -> float:
        if len(of_classes) == 2:
            return float(of_classes[1])
        present = self._counts.sum(0) + self._counts.sum(1) > 0
        return float(of_classes[present].mean()) if present.any() else float("nan")

    def _precision(self) -> np.ndarray:
        return _ratio(np.diag(self._counts), self._counts.sum(0))

    def _recall(self) -> np.ndarray:
        return _ratio(np.diag(self._counts), self._counts.sum(1))


class Precision(_Confusion):
    """How many of those that were chosen are right."""

    def result(self) -> float:
        return self._averaged(self._precision())


class Recall(_Confusion):
    """How many of those that are right were chosen."""

    def result(self) -> float:
        return self._averaged(self._recall())


class F1(_Confusion):
    """The harmonic mean of precision and recall."""

    def result(self) -> float:
        right = np.diag(self._counts)
        return self._averaged(_ratio(2 * right, self._counts.sum(0) + self._counts.sum(1)))


class AUC(Metric):
    """The chance that one of a class scores higher than one of the others; of several classes, the mean."""

    def __init__(self) -> None:
        self._scores: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        scores = predictions.astype(np.float32).reshape(len(predictions), -1)
        self._scores.append(scores[:, 1:] - scores[:, :1] if scores.shape[1] == 2 else scores)
        self._labels.append(_labels(targets, predictions).reshape(-1))

    def result(self) -> float:
        if not self._scores:
            return float("nan")
        scores, labels = np.concatenate(self._scores), np.concatenate(self._labels)
        classes = [1] if scores.shape[1] == 1 else range(scores.shape[1])
        areas = [_area(scores[:, i if scores.shape[1] > 1 else 0], labels == i) for i in classes]
        return float(np.nanmean(areas)) if not np.all(np.isnan(areas)) else float("nan")


class _Moments(Metric):
    """Sums of differences and of targets, in float64."""

    def __init__(self) -> None:
        self._count = 0
        self._absolute = self._squared = self._total = self._total_squared = 0.0

    def add(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        given = np.asarray(targets, np.float64)
        difference = np.asarray(predictions, np.float64).reshape(given.shape) - given
        self._count += given.size
        self._absolute += float(np.abs(difference).sum())
        self._squared += float(np.square(difference).sum())
        self._total += float(given.sum())
        self._total_squared += float(np.square(given).sum())


class MAE(_Moments):
    """The mean absolute difference."""

    higher_is_better = False

    def result(self) -> float:
        return self._absolute / self._count if self._count else float("nan")


class RMSE(_Moments):
    """The root of the mean squared difference."""

    higher_is_better = False

    def result(self) -> float:
        return float(np.sqrt(self._squared / self._count)) if self._count else float("nan")


class R2(_Moments):
    """The share of the variance that the predictions explain."""

    def result(self) -> float:
        variance = self._total_squared - self._total**2 / self._count if self._count else 0.0
        return 1 - self._squared / variance if variance > 0 else float("nan")


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


def make(spec: str) -> Metric:
    """A metric by its name, with options: `"top_k:k=5"`."""
    wanted = parse(spec)
    kind = lookup("metric", wanted.name, METRICS)
    check_options(f"the metric `{wanted.name}`", wanted.options, inspect.signature(kind).parameters)
    return kind(**wanted.options)


def _chosen(predictions: np.ndarray) -> np.ndarray:
    if predictions.ndim > 1 and predictions.shape[1] > 1:
        return np.argmax(predictions, axis=1)
    return (predictions.reshape(len(predictions), -1)[:, 0] > 0).astype(np.int64)  # the logit of the second class


def _labels(targets: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Classes by number, also where targets are given as probabilities."""
    if targets.shape == predictions.shape and predictions.ndim > 1 and predictions.shape[1] > 1:
        return np.argmax(targets, axis=1)
    binary = predictions.ndim == 1 or predictions.shape[1] == 1
    return targets.reshape(len(targets)).astype(np.int64) if binary else targets.astype(np.int64)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    """By ranks; equal scores share theirs."""
    if positive.all() or not positive.any():
        return float("nan")
    _, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[where]
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(scores) - count)))
