"""Metrics of predictions in a graph: what recipe/metrics.py adds up batch by batch, in operators of the standard.

Those of classes count, and are the same to the last bit; sums of amounts may differ in it, as their order does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import UnsupportedError
from onward.recipe.measures import OF_LOSS, Measures
from onward.recipe.spec import parse

_LARGE = 700
"""The loss from which on its exponential is called infinite."""


class GraphMetric(Protocol):
    """A metric that is carried from batch to batch as a part and a whole."""

    kind: ir.DataType
    """The type of both."""

    def parts(self, op: Builder, predictions: Expr, targets: Expr) -> tuple[Expr, Expr]:
        """What a batch adds to both."""

    def result(self, op: Builder, part: Expr, whole: Expr) -> Expr:
        """The metric, in float64."""


def graph_metrics(measures: Measures) -> dict[str, GraphMetric]:
    """What is measured beside the loss and what follows from it."""
    found: dict[str, GraphMetric] = {}
    for name in measures.names:
        spec = parse(name)
        if spec.name == OF_LOSS:
            continue
        if spec.name not in _METRICS:
            raise UnsupportedError(
                f"`{name}` is not measured within a graph", hint=f"there are {', '.join((*_METRICS, OF_LOSS))}"
            )
        found[name] = _METRICS[spec.name](measures, **spec.options)
    return found


def perplexity(op: Builder, loss: Expr) -> Expr:
    result: Expr = op.Where(loss < _LARGE, op.Exp(loss), op.scalar(float("inf"), loss))
    return result


# ---- classes ---------------------------------------------------------------------------------------------------------


class _Accuracy:
    kind = ir.DataType.INT64

    def __init__(self, measures: Measures):
        self._measures = measures

    def parts(self, op: Builder, predictions: Expr, targets: Expr) -> tuple[Expr, Expr]:
        if self._are_decisions(predictions):
            threshold = self._measures.threshold or 0.0
            chosen, right = (op.Reshape(each, [-1]) for each in (predictions > threshold, targets > 0.5))
            return _count(op, op.Equal(chosen, right)), op.Size(chosen)
        scores, labels = self._classes(op, predictions, targets)
        is_right = self._is_right(op, scores, labels)
        return _count(op, op.And(is_right, labels >= 0)), _count(op, labels >= 0)

    def result(self, op: Builder, part: Expr, whole: Expr) -> Expr:
        both = (op.Cast(each, to=ir.DataType.DOUBLE) for each in (part, whole))
        result: Expr = op.Div(*both)
        return result

    def _is_right(self, op: Builder, scores: Expr, labels: Expr) -> Expr:
        chosen = op.ArgMax(scores, axis=1, keepdims=0)
        result: Expr = op.Equal(chosen, labels)
        return result

    def _are_decisions(self, predictions: Expr) -> bool:
        shape = _known_shape(predictions)
        return self._measures.threshold is not None or len(shape) < 2 or shape[1] == 1

    def _classes(self, op: Builder, predictions: Expr, targets: Expr) -> tuple[Expr, Expr]:
        """Scores with classes along the second axis, and the number of one for each; of what does not count, -1."""
        rank, axis = len(_known_shape(predictions)), self._measures.axis
        if axis != 1:
            order = [i for i in range(rank) if i != axis % rank]
            order.insert(1, axis % rank)
            predictions = op.Transpose(predictions, perm=order)
        if len(_known_shape(targets)) == rank:
            return predictions, op.ArgMax(targets, axis=1, keepdims=0)
        labels = op.Cast(targets, to=ir.DataType.INT64)
        if self._measures.are_classes and self._measures.ignored is not None:
            labels = op.Where(op.Equal(labels, self._measures.ignored), op.scalar(-1, labels), labels)
        return predictions, labels


class _TopK(_Accuracy):
    def __init__(self, measures: Measures, k: int = 5):
        super().__init__(measures)
        self._k = int(k)

    def _are_decisions(self, predictions: Expr) -> bool:
        if super()._are_decisions(predictions):
            raise UnsupportedError("`top_k` is of classes, and the outputs of this model are decisions")
        return False

    def _is_right(self, op: Builder, scores: Expr, labels: Expr) -> Expr:
        own = op.GatherElements(scores, op.Unsqueeze(op.Max(labels, 0), [1]), axis=1)
        above = op.ReduceSum(op.Cast(scores > own, to=ir.DataType.INT64), [1], keepdims=0)
        result: Expr = above < self._k
        return result


def _count(op: Builder, truths: Expr) -> Expr:
    result: Expr = op.ReduceSum(op.Cast(truths, to=ir.DataType.INT64), keepdims=0)
    return result


def _known_shape(value: Expr) -> Sequence[object]:
    if value.value.shape is None:
        raise UnsupportedError(
            f"the number of axes of `{value.name}` is not known, so that it is not clear what its classes are",
            hint="declare the shape of the output: `onward infer`",
        )
    return list(value.value.shape)


# ---- amounts ---------------------------------------------------------------------------------------------------------


class _MAE:
    kind = ir.DataType.DOUBLE

    def __init__(self, measures: Measures):
        pass

    def parts(self, op: Builder, predictions: Expr, targets: Expr) -> tuple[Expr, Expr]:
        wanted = op.Cast(targets, to=ir.DataType.DOUBLE)
        difference = op.Reshape(op.Cast(predictions, to=ir.DataType.DOUBLE), op.Shape(wanted)) - wanted
        total = op.ReduceSum(self._of_each(op, difference), keepdims=0)
        return total, op.Cast(op.Size(difference), to=ir.DataType.DOUBLE)

    def result(self, op: Builder, part: Expr, whole: Expr) -> Expr:
        return part / whole

    def _of_each(self, op: Builder, difference: Expr) -> Expr:
        result: Expr = op.Abs(difference)
        return result


class _RMSE(_MAE):
    def result(self, op: Builder, part: Expr, whole: Expr) -> Expr:
        result: Expr = op.Sqrt(part / whole)
        return result

    def _of_each(self, op: Builder, difference: Expr) -> Expr:
        return difference * difference


_METRICS: Mapping[str, Callable[..., GraphMetric]] = {"accuracy": _Accuracy, "top_k": _TopK, "mae": _MAE, "rmse": _RMSE}
