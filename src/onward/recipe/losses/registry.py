"""What a loss is, the table of all losses, and what many of them share."""

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
from onward.recipe.spec import check_options, lookup

Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Target:
    """An input that a loss adds to the model. Its shape is unknown where the prediction's is."""

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
        """The inputs that `build` needs beside the prediction, in order."""
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
        given = {k: (v, self.options[k]) for k, v in options.items()}
        wrong = [
            f"{k} is {v!r}, not {_KINDS[type(default)][1]}"
            for k, (v, default) in given.items()
            if not _fits(v, default)
        ]
        check(not wrong, f"the loss `{self.name}` cannot be built: {'; '.join(wrong)}")
        return {**self.options, **{k: v if default is None else type(default)(v) for k, (v, default) in given.items()}}


_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a finite number"),
    str: (str, "a word"),
}


def _fits(value: Any, default: Any) -> bool:
    """Whether a value is of the kind of an option's default; an option without one judges for itself."""
    if default is None:
        return True
    fits = isinstance(value, _KINDS[type(default)][0]) and isinstance(value, bool) == isinstance(default, bool)
    return fits and (not isinstance(default, float) or math.isfinite(value))


LOSSES: dict[str, Loss] = {}
"""Every loss, under its name and its short names."""


def loss(name: str) -> Loss:
    """The loss of that name."""
    return lookup("loss", name, LOSSES)


def register_loss(name: str, *short_names: str, targets: Targets) -> Callable[[Callable[..., Expr]], Loss]:
    """Register `build(op, prediction, *targets, **options)` as a loss: its keyword-only parameters are the options."""

    def register(build: Callable[..., Expr]) -> Loss:
        parameters = inspect.signature(build).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        summary = (inspect.getdoc(build) or "").partition("\n")[0]
        return _register(Loss(name, summary, options, build, targets), short_names)

    return register


def formula(function: Function, name: str, *short_names: str, summary: str, **settings: float) -> Loss:
    """Register a loss that is one function, whose inputs are the prediction, the targets, and then positive numbers."""

    def build(op: Builder, *inputs: Expr, reduction: str, **options: float) -> Expr:
        for option, value in options.items():
            check(value > 0, f"{option} is {value}", "it is positive")
        return reduce_loss(op, op.call(function, *inputs, *map(np.float64, options.values())), reduction)

    targets = like_prediction(*function.inputs[1 : len(function.inputs) - len(settings)])
    return _register(Loss(name, summary, {**settings, "reduction": "mean"}, build, targets), short_names)


def _register(made: Loss, short_names: Sequence[str]) -> Loss:
    LOSSES.update(dict.fromkeys((made.name, *short_names), made))
    return made


# ---- what many losses share ------------------------------------------------------------------------------------------


def check(condition: bool, message: str, hint: str | None = None) -> None:
    if not condition:
        raise RecipeError(message, hint=hint)


def one_of(option: str, value: Any, *allowed: Any) -> Any:
    check(value in allowed, f"{option} is `{value}`", "it can be " + " or ".join(f"`{choice}`" for choice in allowed))
    return value


def numbers(option: str, value: Numbers) -> np.ndarray:
    """The value of an option that is a number or a list of numbers, in double precision."""
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{option} is {value!r}, not a number or a list of numbers") from error


def like_prediction(*names: str) -> Targets:
    """Targets of the prediction's own type and shape."""
    return lambda prediction, **_: tuple(Target(name, dtype_of(prediction), prediction.shape) for name in names)


def dtype_of(prediction: ir.Value) -> ir.DataType:
    if prediction.dtype is None:
        raise RecipeError(f"the type of `{prediction.name}` is not known", hint="infer the model's shapes first")
    return prediction.dtype


def reduce_loss(op: Builder, loss: Expr, reduction: str, *, weight: Expr | None = None) -> Expr:
    """The mean, divided by the sum of `weight` where there is one; the sum; or the loss as it is."""
    one_of("reduction", reduction, "mean", "sum", "none")
    if reduction == "none":
        return loss
    if reduction == "mean" and weight is None:
        return op.ReduceMean(loss, keepdims=0)
    total = op.ReduceSum(loss, keepdims=0)
    return total if weight is None or reduction == "sum" else total / op.ReduceSum(weight, keepdims=0)
