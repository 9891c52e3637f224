"""Comparison of a model with the function that it was made of, at the example inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.agreement.tolerance import Sides
from onward.differentiate import vjp
from onward.engines import function as function_of
from onward.model import Model
from onward.model.walk import is_random


def confirm(
    model: Model, function: Any, arguments: Sequence[Any], named: dict[str, Any], trained: Mapping[str, Any]
) -> None:
    """Raise an error if results differ; batch normalization is compared in training mode.

    Gradients with respect to `trained`, variables by name, are compared for custom derivatives.
    Without example arrays or with random numbers, nothing is compared.
    """
    examples = [x for x in (*arguments, *named.values()) if _is_array(x)]
    nodes = list(model.graph.all_nodes())
    if len(examples) < len(model.inputs) or any(node.op_type == "Dropout" or is_random(node) for node in nodes):
        return
    before = [(variable, variable.numpy()) for variable in function.graph.variables if not variable.trainable]
    with tf.GradientTape(persistent=True) as tape:
        results = function(*map(_tensor, arguments), **{name: _tensor(x) for name, x in named.items()})
    expected = tf.nest.flatten(results)
    for variable, value in before:
        variable.assign(value)
    examples_by_name = {x.op.name: np.asarray(example) for x, example in zip(function.inputs, examples, strict=False)}
    feeds = {value.name or "": examples_by_name[value.name or ""] for value in model.inputs}
    outputs = function_of(_in_training(model), engine="numpy")(feeds)
    compare = Sides("that of TensorFlow", "the conversion is not exact: please report the function")
    compare(outputs, {name: other.numpy() for name, other in zip(outputs, expected, strict=True)})
    if trained:
        _compare_gradients(model, feeds, expected, tape, trained)


def _compare_gradients(
    model: Model, feeds: dict[str, np.ndarray], expected: Sequence[Any], tape: Any, trained: Mapping[str, Any]
) -> None:
    """Compare the gradients of each output, since a model does not contain custom derivatives."""
    hint = "write the function without `tf.custom_gradient`, or freeze the variables before it"
    compare = Sides("that of TensorFlow", hint)
    variables = {name: variable for name, variable in trained.items() if name in model.graph.initializers}
    for value, result in zip(model.outputs, expected, strict=True):
        if not result.dtype.is_floating:
            continue
        backward = vjp(model, value.name or "", list(variables))
        dy = np.random.default_rng(0).standard_normal(result.shape).astype(result.dtype.as_numpy_dtype)
        ours = function_of(backward, engine="numpy")({**feeds, backward.inputs[-1].name or "": dy})
        theirs = tape.gradient(result, variables, tf.constant(dy), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients = dict(zip(variables, list(ours.values())[-len(variables) :], strict=True))
        compare(
            gradients,
            {name: tf.convert_to_tensor(gradient).numpy() for name, gradient in theirs.items()},
            when=f"the gradient of `{value.name}` with respect to ",
        )


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | tf.Tensor)


def _tensor(x: Any) -> Any:
    return tf.convert_to_tensor(x) if _is_array(x) else x


def _in_training(model: Model) -> Model:
    copy = model.copy()
    for node in copy.graph.all_nodes():
        mean = node.inputs[3] if node.op_type == "BatchNormalization" else None
        if mean is not None and mean.is_initializer():
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    return copy
