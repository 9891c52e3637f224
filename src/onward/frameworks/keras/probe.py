"""The same steps on both sides: a copy of the Keras model, and the training model that was made of it."""

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
from onward.frameworks.keras.loss import Term
from onward.frameworks.keras.optimizer import array_of, copy_optimizer
from onward.run_state.state import RunState
from onward.run_state.training_models import to_training_model

_STEPS = 3


def try_steps(run: RunState, model: Any, graph: LayerGraph, terms: Sequence[Term]) -> None:
    """Three steps of a copy of `model`, and of the training model; neither original is changed."""
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


def _arguments(batch: Arrays, model: Any, graph: LayerGraph, terms: Sequence[Term]) -> tuple[Any, Any]:
    """A batch as Keras takes it."""
    inputs = [batch[x.plain.name] for x in graph.inputs]
    targets: list[Any] = [None] * len(graph.outputs)
    for term in terms:
        targets[term.output] = batch[term.target]
    structure = functional_of(model)._outputs_struct
    return inputs[0] if len(inputs) == 1 else inputs, keras.tree.pack_sequence_as(structure, targets)


def _copy(model: Any) -> Any:
    """A model of the same layers with the same state, but for dropout."""
    kind = type(model.optimizer)
    with keras.saving.custom_object_scope({kind.__name__: kind}):  # a clone is compiled before we do so
        copy = _clone(model)
    for ours, theirs in zip(model.variables, copy.variables, strict=True):
        theirs.assign(ours.value)
    for layer in copy._flatten_layers():
        _without_dropout(layer)
    given = model._compile_loss
    copy.compile(
        optimizer=copy_optimizer(model.optimizer, list(zip(model.variables, copy.variables, strict=True))),
        loss=given._user_loss,
        loss_weights=given._user_loss_weights,
        run_eagerly=True,
    )
    return copy


def _clone(model: Any) -> Any:
    own = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Lambda)]
    try:
        return keras.models.clone_model(model, clone_function=_clone_layer) if own else keras.models.clone_model(model)
    except (TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"the model cannot be copied, to be tried: {first_line(error)}",
            hint="give its layers a `get_config`, or do without a trial: `probe=False`",
        ) from error


def _clone_layer(layer: Any) -> Any:
    """A layer like this. Of functions of Python Keras makes none from their settings, which may be a stranger's."""
    if not isinstance(layer, keras.layers.Lambda):
        return layer.__class__.from_config(layer.get_config())
    return keras.layers.Lambda(layer.function, layer._output_shape, layer.mask, layer.arguments, name=layer.name)


def _without_dropout(layer: Any) -> None:
    kind = type(layer).__name__
    if "Dropout" in kind:
        layer.rate = 0.0
    elif kind == "MultiHeadAttention":
        layer._dropout = 0.0


def _watch_gradients(optimizer: Any) -> list[np.ndarray]:
    """The gradients of the last step. Those of TensorFlow whose repeated rows are not added up, are so from now on."""
    apply = optimizer.apply
    last: list[np.ndarray] = []

    def watched(grads: Any, trainable_variables: Any = None) -> None:
        shapes = [v.shape for v in trainable_variables or optimizer._trainable_variables]
        last[:] = [
            np.zeros(shape, np.float32)
            if g is None
            else keras.ops.convert_to_numpy(g)  # None: the loss does not depend
            for g, shape in zip(grads, shapes, strict=True)
        ]
        dense = [array if hasattr(g, "dense_shape") else g for g, array in zip(grads, last, strict=True)]
        apply(dense, trainable_variables)

    optimizer.apply = watched
    return last
