"""Training models as `tf.Module`: state as variables, steps as graphs of TensorFlow operations."""

from __future__ import annotations

import contextlib
import inspect
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.arguments import checked
from onward.engines.framework import Framework
from onward.engines.framework_engine import Tensors, computation, interpreter
from onward.engines.tensorflow import TensorFlow
from onward.errors import Error, UnsupportedError
from onward.frameworks.formulas.graph_building import frozen_weights, open_initializers
from onward.frameworks.program.source_text import Identifiers
from onward.lowering.contract import contract_of
from onward.lowering.step import lower_for_framework
from onward.model import Model, Source, load
from onward.model.state import carried_state
from onward.run_state.training_models import refuse_rounding, step_of
from onward.transform import inline
from onward.transform.declare import require_shapes
from onward.transform.opset import of_one_opset
from onward.transform.training import without_steps


class OpenSizes(TensorFlow):
    """TensorFlow while it records a graph with dynamic sizes, for any device."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def array(self, tensor: Any) -> Any:
        """Return the value, or the tensor if it is unknown: rows that take sizes accept both."""
        value = tf.get_static_value(tensor)
        return tensor if value is None else np.asarray(value)


class TrainingModule(tf.Module):  # type: ignore[misc]
    """Module that `to_tensorflow` returns. As a SavedModel it trains without Onward."""

    state: dict[str, Any]
    """Variables by name that a step reads and changes. Parameters are trainable variables."""
    train_step: Callable[..., dict[str, Any]]
    """Make an update, and return metrics and `loss`. A loss that is not finite changes no state."""
    evaluate: Callable[..., dict[str, Any]]
    """Return the metrics and the outputs for a batch, in inference mode."""
    infer: Callable[..., dict[str, Any]]
    """Return the outputs of the model."""
    training_model: Callable[[], dict[str, Any]]
    """Return the training model as compressed ONNX, without the values of variables, and its step."""

    @property
    def __call__(self) -> Callable[..., dict[str, Any]]:
        return self.infer


@checked(types=False)
def to_tensorflow(
    training: Source, *, step: int | None = None, sizes: Mapping[str, int] | None = None
) -> TrainingModule:
    """Return a `tf.Module` that continues a training model.

        module = onward.to_tensorflow("training.onnx")
        metrics = module.train_step(image=images, labels=labels)

    - `training`: a training model
    - `step`: index of the step, for a training model with several
    - `sizes`: fixed values of dynamic sizes by name, such as `{"N": 32}` (default: none fixed)
    """
    model, framework = of_one_opset(load(training)), OpenSizes()
    step = step_of(model, step)
    refuse_rounding(model, in_pairs=True)
    require_shapes(model, step, "TensorFlow")
    module = TrainingModule(name="training")
    state = {slot.name: slot for slot in carried_state(model, step)}
    frozen = {name: model.initializer(name) for name in frozen_weights(model) if name not in state}
    values = {name: slot.value for name, slot in state.items()}
    values |= {name: value for name, value in frozen.items() if framework.supports(_dtype(value))}
    trainable = {name for name, slot in state.items() if slot.role == "parameter"}
    module.state = {name: _variable(name, value, name in trainable) for name, value in values.items()}
    fixed = dict(sizes or {})
    module.train_step = _part(module, lower_for_framework(model, step, "step"), framework, fixed)
    module.evaluate = _part(module, lower_for_framework(model, step, "evaluation"), framework, fixed)
    module.infer = _inference(module, inline(without_steps(model)), framework, fixed)
    packed = {"onnx": zlib.compress(_without_values(model, module.state, step)), "step": step}
    module.training_model = tf.function(lambda: tf.nest.map_structure(tf.constant, packed), input_signature=[])
    for name in ("train_step", "evaluate", "infer"):
        function = getattr(module, name)
        try:
            function.get_concrete_function()
        except Error as error:
            open_sizes = any(None in (spec.shape or [None]) for spec in function.input_signature)
            raise UnsupportedError(
                f"TensorFlow cannot trace `{name}`: {error.message}",
                hint='fix dynamic sizes: `to_tensorflow(model, sizes={"N": 32})`' if open_sizes else None,
            ) from error
    return module


def _dtype(value: ir.Value) -> np.dtype:
    assert value.dtype is not None
    return value.dtype.numpy()


def _variable(name: str, value: ir.Value, trainable: bool) -> Any:
    assert value.const_value is not None
    plain = re.sub(r"[^A-Za-z0-9_./-]", "_", name)  # TensorFlow refuses other characters
    plain = plain if re.match(r"[A-Za-z0-9.]", plain) else f"v{plain}"
    return tf.Variable(value.const_value.numpy(), trainable=trainable, name=plain)


def _part(module: TrainingModule, lowered: Model, framework: Framework, sizes: Mapping[str, int]) -> Any:
    """Return a part of the step as a function of a batch."""
    stored, contract = _as_inputs(lowered, module.state), contract_of(lowered)
    batch = [value for value in lowered.graph.inputs if value.name in contract.batch]
    names = {contract.loss: "loss"} if contract.part == "step" else {}  # a fixed name, whatever it is in the model
    compute = computation(lowered, framework)

    def run(tensors: Tensors) -> Tensors:
        new, results = compute(tensors | {name: tf.identity(module.state[name]) for name in stored})
        for name, tensor in new.items():
            module.state[name].assign(tensor)
        return {names.get(name, name): framework.place(tensor) for name, tensor in results.items()}

    return _function(run, batch, sizes)


def _inference(module: TrainingModule, model: Model, framework: Framework, sizes: Mapping[str, int]) -> Any:
    inputs = model.inputs
    stored = _as_inputs(model, module.state)
    execute = interpreter(model, framework)

    def run(tensors: Tensors) -> Tensors:
        results = execute(tensors | {name: tf.identity(module.state[name]) for name in stored})
        return {name: framework.place(tensor) for name, tensor in results.items()}

    return _function(run, inputs, sizes)


def _as_inputs(model: Model, names: Iterable[str]) -> list[str]:
    """Make inputs of these initializers, and return the names that the graph reads."""
    open_initializers(model.graph, names)
    read = {value.name for value in model.graph.inputs}
    return [name for name in names if name in read]


def _function(run: Callable[[Tensors], Tensors], inputs: Iterable[ir.Value], sizes: Mapping[str, int]) -> Any:
    """Return a `tf.function` that takes inputs by position or by name."""
    names = Identifiers()
    arguments = {names.like(value.name or ""): value for value in inputs}

    def call(*tensors: Any) -> Tensors:
        return run({value.name or "": tensor for value, tensor in zip(arguments.values(), tensors, strict=True)})

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in arguments]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    specs = []
    for name, value in arguments.items():
        dims = value.shape
        shape = dims if dims is None else [n if isinstance(n, int) else sizes.get(n.value or "") for n in dims]
        specs.append(tf.TensorSpec(shape, _dtype(value), name))
    return tf.function(call, input_signature=specs, autograph=False)


def _without_values(model: Model, names: Iterable[str], step: int) -> bytes:
    """Return the model as bytes, with zeros for tensors whose values are in variables."""
    empty, left_out = model.copy(), set(names)
    for value in empty.initializers():
        if isinstance(value.const_value, ir.ExternalTensor) and value.name not in left_out:
            properties = dict(value.const_value.metadata_props)
            value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name, metadata_props=properties)
    for name in left_out:
        tensor = empty.initializer(name, step).const_value
        assert tensor is not None
        empty.set(name, np.zeros(tuple(tensor.shape), tensor.dtype.numpy()), step)
    return bytes(empty.to_proto().SerializeToString())
