"""Losses of Keras as those of a recipe, both ways.

A formula computes a loss that no recipe has, from predictions and targets and before reduction. Its
keyword arguments are settings of the loss as numbers, with 0 for False.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir

from onward.build import Builder, Expr, Function
from onward.recipe.losses.definitions import reduce_loss
from onward.vocabulary.keras import Refused

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
    """Return the hinge loss. Targets that are all 0 or 1 stand for -1 and 1."""
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


def _binary(op: Builder, p: Expr, t: Expr, *, eps: float, label_smoothing: float, from_logits: float) -> Expr:
    t = t * (1.0 - label_smoothing) + 0.5 * label_smoothing
    if from_logits:
        return op.Softplus(p) - p * t
    p = op.Clip(p, eps, 1.0 - eps)
    return -(t * op.Log(p) + (1.0 - t) * op.Log(1.0 - p))


def _categorical(op: Builder, p: Expr, t: Expr, *, eps: float, label_smoothing: float, classes: float) -> Expr:
    if label_smoothing:
        t = t * (1.0 - label_smoothing) + label_smoothing / classes
    return -op.ReduceSum(t * op.Log(_clipped_share(op, p, eps)), [-1], keepdims=0)


def _sparse(op: Builder, p: Expr, labels: Expr, *, eps: float, clips_first: float) -> Expr:
    """Return the cross entropy. TensorFlow clips before dividing by the sum, others after it."""
    if clips_first:
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
    loss = _binary(op, p, t, eps=eps, label_smoothing=0.0, from_logits=from_logits)
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
    """Return 1 - common / (common + missed + invented) over the batch."""
    common, only_t, only_p = (op.ReduceSum(product, keepdims=0) for product in (t * p, (1.0 - p) * t, p * (1.0 - t)))
    return 1.0 - common / (common + only_t * alpha + only_p * beta + eps)


def _dice(op: Builder, p: Expr, t: Expr, *, eps: float) -> Expr:
    common, both = op.ReduceSum(t * p, keepdims=0), op.ReduceSum(t, keepdims=0) + op.ReduceSum(p, keepdims=0)
    return 1.0 - common * 2.0 / (both + eps)


def _generalized_cross_entropy(op: Builder, p: Expr, labels: Expr, *, q: float) -> Expr:
    """Return (1 - p^q) / q of the probability of the right class."""
    return (1.0 - _of_right_class(op, p, labels) ** q) / q


def as_function(name: str, formula: Formula, target: ir.Value, *, opset: int, reduction: str, scale: float) -> Any:
    """Return a function of the prediction and of a target with the name of `target`."""

    def body(op: Builder, prediction: Expr, target: Expr) -> Expr:
        loss = reduce_loss(op, formula(op, prediction, target), reduction)
        return loss if scale == 1.0 else loss * scale

    body.__doc__ = f"loss = the {reduction} of `keras.losses.{name}`, times {scale:g}."
    functions: dict[ir.OperatorIdentifier, ir.Function] = {}
    camel = "".join(word.capitalize() for word in name.split("_"))
    Function(body, ["loss"], f"Keras{camel}_{target.name}").define(functions, opset)
    (function,) = functions.values()
    function.inputs[1].name, function.inputs[1].type, function.inputs[1].shape = target.name, target.type, target.shape
    return function


Options = Mapping[str, Any]


class Prediction(NamedTuple):
    """Facts about the prediction of a loss."""

    rank: int | None
    is_logits: bool
    """True if Keras computes with logits, whatever the output is."""
    eps: float
    """Keras's epsilon, which it adds and clips with."""


Read = Callable[[Options, Prediction], Mapping[str, Any] | None]
"""Settings of a loss -> the loss of a recipe; None where there is only a formula."""
Write = Callable[[Options, Prediction], dict[str, Any] | None]
"""Options of a recipe's loss -> the settings of the class; None where it computes another loss."""


@dataclasses.dataclass(frozen=True)
class LossRow:
    """A loss of Keras."""

    name: str
    """The name of the function."""
    draws: str
    """Kind of its targets: "real", "positive", "binary", "one_hot" or "labels"."""
    class_name: str = ""
    aliases: tuple[str, ...] = ()
    read: Read = lambda options, prediction: None
    write: Mapping[str, Write] = dataclasses.field(default_factory=dict)
    """Losses of a recipe -> settings of the class."""
    formula: Formula | None = None
    by_element: bool = True
    """True for a value per element, of which Keras first takes the mean along the last axis."""
    takes_logits: bool = False
    """True if Keras uses the logits before a softmax or sigmoid."""
    of_batch: bool = False
    """True for a loss over the whole batch, without an axis."""
    of_any_output: bool = False
    """True if the loss of a recipe does not depend on the output."""


def _checked_axis(name: str, options: Options, prediction: Prediction) -> dict[str, int]:
    """Return the option `axis`; raise `Refused` for another axis than the last."""
    if prediction.rank is not None and options.get("axis", -1) not in (-1, prediction.rank - 1):
        raise Refused(f"loss {name} has another `axis` than the last")
    return {} if prediction.rank in (2, None) else {"axis": -1}


def _read_sparse(options: Options, prediction: Prediction) -> Options | None:
    name, ignored = "sparse_categorical_crossentropy", options.get("ignore_class")
    if not prediction.is_logits:
        if ignored is not None:
            raise Refused(f"loss {name} ignores a class of probabilities")
        return None
    ignore_index = {} if ignored is None else {"ignore_index": int(ignored)}
    return {"name": "cross_entropy", **_checked_axis(name, options, prediction), **ignore_index}


def _read_categorical(options: Options, prediction: Prediction) -> Options | None:
    if not prediction.is_logits:
        return None
    axis = _checked_axis("categorical_crossentropy", options, prediction)
    smoothing = float(options.get("label_smoothing", 0.0))
    smoothed = {"label_smoothing": smoothing} if smoothing else {}
    return {"name": "cross_entropy", "target": "probabilities", **axis, **smoothed}


def _read_binary(options: Options, prediction: Prediction) -> Options | None:
    _checked_axis("binary_crossentropy", options, prediction)
    if options.get("label_smoothing"):
        return None
    if prediction.is_logits:
        return {"name": "bce_with_logits"}
    return {"name": "binary_cross_entropy", "clip": prediction.eps}


def _write_cross_entropy(options: Options, prediction: Prediction, *, probabilities: bool) -> dict[str, Any] | None:
    is_other = (options.get("target", "indices") == "probabilities") != probabilities
    if is_other or options.get("weight") is not None or ((prediction.rank or 0) > 2 and options.get("axis", 1) != -1):
        return None
    smoothing, ignored = options.get("label_smoothing", 0.0), options.get("ignore_index")
    if probabilities:
        return {"from_logits": True, "label_smoothing": smoothing}
    return None if smoothing else {"from_logits": True, "ignore_class": ignored}


def _write_poisson(options: Options, prediction: Prediction) -> dict[str, Any] | None:
    is_same = not options.get("log_input", True) and not options.get("full") and options.get("eps") == prediction.eps
    return {} if is_same else None


def _write_binary(options: Options, prediction: Prediction) -> dict[str, Any] | None:
    is_same = options.get("clip") == prediction.eps and options.get("weight") is None
    return {} if is_same else None


def _write_bce(options: Options, prediction: Prediction) -> dict[str, Any] | None:
    is_weighted = options.get("pos_weight") is not None or options.get("weight") is not None
    return None if is_weighted else {"from_logits": True}


def _formula_row(name: str, draws: str, formula: Formula, *, by_element: bool = True, **columns: Any) -> LossRow:
    """Return a row for a loss that no recipe has."""

    def read(options: Options, prediction: Prediction) -> None:
        if not columns.get("of_batch"):
            _checked_axis(name, options, prediction)
        elif options.get("axis") is not None:
            raise Refused(f"loss {name} has an `axis`")

    return LossRow(name, draws, read=read, formula=formula, by_element=by_element, **columns)


def _plain_row(name: str, class_name: str, alias: str, *losses: str) -> LossRow:
    """Return a row for a loss without settings, which is read as the first of `losses`."""
    read: Read = lambda options, prediction: {"name": losses[0]}
    write: dict[str, Write] = dict.fromkeys(losses, lambda options, prediction: {})
    return LossRow(name, "real", class_name, (alias,), read, write, of_any_output=True)


_BY_SAMPLE: dict[str, Any] = {"by_element": False, "takes_logits": True}
_ROWS = (
    LossRow(
        "sparse_categorical_crossentropy", "labels", "SparseCategoricalCrossentropy", (), _read_sparse,
        {"cross_entropy": functools.partial(_write_cross_entropy, probabilities=False)}, _sparse,
        **_BY_SAMPLE, of_any_output=True,
    ),
    LossRow(
        "categorical_crossentropy", "one_hot", "CategoricalCrossentropy", (), _read_categorical,
        {"cross_entropy": functools.partial(_write_cross_entropy, probabilities=True)}, _categorical, **_BY_SAMPLE,
    ),
    LossRow(
        "binary_crossentropy", "binary", "BinaryCrossentropy", (), _read_binary,
        {"bce_with_logits": _write_bce, "binary_cross_entropy": _write_binary}, _binary, takes_logits=True,
    ),
    _plain_row("mean_squared_error", "MeanSquaredError", "mse", "mse"),
    _plain_row("mean_absolute_error", "MeanAbsoluteError", "mae", "l1", "mae"),
    LossRow(
        "huber", "real", "Huber", ("huber_loss",),
        lambda options, _: {"name": "huber", "delta": float(options.get("delta", 1.0))},
        # Keras leaves `delta` out of what it saves, so that only the default comes back.
        {"huber": lambda options, _: {} if options.get("delta", 1.0) == 1.0 else None}, of_any_output=True,
    ),
    LossRow(
        "poisson", "positive", "Poisson", (),
        lambda _, prediction: {"name": "poisson_nll", "log_input": False, "eps": prediction.eps},
        {"poisson_nll": _write_poisson},
    ),
    _formula_row("mean_absolute_percentage_error", "positive", _percentage),
    _formula_row("mean_squared_logarithmic_error", "positive", _squared_logarithmic),
    _formula_row("log_cosh", "positive", _log_cosh),
    _formula_row("hinge", "binary", _hinge),
    _formula_row("squared_hinge", "binary", _squared_hinge),
    _formula_row("binary_focal_crossentropy", "binary", _binary_focal, takes_logits=True),
    _formula_row("kl_divergence", "one_hot", _divergence, by_element=False),
    _formula_row("cosine_similarity", "positive", _cosine, by_element=False),
    _formula_row("categorical_hinge", "one_hot", _categorical_hinge, by_element=False),
    _formula_row("categorical_focal_crossentropy", "one_hot", _categorical_focal, by_element=False),
    _formula_row("dice", "binary", _dice, by_element=False, of_batch=True),
    _formula_row("tversky", "binary", _tversky, by_element=False, of_batch=True),
    _formula_row("categorical_generalized_cross_entropy", "labels", _generalized_cross_entropy, by_element=False),
)  # fmt: skip
LOSSES = {row.name: row for row in _ROWS}
"""Function of Keras -> row."""


def read_named_loss(name: str, config: Options) -> Any:
    """Return the loss of a recipe for a name and settings; None if it depends on the output."""
    row = next((row for row in _ROWS if name.lower() in (row.name, *row.aliases)), None)
    if row is None or not row.of_any_output or (row.name == "huber" and not isinstance(config.get("delta"), float)):
        return None
    if (
        config.get("reduction", "sum_over_batch_size") != "sum_over_batch_size"
        or config.get("ignore_class") is not None
    ):
        return None
    loss = row.read(config, Prediction(None, bool(config.get("from_logits")), 0.0))
    return loss["name"] if loss is not None and len(loss) == 1 else loss


def write_loss(name: str, options: Options, prediction: Prediction) -> tuple[str, dict[str, Any]] | None:
    """Return a class of Keras and its settings for a loss of a recipe, or None."""
    for row in _ROWS:
        settings = row.write[name](options, prediction) if name in row.write else None
        if settings is not None:
            return row.class_name, settings
    return None
