"""Comparison of a model with the function that it was made of, at the example inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.agreement.steps import StepResult, compare_steps
from onward.agreement.tolerance import Sides
from onward.differentiate import vjp
from onward.engines import function as function_of
from onward.errors import MismatchError, UnsupportedError
from onward.model import Model
from onward.model.walk import is_random
from onward.run_state.state import RunState
from onward.run_state.training_models import to_training_model


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
        results = call_with(function, arguments, named)
    expected = tf.nest.flatten(results)
    for variable, value in before:
        variable.assign(value)
    feeds = example_feeds(function, arguments, named, model)
    outputs = function_of(_in_training(model), engine="numpy")(feeds)
    compare = Sides("that of TensorFlow", "the conversion is not exact: please report the function")
    compare(outputs, {name: other.numpy() for name, other in zip(outputs, expected, strict=True)})
    if trained:
        _compare_gradients(model, feeds, expected, tape, trained)


def call_with(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Call a function with an example."""
    return function(*map(_tensor, arguments), **{name: _tensor(x) for name, x in named.items()})


def example_feeds(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any], model: Model
) -> dict[str, np.ndarray]:
    """Return the example by the names of inputs; an empty one if some of it are specs."""
    examples = {x.op.name: x.dtype for x in function.inputs}
    arrays = dict(
        zip(examples, (np.asarray(x) for x in tf.nest.flatten((arguments, named)) if _is_array(x)), strict=False)
    )
    names = [value.name or "" for value in model.inputs]
    return {name: arrays[name] for name in names} if all(name in arrays for name in names) else {}


def try_steps(run: RunState, exported: Any, optimizer: Any) -> None:
    """Compare three steps of the function and a copy of the optimizer with the training model.

    `exported` has the variables, which are restored, and the call with the example.
    """
    from onward.frameworks.keras.optimizer import copy_optimizer

    if not exported.feeds or any(node.op_type == "Dropout" or is_random(node) for node in run.model.graph.all_nodes()):
        return
    before = {name: variable.numpy() for name, variable in exported.variables.items()}
    trained = {name: exported.variables[name] for name in exported.trainable}
    copied = copy_optimizer(optimizer, [(variable, variable) for variable in trained.values()])

    def step(_: Any) -> StepResult:
        with tf.GradientTape() as tape:
            value = exported.call()["loss"]
        gradients = tape.gradient(value, list(trained.values()), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        copied.apply(gradients, list(trained.values()))
        dense = {n: tf.convert_to_tensor(g).numpy() for n, g in zip(trained, gradients, strict=True)}
        return StepResult(float(value), dense, {name: variable.numpy() for name, variable in trained.items()})

    try:
        compare_steps(to_training_model(run), [exported.feeds] * 3, step, framework="TensorFlow")
    except MismatchError as error:
        if not any(isinstance(g, tf.IndexedSlices) for g in _gradients(exported, trained)):
            raise
        raise UnsupportedError(
            f"{type(optimizer).__name__} updates gathered rows one by one: {error.message}",
            hint="gather with a matmul, `tf.one_hot(ids, count) @ table`, or use `keras.optimizers.SGD`",
        ) from error
    finally:
        for name, array in before.items():
            exported.variables[name].assign(array)


def _gradients(exported: Any, trained: Mapping[str, Any]) -> list[Any]:
    with tf.GradientTape() as tape:
        value = exported.call()["loss"]
    return list(tape.gradient(value, list(trained.values())))


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
