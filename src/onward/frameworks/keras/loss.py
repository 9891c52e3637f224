"""The losses that a Keras model was compiled with, as losses of a recipe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.engines.framework import keywords
from onward.frameworks.keras import loss_formulas
from onward.frameworks.keras.tensors import Tensor
from onward.frameworks.keras.walk import functional_of
from onward.standard import COMMON_OPSET
from onward.vocabulary.keras import Refused

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand."""

    output: int
    spec: Any
    """By the name of a value: what `prepare` takes."""
    target: str
    """Which input of the training model the target is."""
    draw: Callable[[np.random.Generator, int], np.ndarray]
    """A target for so many samples."""


def terms_of(model: Any, outputs: Sequence[Tensor]) -> list[Term]:
    """The summands of the loss, in the order of Keras."""
    taken: set[str] = set()
    return [_term(*item, outputs, taken) for item in _flat_losses(model)]


def _flat_losses(model: Any) -> list[tuple[int, Any, float]]:
    """The output, the loss and its weight, as Keras will resolve what the user gave."""
    given = model._compile_loss
    if given is None or given._user_loss is None:
        raise Refused("model was compiled without a loss")
    functional = functional_of(model)
    resolved = type(given)(given._user_loss, given._user_loss_weights, output_names=functional.output_names)
    structure = functional._outputs_struct
    resolved.build(structure, structure)
    numbers = keras.tree.pack_sequence_as(structure, list(range(len(model.outputs))))
    found = []
    for path, loss, weight, _ in resolved._flat_losses:
        place: Any = numbers
        for key in path if isinstance(numbers, list | tuple | dict) else ():
            place = _at(place, key, functional.output_names)
        found.append((int(place), loss, 1.0 if weight is None else float(weight)))
    return found


def _at(place: Any, key: Any, names: Sequence[str]) -> Any:
    return place[names.index(key)] if isinstance(place, list | tuple) and isinstance(key, str) else place[key]


def _term(index: int, loss: Any, weight: float, outputs: Sequence[Tensor], taken: set[str]) -> Term:
    function = getattr(loss, "fn", None)
    name = getattr(function, "__name__", type(loss).__name__)
    if function is None or not function.__module__.startswith("keras.") or name not in _READERS:
        raise Refused(f"loss {name} has no counterpart")
    if loss.reduction != "sum" and loss.reduction not in _MEANS:
        raise Refused(f"loss {name} has the reduction `{loss.reduction}`")
    reader = _Reader(
        name, {**_defaults(function), **loss._fn_kwargs}, loss.reduction == "sum", weight, index, outputs[index], taken
    )
    return _READERS[name](reader)


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """What a loss that was given by its name alone is computed with."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@dataclasses.dataclass
class _Reader:
    """A loss of Keras that is being read."""

    name: str
    options: dict[str, Any]
    is_sum: bool
    weight: float
    index: int
    output: Tensor
    taken: set[str]
    """Inputs that the targets of other losses are."""

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)

    @property
    def logits(self) -> Tensor | None:
        """What the loss computes with in the place of probabilities.

        On TensorFlow Keras looks behind a softmax or a sigmoid that is an output, whatever `from_logits` says.
        """
        if keras.backend.backend() == "tensorflow" and self.output.logits is not None:
            return self.output.logits
        return self.output if self.option("from_logits", False) else None

    @property
    def eps(self) -> float:
        return float(keras.config.epsilon())

    def named(self, name: str, draw: Any, *, on: Tensor | None = None, each: bool = True, **options: Any) -> Term:
        """One of our losses; `each` says that it gives a number for each element, and Keras one for each sample."""
        value = (on or self.output).plain.value.name
        scale = self._scale(each)
        spec = {"name": name, **options, **({"reduction": "sum"} if self.is_sum else {})}
        spec = {**spec, "scale": scale} if scale != 1.0 else spec
        kind = "labels" if name == "cross_entropy" and options.get("target") is None else "target"
        return Term(self.index, {value: spec}, self._input(kind, str(value)), draw)

    def formula(
        self, formula: loss_formulas.Formula, draw: Any, *, on: Tensor | None = None, each: bool = True
    ) -> Term:
        """A formula of Keras's own."""
        prediction = (on or self.output).plain.value
        sparse = self.name in _OF_LABELS
        target = ir.Value(
            name=self._input("labels" if sparse else "target", str(prediction.name)),
            type=ir.TensorType(ir.DataType.INT64) if sparse else prediction.type,
            shape=ir.Shape(list(prediction.shape)[:-1]) if sparse else prediction.shape,  # type: ignore[arg-type]
        )
        known = {**self.options, "eps": self.eps, "classes": self.output.shape[-1] or 0}
        known["from_logits"] = on is not None or self.option("from_logits", False)
        settings = {name: float(known[name]) for name in keywords(formula)}
        function = loss_formulas.as_function(
            self.name,
            functools.partial(formula, **settings),
            target,
            opset=COMMON_OPSET,
            reduction="sum" if self.is_sum else "mean",
            scale=self._scale(each),
        )
        return Term(self.index, {prediction.name: function}, str(target.name), draw)

    def _input(self, kind: str, value: str) -> str:
        """The name that a recipe gives to the input of a target."""
        name = kind if kind not in self.taken else f"{value}_{kind}"
        self.taken.add(name)
        return name

    def _scale(self, each: bool) -> float:
        """Keras sums the means along the last axis, we sum all."""
        if not (self.is_sum and each):
            return self.weight
        size = self.output.shape[-1]
        if size is None:
            raise Refused(f"loss {self.name} sums over an axis of unknown size")
        return self.weight / size


# ---- targets, for trying it ------------------------------------------------------------------------------------------


def _sizes(shape: Sequence[int | None], samples: int) -> list[int]:
    return [samples, *(size or 5 for size in shape[1:])]


def _real(r: _Reader) -> Any:
    return lambda rng, n: rng.normal(size=_sizes(r.output.shape, n)).astype(np.float32)


def _positive(r: _Reader) -> Any:
    return lambda rng, n: (rng.random(_sizes(r.output.shape, n)) + 0.5).astype(np.float32)


def _binary(r: _Reader) -> Any:
    return lambda rng, n: rng.integers(0, 2, _sizes(r.output.shape, n)).astype(np.float32)


def _one_hot(r: _Reader) -> Any:
    classes = int(r.output.shape[-1])  # type: ignore[arg-type]
    return lambda rng, n: np.eye(classes, dtype=np.float32)[rng.integers(0, classes, _sizes(r.output.shape, n)[:-1])]


def _labels(r: _Reader) -> Any:
    classes = int(r.output.shape[-1])  # type: ignore[arg-type]
    return lambda rng, n: rng.integers(0, classes, _sizes(r.output.shape, n)[:-1])


# ---- losses ----------------------------------------------------------------------------------------------------------


def _sparse_crossentropy(r: _Reader) -> Term:
    if r.logits is None:
        if r.option("ignore_class") is not None:
            raise Refused("loss sparse_categorical_crossentropy ignores a class of probabilities")
        return r.formula(loss_formulas.sparse, _labels(r), each=False)
    ignored = {} if r.option("ignore_class") is None else {"ignore_index": int(r.option("ignore_class"))}
    return r.named("cross_entropy", _labels(r), on=r.logits, each=False, **_axis(r), **ignored)


def _crossentropy(r: _Reader) -> Term:
    smoothing = float(r.option("label_smoothing", 0.0))
    if r.logits is None:
        return r.formula(loss_formulas.categorical, _one_hot(r), each=False)
    options: dict[str, Any] = {"target": "probabilities", **_axis(r)}
    options |= {"label_smoothing": smoothing} if smoothing else {}
    return r.named("cross_entropy", _one_hot(r), on=r.logits, each=False, **options)


def _axis(r: _Reader) -> dict[str, int]:
    if r.option("axis", -1) not in (-1, r.output.rank - 1):
        raise Refused(f"loss {r.name} has another `axis` than the last")
    return {} if r.output.rank == 2 else {"axis": -1}


def _binary_crossentropy(r: _Reader) -> Term:
    _axis(r)
    if r.option("label_smoothing"):
        return r.formula(loss_formulas.binary, _binary(r), on=r.logits)
    if r.logits is not None:
        return r.named("bce_with_logits", _binary(r), on=r.logits)
    return r.named("binary_cross_entropy", _binary(r), clip=r.eps)


def _formula(r: _Reader) -> Term:
    if r.name not in _OF_REGIONS:
        _axis(r)
    elif r.option("axis") is not None:
        raise Refused(f"loss {r.name} has an `axis`")
    each = r.name in loss_formulas.ELEMENTWISE
    formula = (loss_formulas.ELEMENTWISE if each else loss_formulas.BY_SAMPLE)[r.name]
    on = r.logits if r.name == "binary_focal_crossentropy" else None
    return r.formula(formula, _DRAWN.get(r.name, _positive)(r), on=on, each=each)


_OF_REGIONS = ("dice", "tversky")
"""Losses of all elements of a batch together."""
_DRAWN = {
    **dict.fromkeys(("hinge", "squared_hinge", "binary_focal_crossentropy", *_OF_REGIONS), _binary),
    **dict.fromkeys(("kl_divergence", "categorical_hinge", "categorical_focal_crossentropy"), _one_hot),
    "categorical_generalized_cross_entropy": _labels,
}
_OF_LABELS = ("sparse_categorical_crossentropy", "categorical_generalized_cross_entropy")
"""Losses whose targets are whole numbers."""

_READERS: dict[str, Callable[[_Reader], Term]] = {
    "sparse_categorical_crossentropy": _sparse_crossentropy,
    "categorical_crossentropy": _crossentropy,
    "binary_crossentropy": _binary_crossentropy,
    "mean_squared_error": lambda r: r.named("mse", _real(r)),
    "mean_absolute_error": lambda r: r.named("l1", _real(r)),
    "huber": lambda r: r.named("huber", _real(r), delta=float(r.option("delta", 1.0))),
    "poisson": lambda r: r.named("poisson_nll", _positive(r), log_input=False, eps=r.eps),
    **dict.fromkeys((*loss_formulas.ELEMENTWISE, *loss_formulas.BY_SAMPLE), _formula),
}
