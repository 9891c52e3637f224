"""Losses of compiled Keras models: read as those of a recipe, and made from them."""

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
from onward.frameworks.keras.layers import LayerTensor
from onward.model import Model
from onward.run_state.state import RunState
from onward.standard import COMMON_OPSET
from onward.vocabulary.keras import Refused
from onward.vocabulary.keras_losses import LOSSES, LossRow, Prediction, as_function, write_loss

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclasses.dataclass(frozen=True)
class Summand:
    """Summand of a loss."""

    output: int  # index among the outputs of the model
    spec: Any  # loss by the name of a value, as `prepare` takes it
    target: str  # name of the input of the training model
    draw: Callable[[np.random.Generator, int], np.ndarray]  # random target for a number of samples


def read_loss(model: Any, outputs: Sequence[LayerTensor]) -> list[Summand]:
    """Return the summands of the loss of a compiled model, in the order of Keras."""
    taken: set[str] = set()
    return [_term(*item, outputs, taken) for item in _flat_losses(model)]


def _flat_losses(model: Any) -> list[tuple[int, Any, float]]:
    """Return the index of the output, the loss and its weight, as Keras resolves them."""
    compiled_loss = model._compile_loss
    if compiled_loss is None or compiled_loss._user_loss is None:
        raise Refused("model was compiled without a loss")
    functional = functional_of(model)
    names = functional.output_names
    resolved = type(compiled_loss)(compiled_loss._user_loss, compiled_loss._user_loss_weights, output_names=names)
    structure = functional._outputs_struct
    resolved.build(structure, structure)
    numbers = keras.tree.pack_sequence_as(structure, list(range(len(model.outputs))))
    losses = []
    for path, loss, weight, _ in resolved._flat_losses:
        output: Any = numbers
        for key in path if isinstance(numbers, list | tuple | dict) else ():
            output = output[names.index(key) if isinstance(output, list | tuple) and isinstance(key, str) else key]
        losses.append((int(output), loss, 1.0 if weight is None else float(weight)))
    return losses


def _term(index: int, loss: Any, weight: float, outputs: Sequence[LayerTensor], taken: set[str]) -> Summand:
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
    target = "labels" if row.draws == "labels" else "target"
    target = target if target not in taken else f"{prediction.name}_{target}"
    taken.add(target)
    if read is None:
        spec: Any = _formula(row, options, prediction, output, target, "sum" if is_sum else "mean", weight)
    else:
        spec = {**read, **({"reduction": "sum"} if is_sum else {}), **({"scale": weight} if weight != 1.0 else {})}
    return Summand(index, {prediction.name: spec}, target, functools.partial(_draw, row.draws, output.shape))


def _logits(output: LayerTensor, options: Mapping[str, Any]) -> LayerTensor | None:
    """Return the tensor that a loss computes with instead of probabilities; None if it computes
    with these.

    On TensorFlow, Keras takes the input of a softmax or sigmoid output, whatever `from_logits`
    says.
    """
    if keras.backend.backend() == "tensorflow" and output.logits is not None:
        return output.logits
    return output if options.get("from_logits", False) else None


def _formula(
    row: LossRow,
    options: Mapping[str, Any],
    prediction: ir.Value,
    output: LayerTensor,
    target: str,
    reduction: str,
    scale: float,
) -> Any:
    assert row.formula is not None and prediction.shape is not None
    is_labels = row.draws == "labels"
    target_value = ir.Value(
        name=target,
        type=ir.TensorType(ir.DataType.INT64) if is_labels else prediction.type,
        shape=ir.Shape(list(prediction.shape)[:-1]) if is_labels else prediction.shape,
    )
    values = {
        **options,
        "eps": keras.config.epsilon(),
        "classes": output.shape[-1] or 0,
        "from_logits": (row.takes_logits and _logits(output, options) is not None) or options.get("from_logits", False),
        "clips_first": keras.backend.backend() == "tensorflow",
    }
    formula = functools.partial(row.formula, **{name: float(values[name]) for name in keywords(row.formula)})
    return as_function(row.name, formula, target_value, opset=COMMON_OPSET, reduction=reduction, scale=scale)


def _draw(draws: str, shape: Sequence[int | None], rng: np.random.Generator, samples: int) -> np.ndarray:
    """Return a random target."""
    sizes = [samples, *(size or 5 for size in shape[1:])]
    match draws:
        case "real":
            return rng.normal(size=sizes).astype(np.float32)
        case "positive":
            return (rng.random(sizes) + 0.5).astype(np.float32)
        case "binary":
            return rng.integers(0, 2, sizes).astype(np.float32)
    classes = int(shape[-1])  # type: ignore[arg-type]
    labels = rng.integers(0, classes, sizes[:-1])
    return labels if draws == "labels" else np.eye(classes, dtype=np.float32)[labels]


def make_loss(run: RunState, model: Model) -> dict[str, Any] | None:
    """Return arguments of `compile`; None if Keras has no equal loss for an output."""
    if not isinstance(run.loss, list) or not all(isinstance(term, Mapping) for term in run.loss):
        return None
    outputs, losses = {value.name: value for value in model.outputs}, {}
    for output, spec in (item for term in run.loss for item in term.items()):
        options = dict(spec)
        name, scale = options.pop("name"), options.pop("scale", 1.0)
        is_mean = options.pop("reduction", "mean") == "mean"
        shape = outputs[output].shape if output in outputs else None
        if shape is None or output in losses or not is_mean:
            return None
        written = write_loss(name, options, Prediction(len(shape), False, keras.config.epsilon()))
        if written is None:
            return None
        class_name, settings = written
        losses[output] = (getattr(keras.losses, class_name)(**settings), float(scale))
    if not losses or losses.keys() != outputs.keys():
        return None
    if len(losses) == 1:
        ((loss, weight),) = losses.values()
        return {"loss": loss, **({} if weight == 1.0 else {"loss_weights": weight})}
    return {"loss": [losses[name][0] for name in outputs], "loss_weights": [losses[name][1] for name in outputs]}
