"""Models with their own `train_step` or `compute_loss`, traced: each gradient that an optimizer applies is a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.data_adapters.data_adapter_utils import pack_x_y_sample_weight

from onward.frameworks.keras.layers import LayerTensor
from onward.frameworks.keras.optimizer import array_of
from onward.vocabulary.keras import Refused


def has_own_step(model: Any) -> bool:
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in ("train_step", "compute_loss"))


@dataclasses.dataclass(frozen=True)
class Update:
    """Update of variables by an optimizer, with the gradients of a loss."""

    optimizer: Any
    variables: Sequence[Any]
    loss: int
    """Index among the losses of the step."""


class TracedStep:
    """A `train_step`, as a function from a batch to the losses that it differentiates."""

    has_modes = False

    def __init__(self, model: Any, x: Any, y: Any):
        if keras.backend.backend() != "tensorflow":
            raise Refused("has a `train_step` of its own, which is traced on TensorFlow")
        self.operation = model
        self._data = x, y
        self.tensors = [t for t in keras.tree.flatten(self._data) if isinstance(t, LayerTensor)]
        self.updates: list[Update] = []
        self.count = 0

    def __call__(self, tensors: Sequence[Any], training: bool) -> list[Any]:
        import tensorflow as tf

        rest = iter(tensors)
        x, y = keras.tree.map_structure(lambda t: next(rest) if isinstance(t, LayerTensor) else t, self._data)
        with recorded(lambda tensor: tf.zeros(tensor.shape, tensor.dtype)) as records:
            self.operation.train_step(pack_x_y_sample_weight(x, y))
        self.updates = records.updates
        self._refuse_stale(records)
        self.count = len(records.losses)
        return list(records.losses)

    def _refuse_stale(self, records: Records) -> None:
        """Refuse a loss that was computed before an update that changes its weights."""
        for number, update in enumerate(records.updates):
            changed = {id(v.value.handle) for earlier in records.updates[:number] for v in earlier.variables}
            since = records.positions[number - 1] if number else 0
            loss = records.losses[update.loss]
            order = {operation: i for i, operation in enumerate(loss.graph.get_operations())}
            captured = {id(inner): id(outer) for outer, inner in loss.graph.captures}
            pending, seen = [loss.op], set()
            while pending:
                operation = pending.pop()
                if operation in seen:
                    continue
                seen.add(operation)
                pending += [t.op for t in operation.inputs]
                if order[operation] < since and any(captured.get(id(t)) in changed for t in operation.inputs):
                    raise Refused("computes a loss before an update that changes its weights")


@dataclasses.dataclass
class Records:
    """What a `train_step` differentiated and applied."""

    losses: list[Any] = dataclasses.field(default_factory=list)
    updates: list[Update] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    """Numbers of operations of the graph before each update."""


@contextlib.contextmanager
def recorded(placeholder: Callable[[Any], Any]) -> Iterator[Records]:
    """Record losses and updates instead of making them. Metrics are not computed."""
    import tensorflow as tf

    records = Records()
    owners: dict[int, tuple[int, Any, Any]] = {}  # by the id of a gradient: loss, variable, and the gradient itself
    differentiate = tf.GradientTape.gradient

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **named: Any) -> Any:
        flat = keras.tree.flatten(sources)
        if not all(isinstance(x, keras.Variable | tf.Variable) for x in flat):
            return differentiate(tape, target, sources, *args, **named)
        loss = tf.add_n([tf.reduce_sum(x) for x in keras.tree.flatten(target)])
        records.losses.append(loss)
        results = [placeholder(x) for x in flat]
        for result, variable in zip(results, flat, strict=True):
            owners[id(result)] = len(records.losses) - 1, variable, result
        return keras.tree.pack_sequence_as(sources, results)

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(trainable_variables or optimizer._trainable_variables)
        pairs = [(owners.get(id(g)), v) for g, v in zip(grads, variables, strict=True) if g is not None]
        indices = {owner[0] for owner, _ in pairs if owner is not None}
        if len(indices) != 1 or any(owner is None or owner[1] is not v for owner, v in pairs):
            raise Refused("changes gradients before an optimizer applies them")
        if any(update.optimizer is optimizer for update in records.updates):
            raise Refused("applies an optimizer more than once")
        records.updates.append(Update(optimizer, variables, indices.pop()))
        graph = getattr(records.losses[-1], "graph", None)
        records.positions.append(0 if graph is None else len(graph.get_operations()))

    with (
        mock.patch.object(tf.GradientTape, "gradient", gradient),
        mock.patch.object(BaseOptimizer, "apply", apply),
        mock.patch.object(keras.src.trainers.trainer.Trainer, "compute_metrics", lambda *_, **__: {}),
        _without_metrics(),
    ):
        yield records
    if not records.updates:
        raise Refused("applies no gradients of `tf.GradientTape`")


@contextlib.contextmanager
def _without_metrics() -> Iterator[None]:
    classes, pending = [], [keras.metrics.Metric]
    while pending:
        classes.append(pending.pop())
        pending += classes[-1].__subclasses__()
    with contextlib.ExitStack() as stack:
        for each in classes:
            for name, replacement in (("update_state", lambda *_, **__: None), ("result", lambda *_, **__: 0.0)):
                if name in vars(each):
                    stack.enter_context(mock.patch.object(each, name, replacement))
        yield


def as_tensors(data: Any) -> Any:
    """Return data as `fit` feeds them: Python's floats are of the default type."""

    def tensor(x: Any) -> Any:
        array = np.asarray(x)
        return keras.ops.convert_to_tensor(array.astype(keras.config.floatx()) if array.dtype == np.float64 else array)

    return keras.tree.map_structure(lambda x: None if x is None else tensor(x), data)


def build(model: Any, x: Any, y: Any) -> None:
    """Run a `train_step` without updates, which creates variables; undo its changes of state."""
    before = {id(v): array_of(v) for v in model.variables}
    with recorded(lambda v: keras.ops.zeros(v.shape, v.dtype)):
        model.train_step(as_tensors(pack_x_y_sample_weight(x, y)))
    for variable in model.variables:
        if id(variable) in before:
            variable.assign(before[id(variable)])
        elif not variable.trainable and callable(initial := getattr(variable, "_initializer", None)):
            variable.assign(np.asarray(initial(variable.shape, dtype=variable.dtype)))
