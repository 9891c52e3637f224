"""Trial steps of a copy of a Keras model, compared with those of its training model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from onward.agreement.inputs import example_inputs, generator
from onward.agreement.steps import StepResult, compare_steps, without_dropout
from onward.agreement.tolerance import Arrays
from onward.errors import UnsupportedError, first_line
from onward.frameworks.keras.layer_graph import LayerGraph, functional_of
from onward.frameworks.keras.loss import Summand
from onward.frameworks.keras.optimizer import array_of, copy_optimizer
from onward.run_state.state import RunState
from onward.run_state.training_models import to_training_model

_STEPS = 3


def try_steps(run: RunState, model: Any, graph: LayerGraph, terms: Sequence[Summand]) -> None:
    """Compare three steps of a copy of `model` with three of its training model."""
    rng = generator(0)
    inputs = [next(example_inputs(run.model, seed)) for seed in range(_STEPS)]
    samples = len(inputs[0][graph.inputs[0].plain.name])
    batches = [{**drawn, **{term.target: term.draw(rng, samples) for term in terms}} for drawn in inputs]
    copy = _copy(model)
    names = [graph.names[id(v)] for v in model.variables]
    trained = [graph.names[id(v)] for v in model.trainable_variables]
    gradients = _watch_gradients(copy.optimizer)

    def step(batch: Arrays) -> StepResult:
        copy.reset_metrics()
        loss = copy.train_on_batch(*_arguments(batch, model, graph, terms), return_dict=True)["loss"]
        weights = dict(zip(names, map(array_of, copy.variables), strict=True))
        return StepResult(float(loss), dict(zip(trained, gradients, strict=True)), weights)

    still = to_training_model(dataclasses.replace(run, model=without_dropout(run.model)))
    compare_steps(still, batches, step, framework=f"Keras on {keras.backend.backend()}")


def _arguments(batch: Arrays, model: Any, graph: LayerGraph, terms: Sequence[Summand]) -> tuple[Any, Any]:
    inputs = [batch[x.plain.name] for x in graph.inputs]
    targets: list[Any] = [None] * len(graph.outputs)
    for term in terms:
        targets[term.output] = batch[term.target]
    structure = functional_of(model)._outputs_struct
    return inputs[0] if len(inputs) == 1 else inputs, keras.tree.pack_sequence_as(structure, targets)


def _copy(model: Any) -> Any:
    """Return a compiled copy of a model with the same state, without dropout."""
    optimizer_class = type(model.optimizer)
    # Compiling the clone looks up the class of the optimizer by its name.
    with keras.saving.custom_object_scope({optimizer_class.__name__: optimizer_class}):
        copy = _clone(model)
    for ours, theirs in zip(model.variables, copy.variables, strict=True):
        theirs.assign(ours.value)
    for layer in copy._flatten_layers():
        if "Dropout" in type(layer).__name__:
            layer.rate = 0.0
        elif type(layer).__name__ == "MultiHeadAttention":
            layer._dropout = 0.0
    compiled_loss = model._compile_loss
    copy.compile(
        optimizer=copy_optimizer(model.optimizer, list(zip(model.variables, copy.variables, strict=True))),
        loss=compiled_loss._user_loss,
        loss_weights=compiled_loss._user_loss_weights,
        run_eagerly=True,
    )
    return copy


def _clone(model: Any) -> Any:
    has_lambdas = any(isinstance(layer, keras.layers.Lambda) for layer in model._flatten_layers())
    try:
        return keras.models.clone_model(model, clone_function=_clone_layer if has_lambdas else None)
    except (TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"the model cannot be copied for a trial: {first_line(error)}",
            hint="give its layers a `get_config`, or leave out the trial: `probe=False`",
        ) from error


def _clone_layer(layer: Any) -> Any:
    # Keras refuses to deserialize Python functions, so a Lambda gets its function directly.
    if not isinstance(layer, keras.layers.Lambda):
        return layer.__class__.from_config(layer.get_config())
    return keras.layers.Lambda(layer.function, layer._output_shape, layer.mask, layer.arguments, name=layer.name)


def _watch_gradients(optimizer: Any) -> list[np.ndarray]:
    """Return a list that `optimizer.apply` fills with the gradients of each step, made dense."""
    apply = optimizer.apply
    last: list[np.ndarray] = []

    def watched(grads: Any, trainable_variables: Any = None) -> None:
        shapes = [v.shape for v in trainable_variables or optimizer._trainable_variables]
        last[:] = [  # None: the loss does not depend on the variable
            np.zeros(shape, np.float32) if g is None else keras.ops.convert_to_numpy(g)
            for g, shape in zip(grads, shapes, strict=True)
        ]
        # On TensorFlow, an Embedding has sparse gradients in which rows repeat; the dense form sums them.
        dense = [array if hasattr(g, "dense_shape") else g for g, array in zip(grads, last, strict=True)]
        apply(dense, trainable_variables)

    optimizer.apply = watched
    return last
