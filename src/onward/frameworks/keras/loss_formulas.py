"""Losses as Keras computes them, where none of ours is the same: of predictions and targets, not yet reduced.

Those in `ELEMENTWISE` give a number for each element, of which Keras takes the mean along the last axis first; the
others give one for each sample. What a formula asks for by keyword are settings of the loss,
as numbers: 0 for what is not so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import onnx_ir as ir

from onward.build import Builder, Expr, Function
from onward.recipe.losses.definitions import reduce_loss

Formula = Callable[..., Expr]


def _percentage(op: Builder, p: Expr, t: Expr, *, eps: float) -> Expr:
    return op.Abs((t - p) / op.Max(op.Abs(t), eps)) * 100.0


def _squared_logarithmic(op: Builder, p: Expr, t: Expr, *, eps: float) -> Expr:
    error = op.Log(op.Max(p, eps) + 1.0) - op.Log(op.Max(t, eps) + 1.0)
    return error * error


def _log_cosh(op: Builder, p: Expr, t: Expr) -> Expr:
    error = p - t
    return error + op.Softplus(error * -2.0) - math.log(2.0)


def _hinge(op: Builder, p: Expr, t: Expr) -> Expr:
    """Targets that are all 0 or 1 mean -1 and 1."""
    other = op.Not(op.Or(op.Equal(t, 0.0), op.Equal(t, 1.0)))
    binary = op.Equal(op.ReduceSum(op.Cast(other, to=ir.DataType.INT64), keepdims=0), 0)
    return op.Relu(1.0 - op.Where(binary, t * 2.0 - 1.0, t) * p)


def _squared_hinge(op: Builder, p: Expr, t: Expr) -> Expr:
    hinge = _hinge(op, p, t)
    return hinge * hinge


def _divergence(op: Builder, p: Expr, t: Expr, *, eps: float) -> Expr:
    p, t = op.Clip(p, eps, 1.0), op.Clip(t, eps, 1.0)
    return op.ReduceSum(t * op.Log(t / p), [-1], keepdims=0)


def _cosine(op: Builder, p: Expr, t: Expr) -> Expr:
    t, p = (x / op.Sqrt(op.Max(op.ReduceSumSquare(x, [-1], keepdims=1), 1e-12)) for x in (t, p))
    return -op.ReduceSum(t * p, [-1], keepdims=0)


def _categorical_hinge(op: Builder, p: Expr, t: Expr) -> Expr:
    right = op.ReduceSum(t * p, [-1], keepdims=0)
    wrong = op.ReduceMax((1.0 - t) * p, [-1], keepdims=0)
    return op.Relu(wrong - right + 1.0)


# ---- cross entropies of probabilities --------------------------------------------------------------------------------


def binary(op: Builder, p: Expr, t: Expr, *, eps: float, label_smoothing: float, from_logits: float) -> Expr:
    t = t * (1.0 - label_smoothing) + 0.5 * label_smoothing
    if from_logits:
        return op.Softplus(p) - p * t
    p = op.Clip(p, eps, 1.0 - eps)
    return -(t * op.Log(p) + (1.0 - t) * op.Log(1.0 - p))


def categorical(op: Builder, p: Expr, t: Expr, *, eps: float, label_smoothing: float, classes: float) -> Expr:
    if label_smoothing:
        t = t * (1.0 - label_smoothing) + label_smoothing / classes
    return -op.ReduceSum(t * op.Log(_clipped_share(op, p, eps)), [-1], keepdims=0)


def sparse(op: Builder, p: Expr, labels: Expr, *, eps: float) -> Expr:
    """TensorFlow clips, and then divides by the sum; the others do it the other way round."""
    if keras.backend.backend() == "tensorflow":
        logs = op.LogSoftmax(op.Log(op.Clip(p, eps, 1.0 - eps)), axis=-1)
    else:
        logs = op.Log(_clipped_share(op, p, eps))
    return -_of_right_class(op, logs, labels)


def _clipped_share(op: Builder, p: Expr, eps: float) -> Expr:
    return op.Clip(p / op.ReduceSum(p, [-1], keepdims=1), eps, 1.0 - eps)


def _of_right_class(op: Builder, x: Expr, labels: Expr) -> Expr:
    return op.Squeeze(op.GatherElements(x, op.Unsqueeze(labels, [-1]), axis=-1), [-1])


# ---- focal losses, and those of regions ------------------------------------------------------------------------------


def _binary_focal(
    op: Builder,
    p: Expr,
    t: Expr,
    *,
    eps: float,
    alpha: float,
    gamma: float,
    label_smoothing: float,
    apply_class_balancing: float,
    from_logits: float,
) -> Expr:
    t = t * (1.0 - label_smoothing) + 0.5 * label_smoothing
    loss = binary(op, p, t, eps=eps, label_smoothing=0.0, from_logits=from_logits)
    p = op.Sigmoid(p) if from_logits else p
    loss = (1.0 - (t * p + (1.0 - t) * (1.0 - p))) ** gamma * loss
    return (t * alpha + (1.0 - t) * (1.0 - alpha)) * loss if apply_class_balancing else loss


def _categorical_focal(
    op: Builder,
    p: Expr,
    t: Expr,
    *,
    eps: float,
    alpha: float,
    gamma: float,
    label_smoothing: float,
    classes: float,
    from_logits: float,
) -> Expr:
    t = t * (1.0 - label_smoothing) + label_smoothing / classes
    share = _clipped_share(op, op.Softmax(p, axis=-1) if from_logits else p, eps)
    return -op.ReduceSum(t * op.Log(share) * (1.0 - share) ** gamma * alpha, [-1], keepdims=0)


def _tversky(op: Builder, p: Expr, t: Expr, *, eps: float, alpha: float, beta: float) -> Expr:
    """1 - common / (common + missed + invented), over all elements of the batch."""
    common, only_t, only_p = (op.ReduceSum(part, keepdims=0) for part in (t * p, (1.0 - p) * t, p * (1.0 - t)))
    return 1.0 - common / (common + only_t * alpha + only_p * beta + eps)


def _dice(op: Builder, p: Expr, t: Expr, *, eps: float) -> Expr:
    common, both = op.ReduceSum(t * p, keepdims=0), op.ReduceSum(t, keepdims=0) + op.ReduceSum(p, keepdims=0)
    return 1.0 - common * 2.0 / (both + eps)


def _generalized_cross_entropy(op: Builder, p: Expr, labels: Expr, *, q: float) -> Expr:
    """(1 - p^q) / q of the probability of the right class."""
    return (1.0 - _of_right_class(op, p, labels) ** q) / q


ELEMENTWISE: dict[str, Formula] = {
    "mean_absolute_percentage_error": _percentage,
    "mean_squared_logarithmic_error": _squared_logarithmic,
    "log_cosh": _log_cosh,
    "hinge": _hinge,
    "squared_hinge": _squared_hinge,
    "binary_focal_crossentropy": _binary_focal,
}
BY_SAMPLE: dict[str, Formula] = {
    "kl_divergence": _divergence,
    "cosine_similarity": _cosine,
    "categorical_hinge": _categorical_hinge,
    "categorical_focal_crossentropy": _categorical_focal,
    "dice": _dice,
    "tversky": _tversky,
    "categorical_generalized_cross_entropy": _generalized_cross_entropy,
}


# ---- as a loss of a recipe -------------------------------------------------------------------------------------------


def as_function(name: str, formula: Formula, target: ir.Value, *, opset: int, reduction: str, scale: float) -> Any:
    """A function of the prediction and of a target that is called as `target` is."""

    def body(op: Builder, prediction: Expr, target: Expr) -> Expr:
        loss = reduce_loss(op, formula(op, prediction, target), reduction)
        return loss if scale == 1.0 else loss * scale

    body.__doc__ = f"loss = the {reduction} of `keras.losses.{name}`, times {scale:g}."
    functions: dict[ir.OperatorIdentifier, ir.Function] = {}
    camel = "".join(part.capitalize() for part in name.split("_"))
    Function(body, ["loss"], f"Keras{camel}_{target.name}").define(functions, opset)
    (made,) = functions.values()
    made.inputs[1].name, made.inputs[1].type, made.inputs[1].shape = target.name, target.type, target.shape
    return made
