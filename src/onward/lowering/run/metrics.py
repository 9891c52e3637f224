"""Metrics inside a graph: the sums of recipe/metrics.py in operators of the standard.

Counts of classes are exact; means over several classes and sums of amounts may differ in the last
bit, as their order of summation does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import UnsupportedError
from onward.recipe.metrics import OF_LOSS, Measures
from onward.recipe.spec import parse

_INT, _DOUBLE = ir.DataType.INT64, ir.DataType.DOUBLE
_LARGE = 700
"""The loss above which perplexity is infinite."""


class GraphMetric(ABC):
    """A metric of an output, carried from batch to batch as sums."""

    def __init__(self, measures: Measures, output: ir.Value):
        self._measures = measures
        if output.shape is None:
            raise UnsupportedError(
                f"the number of axes of `{output.name}` is unknown",
                hint=f'declare its shape: `onward.transform.declare(model, {{"{output.name}": ["N", 10]}})`',
            )
        self._shape = list(output.shape)

    def start(self) -> list[np.ndarray]:
        """Return the sums before the first batch."""
        return [np.zeros((), np.int64), np.zeros((), np.int64)]

    @abstractmethod
    def parts(self, op: Builder, predictions: Expr, targets: Expr) -> Sequence[Expr]:
        """Return the summands of a batch."""

    @abstractmethod
    def result(self, op: Builder, *sums: Expr) -> Expr:
        """Return the metric in float64."""


def graph_metrics(measures: Measures, outputs: Mapping[str, ir.Value]) -> dict[str, GraphMetric]:
    """Return the metrics other than the loss and those that follow from it."""
    metrics: dict[str, GraphMetric] = {}
    for name in measures.names:
        spec = parse(name)
        if spec.name == OF_LOSS:
            continue
        if spec.name not in _METRICS:
            raise UnsupportedError(
                f"`{name}` cannot be computed in the graph", hint=f"metrics: {', '.join((*_METRICS, OF_LOSS))}"
            )
        if measures.output is None or measures.output not in outputs:
            raise UnsupportedError(f"the metric `{name}` needs `{measures.output}`, which is not an output")
        metrics[name] = _METRICS[spec.name](measures, outputs[measures.output], **spec.options)
    return metrics


def perplexity(op: Builder, loss: Expr) -> Expr:
    return op.Where(loss < _LARGE, op.Exp(loss), op.scalar(float("inf"), loss))


# ---- classes ---------------------------------------------------------------------------------------------------------


class _OfClasses(GraphMetric):
    """A metric of scores and labels; with a threshold, or of a single score, of decisions."""

    @property
    def _are_decisions(self) -> bool:
        return self._measures.threshold is not None or len(self._shape) < 2 or self._shape[self._measures.axis] == 1

    def _choose(self, op: Builder, predictions: Expr, targets: Expr) -> tuple[Expr, Expr]:
        """Return predicted and true class indices as vectors; ignored samples have -1."""
        if self._are_decisions:
            threshold = self._measures.threshold or 0.0
            predicted, true = (op.Cast(truths, to=_INT) for truths in (predictions > threshold, targets > 0.5))
        else:
            scores, true = self._classes(op, predictions, targets)
            predicted = op.ArgMax(scores, axis=1, keepdims=0)
        return op.Reshape(predicted, [-1]), op.Reshape(true, [-1])

    def _classes(self, op: Builder, predictions: Expr, targets: Expr) -> tuple[Expr, Expr]:
        """Return scores with classes along the second axis, and the true class indices."""
        rank, axis = len(self._shape), self._measures.axis
        if axis != 1:
            order = [i for i in range(rank) if i != axis % rank]
            order.insert(1, axis % rank)
            predictions = op.Transpose(predictions, perm=order)
        if targets.value.shape is not None and len(targets.value.shape) == rank:
            return predictions, op.ArgMax(targets, axis=1, keepdims=0)
        labels = op.Cast(targets, to=_INT)
        if self._measures.are_classes and self._measures.ignored is not None:
            labels = op.Where(op.Equal(labels, self._measures.ignored), op.scalar(-1, labels), labels)
        return predictions, labels


class _Accuracy(_OfClasses):
    def parts(self, op: Builder, predictions: Expr, targets: Expr) -> Sequence[Expr]:
        chosen, right = self._choose(op, predictions, targets)
        return _count(op, op.And(op.Equal(chosen, right), right >= 0)), _count(op, right >= 0)

    def result(self, op: Builder, *sums: Expr) -> Expr:
        return op.Div(*(op.Cast(total, to=_DOUBLE) for total in sums))


class _TopK(_Accuracy):
    def __init__(self, measures: Measures, output: ir.Value, k: int = 5):
        super().__init__(measures, output)
        self._k = int(k)
        if self._are_decisions:
            raise UnsupportedError("`top_k` needs scores of classes; the outputs of this model are decisions")

    def parts(self, op: Builder, predictions: Expr, targets: Expr) -> Sequence[Expr]:
        scores, labels = self._classes(op, predictions, targets)
        own = op.GatherElements(scores, op.Unsqueeze(op.Max(labels, 0), [1]), axis=1)
        above = op.ReduceSum(op.Cast(scores > own, to=_INT), [1], keepdims=0)
        return _count(op, op.And(above < self._k, labels >= 0)), _count(op, labels >= 0)


class _Confusion(_OfClasses):
    """A ratio of counts per class: correct predictions, predictions, and labels."""

    def __init__(self, ratio: Callable[..., tuple[Expr, Expr]], measures: Measures, output: ir.Value):
        super().__init__(measures, output)
        self._ratio = ratio
        classes = 2 if self._are_decisions else self._shape[measures.axis]
        if not isinstance(classes, int):
            raise UnsupportedError(f"the number of classes of `{output.name}` is unknown")
        self._number = classes

    def start(self) -> list[np.ndarray]:
        return [np.zeros(self._number, np.int64) for _ in range(3)]

    def parts(self, op: Builder, predictions: Expr, targets: Expr) -> Sequence[Expr]:
        classes = np.arange(self._number)
        chosen, right = (op.Unsqueeze(x, [1]) for x in self._choose(op, predictions, targets))
        is_chosen, is_right = op.And(op.Equal(chosen, classes), right >= 0), op.Equal(right, classes)
        return [_count(op, truths, [0]) for truths in (op.And(is_chosen, is_right), is_chosen, is_right)]

    def result(self, op: Builder, *sums: Expr) -> Expr:
        hits, chosen, right = (op.Cast(total, to=_DOUBLE) for total in sums)
        numerator, denominator = self._ratio(hits, chosen, right)
        shares = op.Where(denominator > 0, numerator / denominator, op.scalar(0, denominator))
        if self._number == 2:
            return op.Gather(shares, np.int64(1))
        present = _count(op, chosen + right > 0)
        return op.ReduceSum(shares, keepdims=0) / op.Cast(present, to=_DOUBLE)


def _count(op: Builder, truths: Expr, axes: Sequence[int] | None = None) -> Expr:
    return op.ReduceSum(op.Cast(truths, to=_INT), axes, keepdims=0)


# ---- amounts ---------------------------------------------------------------------------------------------------------


class _MAE(GraphMetric):
    def start(self) -> list[np.ndarray]:
        return [np.zeros(()), np.zeros(())]

    def parts(self, op: Builder, predictions: Expr, targets: Expr) -> Sequence[Expr]:
        wide = op.Cast(targets, to=_DOUBLE)
        difference = op.Reshape(op.Cast(predictions, to=_DOUBLE), op.Shape(wide)) - wide
        total = op.ReduceSum(self._of_each(op, difference), keepdims=0)
        return total, op.Cast(op.Size(difference), to=_DOUBLE)

    def result(self, op: Builder, *sums: Expr) -> Expr:
        total, count = sums
        return total / count

    def _of_each(self, op: Builder, difference: Expr) -> Expr:
        return op.Abs(difference)


class _RMSE(_MAE):
    def result(self, op: Builder, *sums: Expr) -> Expr:
        return op.Sqrt(super().result(op, *sums))

    def _of_each(self, op: Builder, difference: Expr) -> Expr:
        return difference * difference


_METRICS: Mapping[str, Callable[..., GraphMetric]] = {
    "accuracy": _Accuracy,
    "top_k": _TopK,
    "precision": partial(_Confusion, lambda hits, chosen, right: (hits, chosen)),
    "recall": partial(_Confusion, lambda hits, chosen, right: (hits, right)),
    "f1": partial(_Confusion, lambda hits, chosen, right: (hits * 2, chosen + right)),
    "mae": _MAE,
    "rmse": _RMSE,
}
