"""Trial steps of a Keras model, compared with those of its training model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter_utils import pack_x_y_sample_weight

from onward.agreement.inputs import example_inputs, generator
from onward.agreement.steps import StepResult, compare_steps, without_dropout
from onward.agreement.tolerance import Arrays
from onward.frameworks.keras.layer_graph import LayerGraph, functional_of
from onward.frameworks.keras.loss import Summand, by_output
from onward.frameworks.keras.optimizer import array_of, copy_optimizer
from onward.frameworks.keras.traced import as_tensors, drawing, has_own_step
from onward.run_state.state import RunState
from onward.run_state.training_models import to_training_model

_STEPS = 3


def try_steps(
    run: RunState, model: Any, graph: LayerGraph, terms: Sequence[Summand], inputs: Any = None, targets: Any = None
) -> None:
    """Compare three steps of a model with three of its training model; undo those of the model."""
    rng = generator(0)
    own = [x.plain.name for x in graph.inputs]
    examples = by_output(targets, graph)
    if inputs is not None:
        leaves = zip(graph.inputs, keras.tree.flatten(inputs), strict=True)
        batches = [{x.plain.name: np.asarray(leaf).astype(x.dtype) for x, leaf in leaves}] * _STEPS
    else:
        batches = [next(example_inputs(run.model, seed)) for seed in range(_STEPS)]
    samples = len(batches[0][own[0]])
    has_targets = inputs is not None and len(examples) == len(graph.outputs)
    fed = zip(graph.targets, keras.tree.flatten(targets), strict=False)
    steps_targets = {x.plain.name: narrow(np.asarray(array)) for x, array in fed}
    batches = [
        {
            **drawn,
            **steps_targets,
            **{t.target: t.fit(examples[t.output]) if has_targets else t.draw(rng, samples) for t in terms},
        }
        for drawn in batches
    ]
    still = to_training_model(dataclasses.replace(run, model=without_dropout(run.model)))
    with TrialRun(model, [graph.names[id(v)] for v in model.variables]) as trial:

        def step(batch: Arrays) -> StepResult:
            x: Any = inputs if inputs is not None else _inputs(batch, model, graph)
            y = targets if has_targets or graph.updates else _targets(batch, graph, terms)
            return trial.step(x, y)

        compare_steps(still, batches, step, framework=f"Keras on {keras.backend.backend()}")


def narrow(array: np.ndarray) -> np.ndarray:
    """Return an array in the type in which Keras takes it."""
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def _inputs(batch: Arrays, model: Any, graph: LayerGraph) -> Any:
    inputs = [batch[x.plain.name] for x in graph.inputs]
    structure = functional_of(model)._inputs_struct
    return keras.tree.pack_sequence_as(structure, inputs)


def _targets(batch: Arrays, graph: LayerGraph, terms: Sequence[Summand]) -> Any:
    targets: list[Any] = [None] * len(graph.outputs)
    for term in terms:
        targets[term.output] = batch[term.target]
    return keras.tree.pack_sequence_as(graph.structure, targets)


class TrialRun:
    """Steps of a Keras model without random numbers, which it forgets at the end."""

    def __init__(self, model: Any, names: Sequence[str]):
        self._model = model
        self._names = names

    def __enter__(self) -> TrialRun:
        model = self._model
        metrics = [v for metric in model.metrics for v in metric.variables]
        self._before = [(v, array_of(v)) for v in {id(v): v for v in (*model.variables, *metrics)}.values()]
        self._optimizer, self._settings = model.optimizer, (model.run_eagerly, model.jit_compile)
        model.optimizer = copy_optimizer(model.optimizer, [(v, v) for v in model.variables])
        self._gradients = _watch_gradients(model.optimizer)
        # As graphs, TensorFlow's loops over time are many times as fast. A compiler would take longer than the steps.
        is_eager = model.run_eagerly or keras.backend.backend() != "tensorflow"
        model.run_eagerly, model.jit_compile, model.train_function = is_eager, False, None
        self._nothing_drawn = nothing_drawn()
        self._nothing_drawn.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._nothing_drawn.__exit__(*error)
        model = self._model
        model.optimizer, model.train_function = self._optimizer, None
        model.run_eagerly, model.jit_compile = self._settings
        for variable, array in self._before:
            variable.assign(array)

    def step(self, x: Any, y: Any) -> StepResult:
        model = self._model
        model.reset_metrics()
        losses: list[Any] = []
        if has_own_step(model):
            with _losses_in(losses):
                model.train_step(as_tensors(pack_x_y_sample_weight(x, y)))
        else:
            losses.append(model.train_on_batch(x, y, return_dict=True)["loss"])
        weights = dict(zip(self._names, map(array_of, model.variables), strict=True))
        named = dict(zip(map(id, model.variables), self._names, strict=True))
        trained = [named[id(v)] for v in model.optimizer._trainable_variables]
        gradients = (
            dict(zip(trained, map(keras.ops.convert_to_numpy, self._gradients), strict=True)) if self._gradients else {}
        )
        return StepResult(float(losses[0]), gradients, weights)


@contextlib.contextmanager
def _losses_in(losses: list[Any]) -> Iterator[None]:
    """Add what is differentiated by variables to `losses`."""
    import tensorflow as tf

    differentiate = tf.GradientTape.gradient

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **named: Any) -> Any:
        if all(isinstance(x, keras.Variable | tf.Variable) for x in keras.tree.flatten(sources)):
            losses.append(sum(float(tf.reduce_sum(x)) for x in keras.tree.flatten(target)))
        return differentiate(tape, target, sources, *args, **named)

    with mock.patch.object(tf.GradientTape, "gradient", gradient):
        yield


def nothing_drawn() -> contextlib.AbstractContextManager[None]:
    """Replace random numbers of Keras by their mean, and let dropout drop nothing."""
    means = {"RandomUniformLike": 0.5, "RandomNormalLike": 0.0, "Dropout": 1.0}
    return drawing(lambda _, operator, shape, dtype, *__: keras.ops.full(shape, means[operator], dtype))


def _watch_gradients(optimizer: Any) -> list[Any]:
    """Return a list that `optimizer.apply` fills with the gradients of each step, made dense."""
    apply = optimizer.apply
    last: list[Any] = []

    def watched(grads: Any, trainable_variables: Any = None) -> None:
        variables, dense = trainable_variables or optimizer._trainable_variables, list(grads)
        is_symbolic = False
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            # An Embedding has sparse gradients in which rows repeat; the dense form sums them.
            dense = [None if g is None else tf.convert_to_tensor(g) for g in grads]
            is_symbolic = not tf.executing_eagerly()
            if is_symbolic:
                with tf.init_scope():
                    last[:] = last or [tf.Variable(np.zeros(v.shape, np.float32)) for v in variables]
        if not is_symbolic:
            last[:] = [np.zeros(v.shape, np.float32) for v in variables]
        for i, g in enumerate(dense):  # None: the loss does not depend on the variable
            if g is not None and is_symbolic:
                last[i].assign(g)
            elif g is not None:
                last[i] = keras.ops.convert_to_numpy(g)
        apply(dense, trainable_variables)

    optimizer.apply = watched
    return last
