"""Losses as Keras computes them, where none of ours is the same: of predictions and targets, not yet reduced.

Those in `ELEMENTWISE` give a number for each element, of which Keras takes the mean along the last axis first; the
others give one for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr, Function
from onward.recipe.losses.registry import reduce_loss

Formula = Callable[[Builder, Expr, Expr], Expr]


def _percentage(eps: float) -> Formula:
    return lambda op, p, t: op.Abs((t - p) / op.Max(op.Abs(t), eps)) * 100.0


def _squared_logarithmic(eps: float) -> Formula:
    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        error = op.Log(op.Max(p, eps) + 1.0) - op.Log(op.Max(t, eps) + 1.0)
        return error * error

    return formula


def _log_cosh(eps: float) -> Formula:
    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        error = p - t
        return error + op.Softplus(error * -2.0) - math.log(2.0)

    return formula


def _signs(op: Builder, t: Expr) -> Expr:
    """Targets that are all 0 or 1 mean -1 and 1."""
    other = op.Not(op.Or(op.Equal(t, 0.0), op.Equal(t, 1.0)))
    binary = op.Equal(op.ReduceSum(op.Cast(other, to=ir.DataType.INT64), keepdims=0), 0)
    return op.Where(binary, t * 2.0 - 1.0, t)


def _hinge(eps: float) -> Formula:
    return lambda op, p, t: op.Relu(1.0 - _signs(op, t) * p)


def _squared_hinge(eps: float) -> Formula:
    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        hinge = op.Relu(1.0 - _signs(op, t) * p)
        return hinge * hinge

    return formula


ELEMENTWISE: dict[str, Callable[[float], Formula]] = {
    "mean_absolute_percentage_error": _percentage,
    "mean_squared_logarithmic_error": _squared_logarithmic,
    "log_cosh": _log_cosh,
    "hinge": _hinge,
    "squared_hinge": _squared_hinge,
}


def _divergence(eps: float) -> Formula:
    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        p, t = op.Clip(p, eps, 1.0), op.Clip(t, eps, 1.0)
        return op.ReduceSum(t * op.Log(t / p), [-1], keepdims=0)

    return formula


def _cosine(eps: float) -> Formula:
    def unit(op: Builder, x: Expr) -> Expr:
        return x / op.Sqrt(op.Max(op.ReduceSumSquare(x, [-1], keepdims=1), 1e-12))

    return lambda op, p, t: -op.ReduceSum(unit(op, t) * unit(op, p), [-1], keepdims=0)


def _categorical_hinge(eps: float) -> Formula:
    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        right = op.ReduceSum(t * p, [-1], keepdims=0)
        wrong = op.ReduceMax((1.0 - t) * p, [-1], keepdims=0)
        return op.Relu(wrong - right + 1.0)

    return formula


BY_SAMPLE: dict[str, Callable[[float], Formula]] = {
    "kl_divergence": _divergence,
    "cosine_similarity": _cosine,
    "categorical_hinge": _categorical_hinge,
}


# ---- cross entropies of probabilities --------------------------------------------------------------------------------


def binary(eps: float, smoothing: float, from_logits: bool) -> Formula:
    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        t = t * (1.0 - smoothing) + 0.5 * smoothing
        if from_logits:
            return op.Softplus(p) - p * t
        p = op.Clip(p, eps, 1.0 - eps)
        return -(t * op.Log(p) + (1.0 - t) * op.Log(1.0 - p))

    return formula


def categorical(eps: float, smoothing: float, classes: int) -> Formula:
    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        if smoothing:
            t = t * (1.0 - smoothing) + smoothing / classes
        return -op.ReduceSum(t * op.Log(_clipped_share(op, p, eps)), [-1], keepdims=0)

    return formula


def sparse(eps: float, backend: str) -> Formula:
    """TensorFlow clips, and then divides by the sum; the others do it the other way round."""

    def formula(op: Builder, p: Expr, labels: Expr) -> Expr:
        if backend == "tensorflow":
            logs = op.LogSoftmax(op.Log(op.Clip(p, eps, 1.0 - eps)), axis=-1)
        else:
            logs = op.Log(_clipped_share(op, p, eps))
        return -op.Squeeze(op.GatherElements(logs, op.Unsqueeze(labels, [-1]), axis=-1), [-1])

    return formula


def _clipped_share(op: Builder, p: Expr, eps: float) -> Expr:
    return op.Clip(p / op.ReduceSum(p, [-1], keepdims=1), eps, 1.0 - eps)


# ---- focal losses, and those of regions ------------------------------------------------------------------------------


def binary_focal(eps: float, options: Mapping[str, Any], from_logits: bool) -> Formula:
    entropy = binary(eps, 0.0, from_logits)
    alpha, gamma, smoothing = (float(options[name]) for name in ("alpha", "gamma", "label_smoothing"))

    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        t = t * (1.0 - smoothing) + 0.5 * smoothing
        loss = entropy(op, p, t)
        p = op.Sigmoid(p) if from_logits else p
        loss = (1.0 - (t * p + (1.0 - t) * (1.0 - p))) ** gamma * loss
        return (t * alpha + (1.0 - t) * (1.0 - alpha)) * loss if options["apply_class_balancing"] else loss

    return formula


def categorical_focal(eps: float, options: Mapping[str, Any], classes: int) -> Formula:
    alpha, gamma, smoothing = (float(options[name]) for name in ("alpha", "gamma", "label_smoothing"))

    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        t = t * (1.0 - smoothing) + smoothing / classes
        share = _clipped_share(op, op.Softmax(p, axis=-1) if options["from_logits"] else p, eps)
        return -op.ReduceSum(t * op.Log(share) * (1.0 - share) ** gamma * alpha, [-1], keepdims=0)

    return formula


def overlap(eps: float, missed: float, invented: float) -> Formula:
    """1 - common / (common + missed + invented), over all elements of the batch."""

    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        common, only_t, only_p = (op.ReduceSum(part, keepdims=0) for part in (t * p, (1.0 - p) * t, p * (1.0 - t)))
        return 1.0 - common / (common + only_t * missed + only_p * invented + eps)

    return formula


def dice(eps: float) -> Formula:
    def formula(op: Builder, p: Expr, t: Expr) -> Expr:
        common, both = op.ReduceSum(t * p, keepdims=0), op.ReduceSum(t, keepdims=0) + op.ReduceSum(p, keepdims=0)
        return 1.0 - common * 2.0 / (both + eps)

    return formula


def generalized_cross_entropy(q: float) -> Formula:
    """(1 - p^q) / q of the probability of the right class."""

    def formula(op: Builder, p: Expr, labels: Expr) -> Expr:
        right = op.Squeeze(op.GatherElements(p, op.Unsqueeze(labels, [-1]), axis=-1), [-1])
        return (1.0 - right**q) / q

    return formula


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
