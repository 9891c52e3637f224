"""Keras models from training models, as operations of `keras.ops`, and from inference models, as layers."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from onward.arguments import checked
from onward.differentiate.gradients import has_gradients
from onward.engines.keras.types import available, fit_target
from onward.errors import DataError, UnsupportedError
from onward.frameworks.inference import open_parameters, try_outputs
from onward.frameworks.keras.layered import layered_model
from onward.frameworks.keras.loss import make_loss
from onward.frameworks.keras.optimizer import array_of, clip_of, groups_of, make_optimizer, recipe_of, row_of, state_of
from onward.frameworks.keras.schedule import read_schedule
from onward.frameworks.keras.step_graphs import (
    Executable,
    LossGraph,
    StepGraphs,
    no_gradient_inside,
    share_of_replica,
    sum_over_replicas,
)
from onward.frameworks.run_files import TrainedResults
from onward.model import Model, Source, load
from onward.model.state import STEP, states
from onward.run_state.standard_steps import adopt
from onward.run_state.training_models import from_training_model, is_plain, only_step_of
from onward.transform.declare import require_shapes
from onward.transform.opset import of_one_opset

# Aggregation of variables that are equal on all devices of a TensorFlow strategy. Batch statistics use "mean".
_SAME = "only_first_replica"


class TrainingModel(keras.Model):  # type: ignore[misc]
    """Keras model of a training model. `variables_by_name` has its names."""

    def __init__(self, model: Model):
        super().__init__(name=_identifier(model.graph.name or "model"))
        graphs = StepGraphs(model)
        self._forward = {False: graphs.inference(), True: graphs.training()}
        self._loss_graph: LossGraph | None = graphs.loss()
        self.input_names = [value.name or "" for value in model.inputs]
        self._integers = {v.name: v.dtype.numpy().name for v in model.inputs if v.dtype and v.dtype.is_integer()}
        trained = {state.name for state in states(model) if state.role == "parameter"}
        names = {*trained, *self._forward[True].updates, *graphs.frozen}
        ordered = dict.fromkeys(name for name in (*model.graph.initializers, *names) if name in names)
        self._ordered_variables = [variable(n, model.array(n), trainable=n in trained) for n in ordered]
        self.variables_by_name = dict(zip(ordered, self._ordered_variables, strict=True))
        self._watched: list[Any] = []
        self.source = model
        self._compiled_with: Any = None
        self.losses_given: dict[str, Any] = {}
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        forward = self._forward[bool(training)]
        results = forward.graph(self._tensors() | self._named(inputs))
        for name, new in forward.updates.items():
            self.variables_by_name[name].assign(results[new])
        # The loss may read other values than the outputs, and `compute_loss` gets only these.
        self._watched = [results[name] for name in forward.watched]
        outputs = [results[name] for name in forward.outputs]
        return outputs[0] if len(outputs) == 1 else outputs

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the loss of the training model for the last forward pass."""
        loss = self._loss_graph
        if loss is None:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        if sample_weight is not None:
            raise UnsupportedError("the loss of a training model takes no `sample_weight`", hint="leave it out")
        by_name = y if isinstance(y, Mapping) else self._named_targets(loss, [] if y is None else _as_list(y))
        targets = {value.name or "": _fit_target(by_name[value.name or ""], value) for value in loss.targets}
        watched = dict(zip(loss.watched, self._watched, strict=True))
        return share_of_replica(loss.graph({**self._tensors(), **targets, **watched})[loss.name])

    def _named_targets(self, loss: LossGraph, targets: Iterable[Any]) -> dict[str, Any]:
        names, arrays = [value.name or "" for value in loss.targets], list(targets)
        if len(names) != len(arrays):
            raise DataError(
                f"the loss takes {len(names)} targets, not {len(arrays)}",
                hint=f"give `y` as [{', '.join(names)}]" if names else "leave `y` out: the model computes its loss",
            )
        return dict(zip(names, arrays, strict=True))

    def compile_as(self, optimizer: Any, **losses: Any) -> None:
        """Compile the model with an optimizer; `losses` replace the loss graph."""
        self._compiled_with, self.losses_given = optimizer, losses
        if losses:
            self._loss_graph = None
        self.compile(optimizer=optimizer, **losses)

    def to_training_model(self) -> Model:
        """Return the training model with the current state."""
        if self.optimizer is not self._compiled_with:
            raise UnsupportedError(
                "the model was compiled again, with a loss or optimizer of its own",
                hint="`onward.prepare` its inference model with the new loss and optimizer",
            )
        model = self.source.copy()
        for name, array in self.state().items():
            model.set(name, array)
        return model

    def state(self) -> dict[str, np.ndarray]:
        """Return the training state and frozen weights, named and typed as in the training model."""
        if isinstance(self.optimizer, GraphOptimizer):
            state = self.optimizer.state()
        else:
            names = {id(v): name for name, v in self.variables_by_name.items()}
            state = state_of(self.optimizer, names, self.trainable_variables)
            state[STEP] = np.asarray(int(self.optimizer.iterations), np.int64)
        state |= {name: array_of(v) for name, v in self.variables_by_name.items()}
        return {name: array.astype(self.source.array(name).dtype) for name, array in state.items()}

    def _tensors(self) -> dict[str, Any]:
        return {name: ops.convert_to_tensor(variable.value) for name, variable in self.variables_by_name.items()}

    def _named(self, inputs: Any) -> dict[str, Any]:
        """Return inputs by name. To build for several devices, Keras passes floats for integers."""
        pairs = inputs if isinstance(inputs, Mapping) else zip(self.input_names, _as_list(inputs), strict=True)
        named = dict(pairs)
        return named | {name: ops.cast(named[name], dtype) for name, dtype in self._integers.items() if name in named}


class GraphOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Optimizer that runs the update graph of a training model: optimizers, schedule, clipping, averages."""

    def __init__(self, model: Model, variables: Mapping[str, Any], learning_rate: float):
        super().__init__(learning_rate=learning_rate, name="training")
        graph, contract = StepGraphs(model).apply()
        self._graph: Executable = graph
        self._gradients: dict[str, str] = contract.gradients
        self._updates: dict[str, str] = contract.update
        self._own = {name: model.array(name) for name in contract.state if name not in variables}
        self._names = {id(v): name for name, v in variables.items()}
        self._state: dict[str, Any] = {}
        self._iterations.assign(int(model.initializer(STEP).const_value.numpy()))  # type: ignore[union-attr]

    @property
    def learning_rate(self) -> Any:
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        raise UnsupportedError(
            "the learning rate and its schedule belong to the training model",
            hint="change it there, and convert again: `training.set('group0/lr', 1e-4)`",
        )

    def build(self, variables: Any) -> None:
        super().build(variables)
        for name, array in self._own.items():
            dtype = available(str(array.dtype))
            self._state[name] = self.add_variable(array.shape, dtype=dtype, aggregation=_SAME, name=_identifier(name))
            self._state[name].assign(array)

    def state(self) -> dict[str, np.ndarray]:
        return {name: array_of(self._state[name]) for name in self._own}

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(trainable_variables or self._trainable_variables)
        if not self.built:
            self.build(variables)
        by_parameter = {self._names[id(v)]: g for v, g in zip(variables, sum_over_replicas(grads), strict=True)}
        tensors = {name: by_parameter[parameter] for name, parameter in self._gradients.items()}
        state = self._state | {self._names[id(v)]: v for v in variables}
        results = self._graph(tensors | {name: ops.convert_to_tensor(v.value) for name, v in state.items()})
        for name, new in self._updates.items():
            if name in state:
                state[name].assign(results[new])
        self._iterations.assign(ops.cast(self._state[STEP], self._iterations.dtype))


def variable(name: str, array: np.ndarray, *, trainable: bool) -> Any:
    """Return a variable whose path is the name, without characters that Keras refuses."""
    # On PyTorch, Keras registers variables as parameters, whose names must have no dots.
    plain = name.replace(".", "/") if keras.backend.backend() == "torch" else name
    *scopes, last = [scope_name for scope_name in plain.split("/") if scope_name]
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(_identifier(scope)))
        dtype = available(str(array.dtype))
        of_devices = "mean" if not trainable and array.dtype.kind == "f" else _SAME
        return keras.Variable(
            array.astype(dtype), trainable=trainable, dtype=dtype, name=_identifier(last), aggregation=of_devices
        )


def _identifier(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    return plain if re.match(r"[A-Za-z0-9.]", plain) else f"v{plain}"


def _as_list(values: Any) -> Iterable[Any]:
    return values if isinstance(values, list | tuple) else [values]


def _fit_target(target: Any, value: Any) -> Any:
    rank = None if value.shape is None else len(value.shape)
    return fit_target(target, value.dtype.numpy().name, rank)  # type: ignore[no-untyped-call]


@checked(types=False)
def to_keras(training: Source, *, step: int | None = None, probe: bool = True) -> Any:
    """Return a compiled Keras model that continues a training model with `fit`, or an inference model as layers.

        model = onward.to_keras("training.onnx")
        model.fit(images, labels)
        model = onward.to_keras("model.onnx")
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    A training model becomes a `TrainingModel`. Its variables have the names of the tensors of the
    training model. Optimizer and loss are Keras's own if these compute the same, else the graphs of
    the training model.

    An inference model becomes a functional model of Keras's layers. `Operations` layers compute the
    nodes that no layer computes; to load a saved model with one, import `onward.frameworks.keras`
    first.

    - `training`: a training model, or an inference model
    - `step`: index of the step. A training model with several steps is refused, because a Keras
      model holds one
    - `probe`: compare the outputs of an inference model with those of ONNX Runtime (default: True)
    """
    model = load(training)
    if not model.steps and step is None:
        return _layers(model, probe)
    model = adopt(of_one_opset(model))
    index = only_step_of(model, step)
    if has_gradients(model):
        raise no_gradient_inside()
    run = from_training_model(model, index, forward=False)
    keras_model = TrainingModel(model)
    variables = keras_model.variables_by_name
    optimizer = make_optimizer(run, variables)
    if optimizer is None:
        optimizer = GraphOptimizer(model, variables, run.groups[0].lr)
        optimizer.build(keras_model.trainable_variables)
    keras_model.compile_as(optimizer, **(make_loss(run, model) or {} if is_plain(model, index, run) else {}))
    return keras_model


def _layers(model: Model, probe: bool) -> Any:
    if has_gradients(model):
        raise no_gradient_inside()
    opened, parameters = open_parameters(model)
    require_shapes(opened, 0, "Keras")
    keras_model = layered_model(opened, parameters)
    names = [value.name or "" for value in model.outputs]

    def compute(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = [inputs[value.name or ""] for value in model.inputs]
        results = keras_model(arrays[0] if len(arrays) == 1 else arrays, training=False)
        return dict(zip(names, map(keras.ops.convert_to_numpy, _as_list(results)), strict=True))

    if probe:
        try_outputs(model, compute, "keras")
    return keras_model


def load_into(target: Any, results: TrainedResults, *, optimizer: Any) -> Any:
    """Assign the variables of a model, and those of its optimizer."""
    # Keras numbers models: a second `sequential/first/kernel` is `sequential_1/first/kernel`.
    own, root = f"{target.name}/", f"{results.model.graph.name}/"
    variables = {
        root + variable.path.removeprefix(own) if variable.path.startswith(own) else variable.path: variable
        for variable in target.variables
    }
    if len(variables) < len(target.variables):
        raise UnsupportedError(f"variables of `{target.name}` have the same path", hint="give its layers unique names")
    chosen = optimizer if optimizer is not None else getattr(target, "optimizer", None)
    load_variables(results, variables, chosen)
    return target


def load_variables(results: TrainedResults, variables: Mapping[str, Any], optimizer: Any) -> None:
    """Assign variables by name, and those of their optimizer."""
    arrays = results.arrays({name: tuple(variable.shape) for name, variable in variables.items()})
    made = None if optimizer is None else _optimizer_of(results, optimizer, variables)
    for name, array in arrays.items():
        variables[name].assign(array)
    if made is not None:
        if not optimizer.built:
            optimizer.build(made._trainable_variables)
        for ours, theirs in zip(optimizer.variables, made.variables, strict=True):
            ours.assign(theirs.value if hasattr(theirs, "value") else theirs)


def _optimizer_of(results: TrainedResults, optimizer: Any, variables: Mapping[str, Any]) -> Any:
    """Return an optimizer of the same class, with the state of the run, for the same variables."""
    run = results.run
    trained = {name: variables[name] for name in variables if name in run.parameters}
    made = make_optimizer(run, trained)
    if row_of(optimizer) is None or made is None or type(made) is not type(optimizer):
        name = "none of Keras's" if made is None else type(made).__name__
        raise UnsupportedError(
            f"the training model has the optimizer {name}, not {type(optimizer).__name__}",
            hint="create the objects with `onward.to_keras(training)`",
        )
    names = {id(variable): name for name, variable in trained.items()}
    rate = read_schedule(optimizer)
    again = dataclasses.replace(
        run,
        groups=groups_of(optimizer, rate.lr, list(trained.values()), names),
        schedule=rate.schedule,
        clip=clip_of(optimizer),
        recipe={**{key: run.recipe[key] for key in run.recipe if key == "seed"}, **recipe_of(optimizer)},
        state={**run.state, **state_of(made, names, list(trained.values()))},
    )
    results.confirm(again)
    return made
