"""Models as `tf.Module`: state as variables, steps and inference as graphs of TensorFlow operations."""

from __future__ import annotations

import contextlib
import functools
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
from onward.errors import Error, UnsupportedError, first_line
from onward.frameworks.formulas.graph_building import frozen_weights, open_initializers
from onward.frameworks.inference import open_parameters, try_outputs
from onward.frameworks.program.source_text import Identifiers
from onward.frameworks.run_files import TrainedResults
from onward.lowering.contract import contract_of
from onward.lowering.step import lower_for_framework
from onward.model import Model, Source, load
from onward.model.state import carried_state
from onward.run_state.training_models import refuse_rounding, step_names, step_of
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


class InferenceModule(tf.Module):  # type: ignore[misc]
    """Module that `to_tensorflow` returns for an inference model."""

    state: dict[str, Any]
    """Variables by name. Parameters are trainable variables."""
    infer: Callable[..., dict[str, Any]]
    """Return the outputs of the model."""

    @property
    def __call__(self) -> Callable[..., dict[str, Any]]:
        return self.infer


class TrainingModule(InferenceModule):
    """Module that `to_tensorflow` returns for a training model. As a SavedModel it trains without Onward.

    A step reads and changes its `state`. For a training model with several steps, `train_step` and `evaluate` are
    dictionaries by the name of the step.
    """

    train_step: Any
    """Make an update, and return metrics and `loss`. A loss that is not finite changes no state."""
    evaluate: Any
    """Return the metrics and the outputs for a batch, in inference mode."""
    training_model: Callable[[], dict[str, Any]]
    """Return the training model as compressed ONNX, without the values of variables, and its step."""


@checked(types=False)
def to_tensorflow(
    training: Source, *, step: int | None = None, sizes: Mapping[str, int] | None = None, probe: bool = True
) -> Any:
    """Return a `tf.Module` that continues a training model, or that computes an inference model.

        module = onward.to_tensorflow("training.onnx")
        metrics = module.train_step(image=images, labels=labels)
        module = onward.to_tensorflow("model.onnx")
        outputs = module(image=images)

    A training model becomes a `TrainingModule`, an inference model an `InferenceModule`, which
    `tf.GradientTape` differentiates by `module.trainable_variables`.

    - `training`: a training model, or an inference model
    - `step`: index of the only step to convert (default: all, as `module.train_step["generator"](...)`)
    - `sizes`: fixed values of dynamic sizes by name, such as `{"N": 32}` (default: none fixed)
    - `probe`: compare the outputs of an inference model with those of ONNX Runtime (default: True)
    """
    model, framework = load(training), OpenSizes()
    if not model.steps and step is None:
        return _inference_module(model, dict(sizes or {}), probe)
    model = of_one_opset(model)
    indices = range(len(model.steps)) if step is None else [step_of(model, step)]
    refuse_rounding(model, in_pairs=True)
    for index in indices:
        require_shapes(model, index, "TensorFlow")
    module = TrainingModule(name="training")
    slots = {index: carried_state(model, index) for index in indices}
    own = [s.name for index in indices for s in slots[index] if s.name not in model.graph.initializers]
    if shared := [name for name in own if own.count(name) > 1]:
        raise UnsupportedError(f"several steps have their own state `{shared[0]}`", hint="name a step: `step=0`")
    state = {slot.name: slot for index in indices for slot in slots[index]}
    frozen = {name: model.initializer(name) for name in frozen_weights(model) if name not in state}
    values = {name: slot.value for name, slot in state.items()}
    values |= {name: value for name, value in frozen.items() if framework.supports(_dtype(value))}
    trainable = {slot.name for index in indices for slot in slots[index] if slot.role == "parameter"}
    module.state = {name: _variable(name, value, name in trainable) for name, value in values.items()}
    fixed, names = dict(sizes or {}), step_names(model)
    for attribute, part in (("train_step", "step"), ("evaluate", "evaluation")):
        functions = {
            names[index]: _part(module, lower_for_framework(model, index, part), framework, fixed) for index in indices
        }
        setattr(module, attribute, functions if len(indices) > 1 else functions[names[indices[0]]])
        for name, function in functions.items():
            _trace(function, attribute if len(indices) == 1 else f"{attribute}[{name!r}]")
    module.infer = _inference(module, inline(without_steps(model)), framework, fixed)
    _trace(module.infer, "infer")
    packed = {"onnx": zlib.compress(_without_values(model, module.state, indices[0])), "step": indices[0]}
    module.training_model = tf.function(lambda: tf.nest.map_structure(tf.constant, packed), input_signature=[])
    return module


def _inference_module(model: Model, sizes: Mapping[str, int], probe: bool) -> InferenceModule:
    opened, parameters = open_parameters(model)
    require_shapes(opened, 0, "TensorFlow")
    opened, framework = inline(opened), OpenSizes()
    module = InferenceModule(name="inference")
    weights = {n: v for n, v in opened.graph.initializers.items() if v.dtype and v.dtype.is_floating_point()}
    weights = {n: v for n, v in weights.items() if n in parameters or (v.shape and framework.supports(_dtype(v)))}
    module.state = {name: _variable(name, value, name in parameters) for name, value in weights.items()}
    module.infer = _inference(module, opened, framework, sizes)
    _trace(module.infer, "infer")
    if probe and not sizes:
        names = [value.name or "" for value in model.inputs]
        compute = lambda arrays: {k: v.numpy() for k, v in module.infer(*(arrays[n] for n in names)).items()}
        try_outputs(model, compute, "tensorflow")
    return module


def _trace(function: Any, name: str) -> None:
    try:
        function.get_concrete_function()
    except (Error, TypeError, ValueError) as error:  # operators cannot have a number of axes that tracing does not know
        open_sizes = any(None in (spec.shape or [None]) for spec in function.input_signature)
        notes = getattr(error, "__notes__", [])
        reason = error.message if isinstance(error, Error) else " ".join([first_line(error), *notes])
        raise UnsupportedError(
            f"TensorFlow cannot trace `{name}`: {reason}",
            hint='fix dynamic sizes: `to_tensorflow(model, sizes={"N": 32})`'
            if open_sizes
            else "convert to PyTorch or JAX: `onward.to_torch(model)`",
        ) from error


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


def _inference(module: InferenceModule, model: Model, framework: Framework, sizes: Mapping[str, int]) -> Any:
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
    function = tf.function(call, input_signature=specs, autograph=False)
    function.__class__ = _Casting
    return function


class _Casting(type(tf.function(lambda: None))):  # type: ignore[misc]
    """`tf.function` that casts integers, such as int32 labels, to the types of its signature."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        specs = self.input_signature
        cast = {spec.name: functools.partial(_as_integer, spec.dtype) for spec in specs if spec.dtype.is_integer}
        first = [cast.get(spec.name, lambda x: x)(x) for spec, x in zip(specs, inputs, strict=False)]
        rest = {name: cast.get(name, lambda x: x)(x) for name, x in named.items()}
        return super().__call__(*first, *inputs[len(first) :], **rest)


def _as_integer(dtype: Any, x: Any) -> Any:
    return tf.cast(x, dtype) if isinstance(x, tf.Tensor) and x.dtype.is_integer and x.dtype != dtype else x


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


def load_into(target: Any, results: TrainedResults, *, optimizer: Any) -> Any:
    """Assign the variables of a module, and those of a Keras optimizer."""
    from onward.frameworks.keras.forward import load_variables
    from onward.frameworks.tensorflow.capture import names_of

    variables = list(target.variables)
    names = names_of(target, variables)
    load_variables(results, {names[id(variable)]: variable for variable in variables}, optimizer)
    return target
