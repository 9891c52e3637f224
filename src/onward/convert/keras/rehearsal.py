"""The same steps on both sides: a copy of the Keras model, and the training model that was made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from onward.convert.keras.losses import Term
from onward.convert.keras.optimizers import array_of
from onward.convert.keras.tensors import Tensor
from onward.convert.keras.walk import Walk, functional_of
from onward.convert.probe import probe, without_dropout
from onward.convert.run import Run, assemble
from onward.model import Model
from onward.run import load
from onward.run.engine import Arrays

_SAMPLES, _LENGTH, _STEPS = 4, 5, 3
_ROUNDING = 1e-5
"""Of the largest gradient: what a difference of numbers of that size may leave over in float32."""


def rehearse(run: Run, model: Any, walk: Walk, terms: Sequence[Term]) -> None:
    """Three steps of a copy of `model`, and of the training model; neither original is changed."""
    copy = _copied(model)
    names = {id(theirs): walk.names[id(ours)] for ours, theirs in zip(model.variables, copy.variables, strict=True)}

    def step(batch: Arrays) -> float:
        copy.reset_metrics()
        inputs = [batch[x.plain.name] for x in walk.inputs]
        targets: list[Any] = [None] * len(walk.outputs)
        for term in terms:
            targets[term.output] = batch[term.target]
        logs = copy.train_on_batch(_alone(inputs), _targets(model, targets), return_dict=True)
        return float(logs["loss"])

    rng = np.random.default_rng(0)
    batches = [_batch(rng, walk.inputs, terms) for _ in range(_STEPS)]
    trained = assemble(dataclasses.replace(run, model=without_dropout(run.model)))
    undetermined = _undetermined(trained, batches[0])
    # Statistics follow such parameters wherever they go.
    compared = set(run.parameters if undetermined else run.model.graph.initializers) - undetermined

    def weights() -> dict[str, np.ndarray]:
        return {names[id(v)]: array_of(v) for v in copy.variables if names[id(v)] in compared}

    probe(trained, batches, step, weights, carrier=f"Keras on {keras.backend.backend()}")


def _undetermined(trained: Model, batch: dict[str, np.ndarray]) -> set[str]:
    """Parameters whose gradient is nothing but rounding, such as a bias before a normalization.

    An optimizer that divides by the size of gradients makes real steps of it, in any direction.
    """
    with load(trained, threads=1) as engine:
        sizes = {name: float(np.abs(g).max(initial=0)) for name, g in engine.gradients(batch).items()}
    return {name for name, size in sizes.items() if size < _ROUNDING * max(sizes.values())}


def _batch(rng: np.random.Generator, inputs: Sequence[Tensor], terms: Sequence[Term]) -> dict[str, np.ndarray]:
    drawn = {x.plain.name: _drawn(rng, x) for x in inputs}
    return drawn | {term.target: term.draw(rng, _SAMPLES) for term in terms}


def _drawn(rng: np.random.Generator, x: Tensor) -> np.ndarray:
    shape = [_SAMPLES, *(size or _LENGTH for size in x.shape[1:])]
    assert x.plain.dtype is not None
    dtype = x.plain.dtype.numpy()
    if x.below is not None or dtype.kind in "iub":
        return rng.integers(0, x.below or 2, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def _alone(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _targets(model: Any, targets: list[Any]) -> Any:
    return keras.tree.pack_sequence_as(functional_of(model)._outputs_struct, targets)


def _copied(model: Any) -> Any:
    """A model of the same layers with the same state, but for dropout."""
    copy = keras.models.clone_model(model)
    for ours, theirs in zip(model.variables, copy.variables, strict=True):
        theirs.assign(ours.value)
    for layer in copy._flatten_layers():
        _without_dropout(layer)
    given = model._compile_loss
    copy.compile(
        optimizer=_copied_optimizer(model, copy),
        loss=given._user_loss,
        loss_weights=given._user_loss_weights,
        run_eagerly=True,
    )
    return copy


def _without_dropout(layer: Any) -> None:
    kind = type(layer).__name__
    if "Dropout" in kind:
        layer.rate = 0.0
    elif kind == "MultiHeadAttention":
        layer._dropout = 0.0


def _copied_optimizer(model: Any, copy: Any) -> Any:
    optimizer = model.optimizer
    made = type(optimizer).from_config(optimizer.get_config())
    pairs = list(zip(model.trainable_variables, copy.trainable_variables, strict=True))
    spared = [theirs for ours, theirs in pairs if not optimizer._use_weight_decay(ours)]
    if spared:
        made.exclude_from_weight_decay(var_list=spared)
    _with_dense_gradients(made)
    if not optimizer.built:
        return made
    twin = {id(ours): theirs for ours, theirs in zip(model.variables, copy.variables, strict=True)}
    made.build([twin[id(v)] for v in optimizer._trainable_variables])
    for ours, theirs in zip(optimizer.variables, made.variables, strict=True):
        theirs.assign(ours.value)
    return made


def _with_dense_gradients(optimizer: Any) -> None:
    """Let an optimizer see gradients whose repeated rows are added up, which those of TensorFlow are not."""
    apply = optimizer.apply

    def dense(grads: Any, trainable_variables: Any = None) -> None:
        apply([keras.ops.convert_to_numpy(g) if hasattr(g, "dense_shape") else g for g in grads], trainable_variables)

    optimizer.apply = dense
