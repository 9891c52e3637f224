"""Graphs of a training model that a Keras model executes, each with the state as inputs.

`forward` computes the outputs and the values that the loss reads, in inference or in training,
where it also changes state. `loss` computes the loss from these. `apply` is the whole update, from
gradients to new state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir
from keras import ops

from onward.build import copy_node
from onward.engines.framework import Function, NotOnHost, Operators
from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.keras import CONTROL, ROWS, Keras, as_operator
from onward.engines.keras import layers as keras_layers
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import frozen_weights, open_initializers
from onward.frameworks.program.sizes import as_lists, is_open, on_host, vector
from onward.lowering.contract import Contract, contract_of
from onward.lowering.step import lower_for_framework
from onward.model import Model
from onward.model.core import values
from onward.model.state import carried_state
from onward.run_state.reading import read_terms
from onward.transform import inline
from onward.transform.training import keep_only, without_steps


class GraphKeras(Keras):
    """Keras while it executes or traces a graph, on any device. Sizes may be dynamic."""

    def __init__(self) -> None:
        def shape(x: Any, *, start: int = 0, end: int | None = None) -> np.ndarray:
            return vector(self.shape_of(x)[start:end])

        def size(x: Any) -> np.ndarray:
            return np.asarray(np.prod(vector(self.shape_of(x))))

        rows = {name: as_operator(row, as_lists, functools.partial(self.call, name, row)) for name, row in ROWS.items()}
        self.operators = Operators({**CONTROL, **rows, "Shape": shape, "Size": size})
        self.on_host = on_host(self.operators, self.tensor)

    def call(self, operator: str, function: Function, /, *inputs: Any, **attributes: Any) -> Any:
        return function(*inputs, **attributes)

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def supports(self, dtype: np.dtype) -> bool:
        return dtype.hasobject or super().supports(dtype)

    def tensor(self, array: np.ndarray) -> Any:
        return keras.ops.convert_to_tensor(as_lists(array), "int32") if is_open(array) else super().tensor(array)

    def array(self, tensor: Any) -> np.ndarray:
        try:
            return super().array(tensor)
        except Exception as error:  # backends raise different errors for a traced tensor
            raise NotOnHost from error

    def derivative(self, function: Any, xs: Any) -> Any:
        raise no_gradient_inside()

    def is_tracing(self) -> bool:
        return True  # constants of one trace are not those of another


def interpret(model: Model, framework: GraphKeras) -> Interpreter:
    """Return the interpreter of a graph. Functions with a row in the table stay calls."""
    functions = [f"{domain}.{name}" for domain, name, _ in model.functions if f"{domain}.{name}" not in ROWS]
    return interpreter(inline(model, functions), framework)


def no_gradient_inside() -> UnsupportedError:
    return UnsupportedError(
        "the graph has a `Gradient` operator, which Keras has no operation for",
        hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
    )


class Executable:
    """Graph as a function of tensors by name."""

    def __init__(self, model: Model):
        self.inputs = open_inputs(model)
        self._framework = GraphKeras()
        if has_replicas():
            self._framework.operators["BatchNormalization"] = batch_normalization
        self._execute = interpret(model, self._framework)

    def __call__(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {value.name or "": tensors[value.name or ""] for value in self.inputs}
        return {name: self._framework.place(tensor) for name, tensor in self._execute(inputs).items()}


def open_inputs(model: Model) -> list[ir.Value]:
    return [value for value in model.graph.inputs if not value.is_initializer()]


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward pass, with the names of its results."""

    graph: Any
    outputs: Sequence[str]
    watched: Sequence[str]  # values that the loss reads
    updates: Mapping[str, str]  # by the name of a state: the result that replaces it


@dataclasses.dataclass(frozen=True)
class LossGraph:
    graph: Any
    name: str
    watched: Sequence[str]  # inputs that are results of the forward pass, in its order
    targets: Sequence[ir.Value]


class StepGraphs:
    """Graphs of a training model. Parameters and frozen weights are inputs of all of them."""

    def __init__(self, model: Model, convert: Callable[[Model], Any] = Executable):
        self.model = model
        self._convert = convert
        gradients = contract_of(lower_for_framework(model, part="gradients"))
        self._loss_name = str(gradients.loss)
        self._updates = gradients.update
        terms = read_terms(model.step())
        is_custom = any(term.name == "custom" for term in terms)  # it may read all outputs
        outputs = [value.name or "" for value in model.outputs] if is_custom else []
        self._watched = list(dict.fromkeys([*(term.output for term in terms), *outputs]))
        self._targets = [name for term in terms for name in term.inputs]
        self.frozen = frozen_weights(model)
        pairs = model.step().fact("train.forward") or {}
        self._trained = {plain: trained for trained, plain in pairs.items()}

    def inference(self) -> Forward:
        graph = without_steps(self.model)
        names = {value.name: value for value in values(graph.graph)}
        outputs = [value.name or "" for value in graph.outputs]
        self._open(graph, [names[name] for name in dict.fromkeys((*outputs, *self._watched))])
        return Forward(self._convert(graph), outputs, self._watched, {})

    def training(self) -> Forward:
        combined = Model(self.model.combined())
        graph, names = combined.graph, combined.names()
        by_name = {value.name: value for value in values(graph)}
        new = {by_name[plain]: by_name[trained] for plain, trained in self._trained.items() if trained in by_name}
        # If training computes a value differently, the nodes that read it are copied to read that of training.
        inference = {value.name for value in values(self.model.graph)}
        for node in list(graph):
            own = [output for output in node.outputs if output.name in inference and output not in new]
            if own and any(value in new for value in node.inputs if value is not None):
                inputs = [new.get(value, value) if value is not None else None for value in node.inputs]
                copy = copy_node(node, inputs, names, "train/{}")
                graph.append(copy)
                new |= dict(zip(node.outputs, copy.outputs, strict=True))

        def trained(name: str) -> ir.Value:
            return new.get(by_name[name], by_name[name])

        outputs = [trained(value.name or "") for value in self.model.outputs]
        watched = [trained(name) for name in self._watched]
        results = [*outputs, *watched, *(by_name[name] for name in self._updates.values())]
        self._open(combined, list(dict.fromkeys(results)))
        return Forward(self._convert(combined), _names(outputs), _names(watched), self._updates)

    def loss(self) -> LossGraph:
        combined = Model(self.model.combined())
        by_name = {value.name: value for value in values(combined.graph)}
        watched = [by_name[self._trained.get(name, name)] for name in self._watched]
        loss = by_name[self._trained.get(self._loss_name, self._loss_name)]
        combined.graph.outputs.clear()
        inputs_of = {value: _as_input(combined.graph, value) for value in watched}
        if loss in inputs_of:  # the loss is an output of the model
            node = ir.node("Identity", [inputs_of[loss]])
            combined.graph.append(node)
            loss = node.outputs[0]
            loss.name = f"{self._loss_name}/minimized"
        self._open(combined, [loss])
        inputs = open_inputs(combined)
        targets = [value for name in self._targets for value in inputs if value.name == name]
        accepted = {*_names(inputs_of.values()), *self._targets, *self.frozen}
        accepted |= {state.name for state in carried_state(self.model)}
        if strange := [value.name for value in inputs if value.name not in accepted]:
            raise UnsupportedError(
                f"the loss reads `{strange[0]}`; a Keras loss reads only outputs and targets",
                hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
            )
        return LossGraph(self._convert(combined), str(loss.name), _names(inputs_of.values()), targets)

    def apply(self) -> tuple[Any, Contract]:
        """Return the update as a function of gradients and state, and its contract."""
        lowered = lower_for_framework(self.model, part="apply")
        return self._convert(lowered), contract_of(lowered)

    def _open(self, model: Model, outputs: Sequence[ir.Value]) -> None:
        """Keep the nodes that compute `outputs`, with state and frozen weights as inputs."""
        keep_only(model, outputs)
        open_initializers(model.graph, [*(state.name for state in carried_state(self.model)), *self.frozen])


def _as_input(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Replace a computed value by an input of the same name."""
    replacement = ir.Value(name=value.name, type=value.type, shape=value.shape)
    value.name = f"{value.name}/computed"
    value.replace_all_uses_with(replacement)
    graph.inputs.append(replacement)
    return replacement


def _names(outputs: Iterable[ir.Value]) -> list[str]:
    return [value.name or "" for value in outputs]


# ---- models on several devices, with a replica on each (`tf.distribute`) ---------------------------------------------


def has_replicas() -> bool:
    """True if a model that is created now will be on several devices."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return bool(tf.distribute.get_strategy().num_replicas_in_sync > 1)


def share_of_replica(loss: Any) -> Any:
    """Return the loss divided by the number of replicas, whose batches are equally large."""
    context = _context()
    return loss if context is None else loss / ops.cast(context.num_replicas_in_sync, loss.dtype)


def sum_over_replicas(gradients: Sequence[Any]) -> Sequence[Any]:
    """Return the gradients of the loss of all replicas, for optimizers that need them at once."""
    context = _context()
    if context is None:
        return gradients
    import tensorflow as tf

    return context.all_reduce(tf.distribute.ReduceOp.SUM, [ops.convert_to_tensor(g) for g in gradients])


def batch_normalization(*inputs: Any, epsilon: float = 1e-5, momentum: float = 0.9, training_mode: int = 0) -> Any:
    """Compute BatchNormalization; in training with the statistics of all replicas."""
    context = _context() if training_mode else None
    if context is None:
        options = {"epsilon": epsilon, "momentum": momentum, "training_mode": training_mode}
        return keras_layers.batch_normalization(*inputs, **options)
    import tensorflow as tf

    x, scale, bias, mean, variance = inputs
    over = [0, *range(2, len(x.shape))]
    batch_mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, ops.mean(x, over))
    distance = ops.square(x - ops.reshape(batch_mean, (-1, *[1] * (len(x.shape) - 2))))
    batch_variance = context.all_reduce(tf.distribute.ReduceOp.MEAN, ops.mean(distance, over))
    y = keras_layers.batch_normalization(x, scale, bias, batch_mean, batch_variance, epsilon=epsilon)
    return y, mean * momentum + batch_mean * (1 - momentum), variance * momentum + batch_variance * (1 - momentum)


def _context() -> Any | None:
    """Return the context of this replica; None if there is only one."""
    if not has_replicas():
        return None
    import tensorflow as tf

    return tf.distribute.get_replica_context()
