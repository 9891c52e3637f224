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
from onward.errors import UnsupportedError, first_line
from onward.frameworks.keras.layer_graph import LayerGraph, functional_of
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
    rank: int  # of the target
    dtype: str

    def fit(self, target: Any) -> np.ndarray:
        """Return a target as the training model takes it: Keras adds and drops a last axis of size 1."""
        array = np.asarray(target).astype(self.dtype)
        if array.ndim == self.rank + 1 and array.shape[-1] == 1:
            return array[..., 0]
        return array[..., None] if array.ndim == self.rank - 1 else array


def read_loss(model: Any, graph: LayerGraph, targets: Any = None) -> list[Summand]:
    """Return the summands of the loss of a compiled model, in the order of Keras.

    `targets` are examples of the targets; without them, they are like the outputs.
    """
    taken: set[str] = set()
    examples = by_output(targets, graph)
    return [_term(*item, graph, taken, examples) for item in _flat_losses(model, graph)]


def by_output(targets: Any, graph: LayerGraph) -> Mapping[int, Any]:
    """Return targets by the index of the output that they are for."""
    if isinstance(targets, Mapping) and set(targets) <= set(graph.output_names):
        return {graph.output_names.index(name): x for name, x in targets.items()}
    flat = [] if targets is None else keras.tree.flatten(targets)
    return dict(enumerate(flat)) if len(flat) == len(graph.outputs) else {}


def _flat_losses(model: Any, graph: LayerGraph) -> list[tuple[int, Any, float]]:
    """Return the index of the output, the loss and its weight, as Keras resolves them."""
    compiled_loss = model._compile_loss
    if compiled_loss is None or compiled_loss._user_loss is None:
        if graph.is_regularized:
            return []
        raise Refused("model was compiled without a loss")
    names = getattr(functional_of(model), "output_names", None)
    resolved = type(compiled_loss)(compiled_loss._user_loss, compiled_loss._user_loss_weights, output_names=names)
    structure, names = graph.structure, graph.output_names
    resolved.build(structure, structure)
    numbers = keras.tree.pack_sequence_as(structure, list(range(len(graph.outputs))))
    losses = []
    for path, loss, weight, _ in resolved._flat_losses:
        output: Any = numbers
        for key in path if isinstance(numbers, list | tuple | dict) else ():
            output = output[names.index(key) if isinstance(output, list | tuple) and isinstance(key, str) else key]
        losses.append((int(output), loss, 1.0 if weight is None else float(weight)))
    return losses


def _term(
    index: int, loss: Any, weight: float, graph: LayerGraph, taken: set[str], examples: Mapping[int, Any]
) -> Summand:
    function = getattr(loss, "fn", None)
    name = getattr(function, "__name__", type(loss).__name__)
    output = graph.outputs[index]
    is_own = function is not None and function.__module__.startswith("keras.") and name in LOSSES
    if (
        index in graph.masks
        or function is None
        or not is_own
        or (loss.reduction != "sum" and loss.reduction not in _MEANS)
    ):
        return _traced(index, loss, weight, graph, taken, examples.get(index))
    row, is_sum = LOSSES[name], loss.reduction == "sum"
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    options = {**defaults, **loss._fn_kwargs}
    on = _logits(output, options) if row.takes_logits else None
    try:
        read = row.read(options, Prediction(output.rank, on is not None, keras.config.epsilon()))
    except Refused:
        return _traced(index, loss, weight, graph, taken, examples.get(index))
    if is_sum and row.by_element:  # Keras sums the means along the last axis, a recipe sums all
        if output.shape[-1] is None:
            raise Refused(f"loss {name} sums over an axis of unknown size")
        weight /= output.shape[-1]
    prediction = (on or output).plain.value
    graph.ends.append(prediction)
    target = _target_name("labels" if row.draws == "labels" else "target", prediction, taken)
    if read is None:
        spec: Any = _formula(row, options, prediction, output, target, "sum" if is_sum else "mean", weight)
    else:
        spec = {**read, **({"reduction": "sum"} if is_sum else {}), **({"scale": weight} if weight != 1.0 else {})}
    is_labels = row.draws == "labels"
    shape, dtype = (output.shape[:-1], "int64") if is_labels else (output.shape, str(output.dtype))
    draw = functools.partial(_draw, row.draws, output.shape)
    return Summand(index, {prediction.name: spec}, target, draw, len(shape), dtype)


def _target_name(name: str, prediction: ir.Value, taken: set[str]) -> str:
    target = name if name not in taken else f"{prediction.name}_{name}"
    taken.add(target)
    return target


def _traced(index: int, loss: Any, weight: float, graph: LayerGraph, taken: set[str], example: Any) -> Summand:
    """Return a loss without a row, as a traced graph."""
    if getattr(loss, "reduction", "sum") not in ("sum", *_MEANS):
        raise Refused(f"loss {type(loss).__name__} has the reduction `{loss.reduction}`")
    backend, name = keras.backend.backend(), getattr(getattr(loss, "fn", loss), "__name__", type(loss).__name__)
    if backend != "tensorflow":
        raise Refused(f"loss {name} has no counterpart, and is not traced on {backend}, but on TensorFlow")
    from onward.frameworks.tensorflow.capture import export_function

    output, mask = graph.outputs[index], graph.masks.get(index)
    prediction = output.plain.value
    shape, dtype = output.shape, str(output.dtype)
    if example is not None:
        array = np.asarray(example)
        shape = (None, *array.shape[1:])
        dtype = "int64" if array.dtype.kind in "iub" else dtype
    examples = [keras.KerasTensor(output.shape, str(output.dtype)), keras.KerasTensor(shape, dtype)]
    if mask is not None:
        examples.append(keras.KerasTensor([None, *output.shape[1 : len(mask.value.shape)]], "bool"))  # type: ignore[arg-type]

    def compute(prediction: Any, target: Any, *masks: Any) -> list[Any]:
        for each in masks:
            keras.src.backend.set_keras_mask(prediction, each)
        return [keras.ops.sum(loss(target, prediction)) * weight]

    try:
        loss_graph = export_function(compute, examples)
    except (UnsupportedError, TypeError, ValueError) as error:
        raise Refused(f"loss {name} cannot be traced: {first_line(error)}") from error
    target = _target_name("target", prediction, taken)
    names = [prediction.name, target, *([] if mask is None else [f"value:{mask.value.name}"])]
    for value, new in zip(loss_graph.inputs, names, strict=True):
        value.name = new
    draw = functools.partial(_draw, "labels" if dtype == "int64" else "positive", output.shape)
    return Summand(index, {prediction.name: loss_graph}, target, draw, len(shape), dtype)


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
