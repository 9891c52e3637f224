"""Losses of classifiers: one class for each position, or a sequence of classes for a sequence of positions."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.recipe.losses import functions as f
from onward.recipe.losses.alignment import ConnectionistTemporalClassification
from onward.recipe.losses.registry import Target, check, dtype_of, numbers, one_of, reduce_loss, register_loss

NO_LABEL = -100
"""The label that is ignored where nobody says which: not a class, and PyTorch's choice."""


def _labels(prediction: ir.Value, *, axis: int, target: str = "indices", **_: Any) -> tuple[Target]:
    """Class indices have the shape of the prediction without its classes."""
    dims = _dims(prediction, rank=2, form="[N, C, ...]" if one_of("axis", axis, 1, -1) == 1 else "[..., C]")
    if one_of("target", target, "indices", "probabilities") == "probabilities":
        return (Target("target", dtype_of(prediction), prediction.shape),)
    if dims is not None:
        del dims[axis]
    return (Target("labels", ir.DataType.INT64, None if dims is None else ir.Shape(dims)),)


def _sequences(prediction: ir.Value, *, batch_first: bool, **_: Any) -> tuple[Target, ...]:
    """Padded label sequences [N, S], and the lengths [N] of inputs and of labels."""
    dims = _dims(prediction, rank=3, form="[N, T, C]" if batch_first else "[T, N, C]")
    batch = None if dims is None else dims[0 if batch_first else 1]
    shapes = {"labels": [batch, None], "input_lengths": [batch], "target_lengths": [batch]}
    return tuple(Target(name, ir.DataType.INT64, ir.Shape(shape)) for name, shape in shapes.items())


def _dims(prediction: ir.Value, *, rank: int, form: str) -> list[int | ir.SymbolicDim] | None:
    shape = prediction.shape
    check(
        shape is None or len(shape) >= rank,
        f"`{prediction.name}` has the shape {shape}; this loss needs {form}",
        "add the axes that it lacks, of size 1 (`Unsqueeze`)",
    )
    return None if shape is None else list(shape)


@register_loss("cross_entropy", "ce", targets=_labels)
def cross_entropy(
    op: Builder,
    logits: Expr,
    labels: Expr,
    *,
    target: str = "indices",
    weight: Sequence[float] | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    axis: int = 1,
    reduction: str = "mean",
) -> Expr:
    """Cross entropy of logits with class indices or, for target="probabilities", with class probabilities.

    The classes are on axis 1, as in images [N, C, H, W], or on axis -1, as in text [N, T, C]. The mean over indices
    divides by the weights of the labels that are not ignored, the mean over probabilities by the number of positions.
    """
    soft = one_of("target", target, "indices", "probabilities") == "probabilities"
    check(not soft or ignore_index is None, "class probabilities have no ignore_index", "give them rows of zeros")
    check(0 <= label_smoothing <= 1, f"label_smoothing is {label_smoothing}", "it is between 0 and 1")
    weights, smoothing = _class_weights(weight, logits, axis), np.float64(label_smoothing)
    rows, labels = _rows(op, logits, labels, axis, soft)
    if soft:
        labels = op.call(f.SmoothLabels, labels, smoothing) if smoothing else labels
        labels = op.call(f.WeightClasses, labels, weights) if weights is not None else labels
        loss = reduce_loss(op, op.call(f.CrossEntropyWithProbabilities, rows, labels), reduction)
    elif smoothing:
        inputs = rows, labels, np.float64(1) if weights is None else weights, smoothing
        ignored = NO_LABEL if ignore_index is None else _index(ignore_index)
        smoothed, counted = op.call(f.SmoothedCrossEntropy, *inputs, ignore_index=ignored)
        loss = reduce_loss(op, smoothed, reduction, weight=counted)
    else:
        loss = _standard(op, "SoftmaxCrossEntropyLoss", rows, labels, weights, ignore_index, reduction)
    return _unrows(op, loss, logits, axis, reduction)


@register_loss("nll", targets=_labels)
def nll(
    op: Builder,
    log_probabilities: Expr,
    labels: Expr,
    *,
    weight: Sequence[float] | None = None,
    ignore_index: int | None = None,
    axis: int = 1,
    reduction: str = "mean",
) -> Expr:
    """Negative log-likelihood of class indices: cross entropy for models that end in LogSoftmax."""
    weights = _class_weights(weight, log_probabilities, axis)
    rows, labels = _rows(op, log_probabilities, labels, axis)
    loss = _standard(op, "NegativeLogLikelihoodLoss", rows, labels, weights, ignore_index, reduction)
    return _unrows(op, loss, log_probabilities, axis, reduction)


def _class_weights(weight: Sequence[float] | None, scores: Expr, axis: int) -> np.ndarray | None:
    if weight is None:
        return None
    weights, shape = numbers("weight", weight), scores.value.shape
    check(weights.ndim == 1, f"weight is {weight}", "it is a list, with one number for each class")
    classes = None if shape is None else shape[axis]
    check(not isinstance(classes, int) or len(weights) == classes, f"{len(weights)} weights for {classes} classes")
    return weights


def _standard(
    op: Builder,
    operator: str,
    scores: Expr,
    labels: Expr,
    weights: np.ndarray | None,
    ignore_index: int | None,
    reduction: str,
) -> Expr:
    """One of the two loss operators of the standard."""
    one_of("reduction", reduction, "mean", "sum", "none")
    inputs = [scores, labels] if weights is None else [scores, labels, op.CastLike(weights, scores)]
    ignored = None if ignore_index is None else _index(ignore_index)
    return op.node("", operator, *inputs, ignore_index=ignored, reduction=reduction)


def _index(ignore_index: int) -> int:
    check(isinstance(ignore_index, Integral), f"ignore_index is {ignore_index!r}, not a whole number")
    return int(ignore_index)


def _rows(op: Builder, scores: Expr, labels: Expr, axis: int, soft: bool = False) -> tuple[Expr, Expr]:
    """Scores and labels with the classes on axis 1: where they are on axis -1, each position becomes a row."""
    if one_of("axis", axis, 1, -1) == 1:
        return scores, labels
    return op.Flatten(scores, axis=-1), op.Flatten(labels, axis=-1) if soft else op.Reshape(labels, [-1])


def _unrows(op: Builder, loss: Expr, scores: Expr, axis: int, reduction: str) -> Expr:
    """The loss of each row, where there still are rows, back at its position."""
    return loss if axis == 1 or reduction != "none" else op.Reshape(loss, op.Shape(scores, end=-1))


@register_loss("ctc", targets=_sequences)
def ctc(
    op: Builder,
    log_probabilities: Expr,
    labels: Expr,
    input_lengths: Expr,
    target_lengths: Expr,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    logits: bool = False,
    batch_first: bool = False,
    reduction: str = "mean",
) -> Expr:
    """Connectionist temporal classification: log-probabilities [T, N, C] against unaligned label sequences [N, S].

    With `logits` the prediction is normalised first; with `batch_first` it is [N, T, C]. Labels too long for the input
    cost inf, or 0 with `zero_infinity`. The mean divides each loss by the length of its label sequence first.
    """
    if log_probabilities.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        log_probabilities = op.Cast(log_probabilities, to=ir.DataType.FLOAT)  # sums over time need the range
    if logits:
        log_probabilities = op.LogSoftmax(log_probabilities, axis=-1)
    if batch_first:
        log_probabilities = op.Transpose(log_probabilities, perm=[1, 0, 2])
    inputs = log_probabilities, labels, input_lengths, target_lengths
    loss = op.call(ConnectionistTemporalClassification, *inputs, blank=blank)
    if zero_infinity:
        loss = op.Where(op.IsInf(loss), 0, loss)
    if reduction == "mean":
        loss = loss / op.CastLike(op.Max(target_lengths, 1), loss)
    return reduce_loss(op, loss, reduction)
