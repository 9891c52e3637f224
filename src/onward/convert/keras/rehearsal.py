"""The same steps on both sides: a copy of the Keras model, and the training model that was made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from onward.convert.keras.losses import Term
from onward.convert.keras.optimizers import array_of, twin_of
from onward.convert.keras.tensors import Tensor
from onward.convert.keras.walk import Walk, functional_of
from onward.convert.probe import TOLERANCE, probe, without_dropout
from onward.convert.snapshot import Snapshot, assemble
from onward.errors import UnsupportedError, first_line

_SAMPLES, _LENGTH, _STEPS = 8, 5, 3
_SHAKE = 1e-6
"""A change in the last digits of float32, as sums of many terms have it."""
_SENSITIVE = TOLERANCE / 20
"""What such a change may lead to in values that are compared."""


class _Step(NamedTuple):
    """What Keras has computed: the loss, and then the weights, but for those that rounding decides about."""

    loss: float
    weights: dict[str, np.ndarray]
    is_certain: bool
    """Whether the loss can be compared."""


def rehearse(run: Snapshot, model: Any, walk: Walk, terms: Sequence[Term]) -> None:
    """Three steps of a copy of `model`, and of the training model; neither original is changed."""
    rng = np.random.default_rng(0)
    batches = [_batch(rng, walk.inputs, terms) for _ in range(_STEPS)]
    places = {walk.names[id(v)]: i for i, v in enumerate(model.variables)}
    names = {name: i for name, i in places.items() if name in run.model.graph.initializers}
    shaken = _copied(model)
    for variable in shaken.trainable_variables:
        array = array_of(variable)
        variable.assign(array * (1 + _SHAKE * rng.uniform(-1, 1, array.shape).astype(array.dtype)))
    pair = [_copied(model), shaken]
    steps: list[_Step] = []
    for batch in batches:
        step = _step(pair, names, *_arguments(batch, model, walk, terms))
        if steps and not step.is_certain:
            break
        steps.append(step)
    trained = assemble(dataclasses.replace(run, model=without_dropout(run.model)))
    losses, weights = (iter([getattr(step, part) for step in steps]) for part in ("loss", "weights"))
    carrier = f"Keras on {keras.backend.backend()}"
    probe(trained, batches[: len(steps)], lambda batch: next(losses), lambda: next(weights), carrier=carrier)


def _step(pair: Sequence[Any], names: dict[str, int], inputs: Any, targets: Any) -> _Step:
    """One step of two copies whose weights differ in the last digits: what differs more afterwards is rounding.

    So it is with a bias before a normalization, whose gradient is zero but for rounding, and which is moved all the
    same by an optimizer that divides by the size of gradients; and with deep networks in which differences grow.
    """
    found = []
    for copy in pair:
        copy.reset_metrics()
        found.append(float(copy.train_on_batch(inputs, targets, return_dict=True)["loss"]))
    weights = {}
    for name, i in names.items():
        array, other = (array_of(copy.variables[i]) for copy in pair)
        limit = _SENSITIVE * max(float(np.abs(array).max(initial=0)), 1e-3)
        if np.abs(array - other).max(initial=0) <= limit:
            weights[name] = array
    return _Step(found[0], weights, abs(found[0] - found[1]) <= _SENSITIVE * abs(found[0]))


def _arguments(batch: dict[str, np.ndarray], model: Any, walk: Walk, terms: Sequence[Term]) -> tuple[Any, Any]:
    """A batch as Keras takes it."""
    inputs = [batch[x.plain.name] for x in walk.inputs]
    targets: list[Any] = [None] * len(walk.outputs)
    for term in terms:
        targets[term.output] = batch[term.target]
    structure = functional_of(model)._outputs_struct
    return inputs[0] if len(inputs) == 1 else inputs, keras.tree.pack_sequence_as(structure, targets)


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


def _copied(model: Any) -> Any:
    """A model of the same layers with the same state, but for dropout."""
    kind = type(model.optimizer)
    with keras.saving.custom_object_scope({kind.__name__: kind}):  # a clone is compiled before we do so
        copy = _cloned(model)
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


def _cloned(model: Any) -> Any:
    own = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Lambda)]
    try:
        return keras.models.clone_model(model, clone_function=_same) if own else keras.models.clone_model(model)
    except (TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"the model cannot be copied, to be tried: {first_line(error)}",
            hint="give its layers a `get_config`, or do without a trial: `probe=False`",
        ) from error


def _same(layer: Any) -> Any:
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


def _copied_optimizer(model: Any, copy: Any) -> Any:
    optimizer = model.optimizer
    made = twin_of(optimizer, zip(model.trainable_variables, copy.trainable_variables, strict=True))
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
