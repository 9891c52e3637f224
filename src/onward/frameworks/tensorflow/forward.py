"""A training model as a `tf.Module`: its state are variables, its step is a graph of TensorFlow's own operations."""

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
    """TensorFlow while it records a graph whose sizes are not all known. Where that will run is decided later."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def array(self, tensor: Any) -> Any:
        """The value, or where nobody knows it the tensor itself: rows of the table that are told sizes take both."""
        known = tf.get_static_value(tensor)
        return tensor if known is None else np.asarray(known)


class TrainingModule(tf.Module):  # type: ignore[misc]
    """What `to_tensorflow` makes. Saved as a SavedModel it trains wherever TensorFlow is, without Onward."""

    state: dict[str, Any]
    """All that a step reads and changes, as variables by name; the parameters are trainable ones."""
    train_step: Callable[..., dict[str, Any]]
    """One update by a batch; the metrics, `loss` among them. If the loss is not finite, the variables stay."""
    evaluate: Callable[..., dict[str, Any]]
    """The metrics and the outputs for a batch, as inference computes them."""
    infer: Callable[..., dict[str, Any]]
    """The outputs of the model."""
    training_model: Callable[[], dict[str, Any]]
    """The training model without the values of variables, as compressed bytes of ONNX, and which step of it this is."""

    @property
    def __call__(self) -> Callable[..., dict[str, Any]]:
        return self.infer


@checked(types=False)
def to_tensorflow(
    training: Source, *, step: int | None = None, sizes: Mapping[str, int] | None = None
) -> TrainingModule:
    """Make a `tf.Module` that goes on where a training model is.

        module = onward.to_tensorflow("training.onnx")
        metrics = module.train_step(image=images, labels=labels)

    - `training`: a training model
    - `step`: which one, of a training model with several
    - `sizes`: sizes that the model leaves open stay open; this fixes some of them by name, such as `{"N": 32}`, for
      graphs that need to know them
    """
    model, framework = of_one_opset(load(training)), OpenSizes()
    step = step_of(model, step)
    refuse_rounding(model, in_pairs=True)
    require_shapes(model, step, "TensorFlow")
    module = TrainingModule(name="training")
    state = {found.name: found for found in carried_state(model, step)}
    frozen = {name: model.initializer(name) for name in frozen_weights(model) if name not in state}
    values = {name: found.value for name, found in state.items()}
    values |= {name: value for name, value in frozen.items() if framework.supports(_dtype(value))}
    trainable = {name for name, found in state.items() if found.role == "parameter"}
    module.state = {name: _variable(name, value, name in trainable) for name, value in values.items()}
    known = dict(sizes or {})
    module.train_step = _part(module, lower_for_framework(model, step, "step"), framework, known)
    module.evaluate = _part(module, lower_for_framework(model, step, "evaluation"), framework, known)
    module.infer = _inference(module, inline(without_steps(model)), framework, known)
    packed = zlib.compress(_without_values(model, module.state, step))
    carried_along = {"onnx": packed, "step": step}
    module.training_model = tf.function(lambda: tf.nest.map_structure(tf.constant, carried_along), input_signature=[])
    for what in ("train_step", "evaluate", "infer"):
        _trace(getattr(module, what), what)
    return module


def _dtype(value: ir.Value) -> np.dtype:
    assert value.dtype is not None
    return value.dtype.numpy()


def _variable(name: str, value: ir.Value, trainable: bool) -> Any:
    assert value.const_value is not None
    return tf.Variable(value.const_value.numpy(), trainable=trainable, name=_plain(name))


def _plain(name: str) -> str:
    """A name that TensorFlow takes for a variable, whose real one is that in `state`."""
    made = re.sub(r"[^A-Za-z0-9_./-]", "_", name)
    return made if re.match(r"[A-Za-z0-9.]", made) else f"v{made}"


def _part(module: TrainingModule, lowered: Model, framework: Framework, sizes: Mapping[str, int]) -> Any:
    """A part of the step as a function of a batch."""
    given, contract = _as_inputs(lowered, module.state), contract_of(lowered)
    batch = [value for value in lowered.graph.inputs if value.name in contract.batch]
    called = {contract.loss: "loss"} if contract.part == "step" else {}  # whatever it is called in the model
    compute = computation(lowered, framework)

    def run(tensors: Tensors) -> Tensors:
        new, results = compute(tensors | {name: tf.identity(module.state[name]) for name in given})
        for name, tensor in new.items():
            module.state[name].assign(tensor)
        return {called.get(name, name): framework.place(tensor) for name, tensor in results.items()}

    return _function(run, batch, sizes)


def _inference(module: TrainingModule, model: Model, framework: Framework, sizes: Mapping[str, int]) -> Any:
    inputs = model.inputs
    given = _as_inputs(model, module.state)
    execute = interpreter(model, framework)

    def run(tensors: Tensors) -> Tensors:
        results = execute(tensors | {name: tf.identity(module.state[name]) for name in given})
        return {name: framework.place(tensor) for name, tensor in results.items()}

    return _function(run, inputs, sizes)


def _as_inputs(model: Model, names: Iterable[str]) -> list[str]:
    """Make inputs of initializers; the names among these that the graph reads."""
    open_initializers(model.graph, names)
    read = {value.name for value in model.graph.inputs}
    return [name for name in names if name in read]


# ---- functions -------------------------------------------------------------------------------------------------------


def _function(run: Callable[[Tensors], Tensors], inputs: Iterable[ir.Value], sizes: Mapping[str, int]) -> Any:
    """A `tf.function` that takes inputs by position or by name."""
    names = Identifiers()
    arguments = {names.like(value.name or ""): value for value in inputs}

    def call(*given: Any) -> Tensors:
        return run({value.name or "": tensor for value, tensor in zip(arguments.values(), given, strict=True)})

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in arguments])  # type: ignore[attr-defined]
    specs = [tf.TensorSpec(_open_shape(value, sizes), _dtype(value), name) for name, value in arguments.items()]
    return tf.function(call, input_signature=specs, autograph=False)


def _open_shape(value: ir.Value, sizes: Mapping[str, int]) -> list[int | None] | None:
    if value.shape is None:
        return None
    return [size if isinstance(size, int) else sizes.get(size.value or "") for size in value.shape]


def _trace(function: Any, what: str) -> None:
    try:
        function.get_concrete_function()
    except Error as error:
        open_sizes = any(None in (spec.shape or [None]) for spec in function.input_signature)
        raise UnsupportedError(
            f"`{what}` cannot be made a graph of TensorFlow: {error.message}",
            hint=_FIXING if open_sizes else None,
        ) from error


_FIXING = 'fix sizes that the model leaves open: `to_tensorflow(model, sizes={"N": 32})`'


# ---- the way back ----------------------------------------------------------------------------------------------------


def _without_values(model: Model, names: Iterable[str], step: int) -> bytes:
    """The model as bytes, in which tensors that are variables are zeros: they will be asked for what they are then."""
    empty, left_out = model.copy(), set(names)
    for value in empty.initializers():
        if isinstance(value.const_value, ir.ExternalTensor) and value.name not in left_out:
            kept = dict(value.const_value.metadata_props)
            value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name, metadata_props=kept)
    for name in left_out:
        tensor = empty.initializer(name, step).const_value
        assert tensor is not None
        empty.set(name, np.zeros(tuple(tensor.shape), tensor.dtype.numpy()), step)
    made: bytes = empty.to_proto().SerializeToString()
    return made
