"""Losses of compiled Keras models, and those of a recipe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.engines.framework import keywords
from onward.frameworks.keras.layer_graph import functional_of
from onward.frameworks.keras.layers import Tensor
from onward.model import Model
from onward.run_state.state import RunState
from onward.standard import COMMON_OPSET
from onward.vocabulary.keras import Refused
from onward.vocabulary.keras_losses import LOSSES, LossRow, Prediction, as_function, write_loss

# ---- reading ---------------------------------------------------------------------------------------------------------

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


def read_loss(model: Any, outputs: Sequence[Tensor]) -> list[Term]:
    """Return the summands of the loss of a compiled model, in the order of Keras."""
    taken: set[str] = set()
    return [_term(*item, outputs, taken) for item in _flat_losses(model)]


def _flat_losses(model: Any) -> list[tuple[int, Any, float]]:
    """Return the output, the loss and its weight, as Keras will resolve what the user gave."""
    given = model._compile_loss
    if given is None or given._user_loss is None:
        raise Refused("model was compiled without a loss")
    functional = functional_of(model)
    names = functional.output_names
    resolved = type(given)(given._user_loss, given._user_loss_weights, output_names=names)
    structure = functional._outputs_struct
    resolved.build(structure, structure)
    numbers = keras.tree.pack_sequence_as(structure, list(range(len(model.outputs))))
    found = []
    for path, loss, weight, _ in resolved._flat_losses:
        place: Any = numbers
        for key in path if isinstance(numbers, list | tuple | dict) else ():
            place = place[names.index(key) if isinstance(place, list | tuple) and isinstance(key, str) else key]
        found.append((int(place), loss, 1.0 if weight is None else float(weight)))
    return found


def _term(index: int, loss: Any, weight: float, outputs: Sequence[Tensor], taken: set[str]) -> Term:
    function = getattr(loss, "fn", None)
    name = getattr(function, "__name__", type(loss).__name__)
    if function is None or not function.__module__.startswith("keras.") or name not in LOSSES:
        raise Refused(f"loss {name} has no counterpart")
    if loss.reduction != "sum" and loss.reduction not in _MEANS:
        raise Refused(f"loss {name} has the reduction `{loss.reduction}`")
    row, output, is_sum = LOSSES[name], outputs[index], loss.reduction == "sum"
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    options = {**defaults, **loss._fn_kwargs}
    on = _logits(output, options) if row.takes_logits else None
    read = row.read(options, Prediction(output.rank, on is not None, keras.config.epsilon()))
    if is_sum and row.by_element:  # Keras sums the means along the last axis, a recipe sums all
        if output.shape[-1] is None:
            raise Refused(f"loss {name} sums over an axis of unknown size")
        weight /= output.shape[-1]
    prediction = (on or output).plain.value
    kind = "labels" if row.draws == "labels" else "target"
    target = kind if kind not in taken else f"{prediction.name}_{kind}"
    taken.add(target)
    if read is None:
        spec: Any = _formula(row, options, prediction, output, target, "sum" if is_sum else "mean", weight)
    else:
        spec = {**read, **({"reduction": "sum"} if is_sum else {}), **({"scale": weight} if weight != 1.0 else {})}
    return Term(index, {prediction.name: spec}, target, functools.partial(_draw, row.draws, output.shape))


def _logits(output: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    """Return what a loss computes with in the place of probabilities.

    On TensorFlow Keras looks behind a softmax or a sigmoid that is an output, whatever `from_logits` says.
    """
    if keras.backend.backend() == "tensorflow" and output.logits is not None:
        return output.logits
    return output if options.get("from_logits", False) else None


def _formula(
    row: LossRow,
    options: Mapping[str, Any],
    prediction: ir.Value,
    output: Tensor,
    target: str,
    reduction: str,
    scale: float,
) -> Any:
    """Return a function for the formula of a loss."""
    assert row.formula is not None and prediction.shape is not None
    is_labels = row.draws == "labels"
    given = ir.Value(
        name=target,
        type=ir.TensorType(ir.DataType.INT64) if is_labels else prediction.type,
        shape=ir.Shape(list(prediction.shape)[:-1]) if is_labels else prediction.shape,
    )
    known = {
        **options,
        "eps": keras.config.epsilon(),
        "classes": output.shape[-1] or 0,
        "from_logits": (row.takes_logits and _logits(output, options) is not None) or options.get("from_logits", False),
        "clips_first": keras.backend.backend() == "tensorflow",
    }
    settings = {name: float(known[name]) for name in keywords(row.formula)}
    formula = functools.partial(row.formula, **settings)
    return as_function(row.name, formula, given, opset=COMMON_OPSET, reduction=reduction, scale=scale)


def _draw(kind: str, shape: Sequence[int | None], rng: np.random.Generator, samples: int) -> np.ndarray:
    """Draw a target of a loss, for trying it."""
    sizes = [samples, *(size or 5 for size in shape[1:])]
    match kind:
        case "real":
            return rng.normal(size=sizes).astype(np.float32)
        case "positive":
            return (rng.random(sizes) + 0.5).astype(np.float32)
        case "binary":
            return rng.integers(0, 2, sizes).astype(np.float32)
    classes = int(shape[-1])  # type: ignore[arg-type]
    labels = rng.integers(0, classes, sizes[:-1])
    return labels if kind == "labels" else np.eye(classes, dtype=np.float32)[labels]


# ---- writing ---------------------------------------------------------------------------------------------------------


def make_loss(run: RunState, model: Model) -> dict[str, Any] | None:
    """Return what `compile` takes: Keras's losses of the outputs, if there is one for each that computes the same."""
    if not isinstance(run.loss, list) or not all(isinstance(term, Mapping) for term in run.loss):
        return None
    outputs, made = {value.name: value for value in model.outputs}, {}
    for output, spec in (item for term in run.loss for item in term.items()):
        options = dict(spec)
        name, scale = options.pop("name"), options.pop("scale", 1.0)
        is_mean = options.pop("reduction", "mean") == "mean"
        shape = outputs[output].shape if output in outputs else None
        if shape is None or output in made or not is_mean:
            return None
        written = write_loss(name, options, Prediction(len(shape), False, keras.config.epsilon()))
        if written is None:
            return None
        class_name, settings = written
        made[output] = (getattr(keras.losses, class_name)(**settings), float(scale))
    if not made or made.keys() != outputs.keys():
        return None
    if len(made) == 1:
        ((loss, weight),) = made.values()
        return {"loss": loss, **({} if weight == 1.0 else {"loss_weights": weight})}
    return {"loss": [made[name][0] for name in outputs], "loss_weights": [made[name][1] for name in outputs]}
