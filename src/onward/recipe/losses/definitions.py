"""The table of losses, and their common code."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Function
from onward.errors import RecipeError
from onward.recipe.losses import functions as f
from onward.recipe.losses.functions import ConnectionistTemporalClassification
from onward.recipe.spec import check_options, lookup, one_of

Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Target:
    """An input that a loss adds to the model. Its shape is unknown if the prediction's is."""

    name: str
    dtype: ir.DataType
    shape: ir.Shape | None


Targets = Callable[..., tuple[Target, ...]]
"""`(prediction, **options) -> targets`"""


@dataclass(frozen=True, eq=False)
class Loss:
    """A named loss. `options` holds every option with its default."""

    name: str
    summary: str
    options: Mapping[str, Any]
    _build: Callable[..., Expr] = field(repr=False)
    _targets: Targets = field(repr=False)

    def targets(self, prediction: ir.Value, **options: Any) -> tuple[Target, ...]:
        """Return the inputs that `build` needs besides the prediction, in order."""
        return self._targets(prediction, **self._complete(options))

    def build(self, op: Builder, prediction: Expr, *targets: Expr, **options: Any) -> Expr:
        """Append the loss to a graph: a scalar or, for `reduction="none"`, a tensor."""
        options = self._complete(options)
        loss = self._build(op, prediction, *targets, **options)
        if options["reduction"] != "none":
            loss.value.shape = ir.Shape([])
        return loss

    def _complete(self, options: dict[str, Any]) -> dict[str, Any]:
        check_options(f"the loss `{self.name}`", options, self.options)
        values, wrong = dict(self.options), []
        for name, value in options.items():
            default = self.options[name]
            if not _fits(value, default):
                wrong.append(f"{name} is {value!r}, not {_TYPES[type(default)][1]}")
            elif default is not None:
                value = type(default)(value)
            values[name] = value
        check(not wrong, f"wrong options of the loss `{self.name}`: {'; '.join(wrong)}")
        return values


_TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "an integer"),
    float: (Real, "a finite number"),
    str: (str, "a string"),
}


def _fits(value: Any, default: Any) -> bool:
    if default is None:
        return True
    fits = isinstance(value, _TYPES[type(default)][0]) and isinstance(value, bool) == isinstance(default, bool)
    return fits and (not isinstance(default, float) or math.isfinite(value))


LOSSES: dict[str, Loss] = {}
"""Every loss by its name and its short names."""


def loss(name: str) -> Loss:
    """Return the loss named `name`."""
    return lookup("loss", name, LOSSES)


def register_loss(name: str, *short_names: str, targets: Targets) -> Callable[[Callable[..., Expr]], Loss]:
    """Register `build(op, prediction, *targets, **options)` as a loss."""

    def register(build: Callable[..., Expr]) -> Loss:
        parameters = inspect.signature(build).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        summary = (inspect.getdoc(build) or "").partition("\n")[0]
        entry = Loss(name, summary, options, build, targets)
        LOSSES.update(dict.fromkeys((name, *short_names), entry))
        return entry

    return register


def formula(function: Function, name: str, *short_names: str, summary: str, **settings: float) -> None:
    """Register a loss that is one function of the prediction, the targets and positive numbers."""

    def build(op: Builder, *inputs: Expr, reduction: str, **options: float) -> Expr:
        for option, value in options.items():
            check(value > 0, f"{option} is {value}", "it is positive")
        return reduce_loss(op, op.call(function, *inputs, *map(np.float64, options.values())), reduction)

    targets = like_prediction(*function.inputs[1 : len(function.inputs) - len(settings)])
    entry = Loss(name, summary, {**settings, "reduction": "mean"}, build, targets)
    LOSSES.update(dict.fromkeys((name, *short_names), entry))


# ---- checks and reductions -------------------------------------------------------------------------------------------


def check(condition: bool, message: str, hint: str | None = None) -> None:
    if not condition:
        raise RecipeError(message, hint=hint)


def numbers(option: str, value: Numbers) -> np.ndarray:
    """Return an option that is a number or a list of numbers, in double precision."""
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{option} is {value!r}, not a number or a list of numbers") from error


def like_prediction(*names: str) -> Targets:
    """Return one target with the type and shape of the prediction."""
    return lambda prediction, **_: tuple(Target(name, dtype_of(prediction), prediction.shape) for name in names)


def dtype_of(prediction: ir.Value) -> ir.DataType:
    if prediction.dtype is None:
        hint = "infer it: `onnx.shape_inference.infer_shapes(model)`"
        raise RecipeError(f"the type of `{prediction.name}` is unknown", hint=hint)
    return prediction.dtype


def reduce_loss(op: Builder, loss: Expr, reduction: str, *, weight: Expr | None = None) -> Expr:
    """Return the mean, divided by the sum of `weight` if present; the sum; or the loss itself."""
    one_of("reduction", reduction, "mean", "sum", "none")
    if reduction == "none":
        return loss
    if reduction == "mean" and weight is None:
        return op.ReduceMean(loss, keepdims=0)
    total = op.ReduceSum(loss, keepdims=0)
    return total if weight is None or reduction == "sum" else total / op.ReduceSum(weight, keepdims=0)


# ---- classes ---------------------------------------------------------------------------------------------------------


NO_LABEL = -100
"""The default ignored label, which is PyTorch's and no class."""


def _labels(prediction: ir.Value, *, axis: int, target: str = "indices", **_: Any) -> tuple[Target]:
    """Return a target of class indices: the shape of the prediction without its classes."""
    dims = _dims(prediction, rank=2, form="[N, C, ...]" if one_of("axis", axis, 1, -1) == 1 else "[..., C]")
    if one_of("target", target, "indices", "probabilities") == "probabilities":
        return (Target("target", dtype_of(prediction), prediction.shape),)
    if dims is not None:
        del dims[axis]
    return (Target("labels", ir.DataType.INT64, None if dims is None else ir.Shape(dims)),)


LENGTHS = {"both": ("input_lengths", "target_lengths"), "input": ("input_lengths",), "target": ("target_lengths",)}
"""Lengths that are inputs, by the option `lengths`."""


def _sequences(prediction: ir.Value, *, batch_first: bool, lengths: str, **_: Any) -> tuple[Target, ...]:
    """Return targets for padded label sequences [N, S] and the lengths [N] of inputs and labels."""
    given = LENGTHS.get(one_of("lengths", lengths, *LENGTHS, "neither"), ())
    dims = _dims(prediction, rank=3, form="[N, T, C]" if batch_first else "[T, N, C]")
    batch = None if dims is None else dims[0 if batch_first else 1]
    shapes = {"labels": [batch, None], **{name: [batch] for name in given}}
    return tuple(Target(name, ir.DataType.INT64, ir.Shape(shape)) for name, shape in shapes.items())


def _dims(prediction: ir.Value, *, rank: int, form: str) -> list[int | ir.SymbolicDim] | None:
    shape = prediction.shape
    check(
        shape is None or len(shape) >= rank,
        f"`{prediction.name}` has the shape {shape}; this loss needs {form}",
        "add the missing axes with `Unsqueeze`",
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
    """Cross entropy of logits with class indices or, for target="probabilities", probabilities.

    The classes are on axis 1, as in images [N, C, H, W], or on axis -1, as in text [N, T, C]. The
    mean over indices divides by the weights of the labels that are not ignored, the mean over
    probabilities by the number of positions.
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
    one_of("reduction", reduction, "mean", "sum", "none")
    inputs = [scores, labels] if weights is None else [scores, labels, op.CastLike(weights, scores)]
    ignored = None if ignore_index is None else _index(ignore_index)
    return op.node("", operator, *inputs, ignore_index=ignored, reduction=reduction)


def _index(ignore_index: int) -> int:
    check(isinstance(ignore_index, Integral), f"ignore_index is {ignore_index!r}, not an integer")
    return int(ignore_index)


def _rows(op: Builder, scores: Expr, labels: Expr, axis: int, soft: bool = False) -> tuple[Expr, Expr]:
    """Return scores and labels with classes on axis 1; positions before axis -1 become rows."""
    if one_of("axis", axis, 1, -1) == 1:
        return scores, labels
    return op.Flatten(scores, axis=-1), op.Flatten(labels, axis=-1) if soft else op.Reshape(labels, [-1])


def _unrows(op: Builder, loss: Expr, scores: Expr, axis: int, reduction: str) -> Expr:
    return loss if axis == 1 or reduction != "none" else op.Reshape(loss, op.Shape(scores, end=-1))


@register_loss("ctc", targets=_sequences)
def ctc(
    op: Builder,
    log_probabilities: Expr,
    labels: Expr,
    *given_lengths: Expr,
    blank: int = 0,
    zero_infinity: bool = False,
    logits: bool = False,
    batch_first: bool = False,
    lengths: str = "both",
    reduction: str = "mean",
) -> Expr:
    """Connectionist temporal classification of log-probabilities [T, N, C] and labels [N, S].

    With `logits` the prediction is normalized first; with `batch_first` it is [N, T, C]. Labels too
    long for the input cost inf, or 0 with `zero_infinity`. The mean divides each loss by the length
    of its labels first. `lengths` says which lengths are inputs: "both", "input", "target" or
    "neither". Without them, an input has its full width, and labels end before their padding, which
    is `blank` or negative.
    """
    if log_probabilities.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        log_probabilities = op.Cast(log_probabilities, to=ir.DataType.FLOAT)  # sums over time need the range
    if logits:
        log_probabilities = op.LogSoftmax(log_probabilities, axis=-1)
    if batch_first:
        log_probabilities = op.Transpose(log_probabilities, perm=[1, 0, 2])
    names = LENGTHS.get(one_of("lengths", lengths, *LENGTHS, "neither"), ())
    by_name = dict(zip(names, given_lengths, strict=True))
    if "input_lengths" not in by_name:
        time, batch = (op.Shape(log_probabilities, start=i, end=i + 1) for i in (0, 1))
        by_name["input_lengths"] = op.Expand(time, batch)
    if "target_lengths" not in by_name:
        ends = op.Range(1, op.Squeeze(op.Shape(labels, start=1)) + 1, 1)
        is_label = op.And(op.GreaterOrEqual(labels, 0), op.Not(op.Equal(labels, blank)))
        by_name["target_lengths"] = op.ReduceMax(op.Where(is_label, ends, 0), [1], keepdims=0)
    target_lengths = by_name["target_lengths"]
    inputs = log_probabilities, labels, by_name["input_lengths"], target_lengths
    loss = op.call(ConnectionistTemporalClassification, *inputs, blank=blank)
    if zero_infinity:
        loss = op.Where(op.IsInf(loss), 0, loss)
    if reduction == "mean":
        loss = loss / op.CastLike(op.Max(target_lengths, 1), loss)
    return reduce_loss(op, loss, reduction)


# ---- yes or no -------------------------------------------------------------------------------------------------------


@register_loss("binary_cross_entropy", "bce", targets=like_prediction("target"))
def binary_cross_entropy(
    op: Builder,
    probability: Expr,
    target: Expr,
    *,
    clip: float = 0.0,
    weight: Numbers | None = None,
    reduction: str = "mean",
) -> Expr:
    """Binary cross entropy of probabilities; logs stop at -100, or are clipped (Keras: clip=1e-7)."""
    check(0 <= clip < 0.5, f"clip is {clip}", "it is at least 0 and less than 0.5")
    if clip:
        probability = op.Clip(probability, clip, 1 - clip)
    return reduce_loss(op, _weigh(op, op.call(f.BinaryCrossEntropy, probability, target), weight), reduction)


@register_loss("bce_with_logits", targets=like_prediction("target"))
def bce_with_logits(
    op: Builder,
    logits: Expr,
    target: Expr,
    *,
    pos_weight: Numbers | None = None,
    weight: Numbers | None = None,
    reduction: str = "mean",
) -> Expr:
    """Binary cross entropy of logits; `pos_weight` lets positive examples weigh more."""
    if pos_weight is None:
        loss = op.call(f.BinaryCrossEntropyWithLogits, logits, target)
    else:
        positive = numbers("pos_weight", pos_weight)
        loss = op.call(f.WeightedBinaryCrossEntropyWithLogits, logits, target, positive)
    return reduce_loss(op, _weigh(op, loss, weight), reduction)


def _weigh(op: Builder, loss: Expr, weight: Numbers | None) -> Expr:
    return loss if weight is None else loss * op.CastLike(numbers("weight", weight), loss)


formula(f.Hinge, "hinge", summary="Hinge, max(1 - y x, 0), for targets y of -1 and 1.")
formula(f.SquaredHinge, "squared_hinge", summary="Squared hinge, max(1 - y x, 0)^2, for targets y of -1 and 1.")


# ---- distances -------------------------------------------------------------------------------------------------------

formula(f.SquaredError, "mse", summary="Squared error, (x - y)^2.")
formula(f.AbsoluteError, "l1", "mae", summary="Absolute error, |x - y|.")
formula(f.Huber, "huber", summary="Huber: half the squared error up to delta, a straight line beyond.", delta=1.0)
formula(f.SmoothL1, "smooth_l1", summary="Smooth absolute error: Huber with delta = beta, divided by beta.", beta=1.0)
formula(
    f.TripletMargin,
    "triplet",
    summary="Triplet: an anchor shall be nearer, in the p-norm, to its positive than to its negative, by a margin.",
    margin=1.0,
    p=2.0,
    eps=1e-6,
)


@register_loss("cosine", targets=like_prediction("target"))
def cosine(
    op: Builder, prediction: Expr, target: Expr, *, axis: int = -1, eps: float = 1e-12, reduction: str = "mean"
) -> Expr:
    """Cosine distance, 1 - cos(x, y), between vectors along `axis`."""
    return reduce_loss(op, op.call(f.CosineDistance, prediction, target, np.float64(eps), axes=[axis]), reduction)


# ---- likelihoods -----------------------------------------------------------------------------------------------------


@register_loss("kl_div", "kl", targets=like_prediction("target"))
def kl_div(
    op: Builder, log_probability: Expr, target: Expr, *, log_target: bool = False, reduction: str = "batchmean"
) -> Expr:
    """Kullback-Leibler divergence of log-probabilities from probabilities or (log_target) logs.

    "batchmean" (default) sums and divides by the batch size; "mean" divides by all elements.
    """
    one_of("reduction", reduction, "batchmean", "mean", "sum", "none")
    loss = op.call(f.KLDivergenceOfLogs if log_target else f.KLDivergence, log_probability, target)
    if reduction != "batchmean":
        return reduce_loss(op, loss, reduction)
    batch = op.Squeeze(op.Shape(log_probability, end=1))
    return reduce_loss(op, loss, "sum") / op.CastLike(batch, loss)


@register_loss("poisson_nll", "poisson", targets=like_prediction("target"))
def poisson_nll(
    op: Builder,
    rate: Expr,
    target: Expr,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Expr:
    """Poisson negative log-likelihood of counts, given log-rates or (log_input=false) rates.

    `full` adds Stirling's approximation of log y!; `eps` keeps logarithms finite (Keras: 1e-7).
    """
    if log_input:
        loss = op.call(f.PoissonNLLOfLog, rate, target)
    else:
        loss = op.call(f.PoissonNLL, rate, target, np.float64(eps))
    return reduce_loss(op, loss + op.call(f.Stirling, target) if full else loss, reduction)


@register_loss("gaussian_nll", targets=like_prediction("target", "variance"))
def gaussian_nll(
    op: Builder,
    mean: Expr,
    target: Expr,
    variance: Expr,
    *,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Expr:
    """Gaussian negative log-likelihood, given the mean and the variance; `full` adds log(2 pi) / 2."""
    loss = op.call(f.GaussianNLL, mean, target, variance, np.float64(eps))
    return reduce_loss(op, loss + math.log(2 * math.pi) / 2 if full else loss, reduction)
