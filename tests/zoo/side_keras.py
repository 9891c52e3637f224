"""Runs of Keras: a compiled model and a batch. Nothing is drawn, as no two frameworks draw the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from unittest import mock

import keras
import numpy as np

import onward
from onward.agreement.steps import without_dropout
from onward.frameworks.keras import capture
from onward.frameworks.keras.optimizer import array_of
from onward.frameworks.keras.probe import TrialRun
from zoo import NUDGES, STEPS, Run, nudged, targets_of


@dataclasses.dataclass
class Objects:
    """What a training loop of Keras has."""

    model: Any
    """Compiled."""
    inputs: Any
    targets: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `from_keras`."""


def run(objects: Objects) -> Run:
    model, finished = objects.model, capture.to_training_model

    def without_random_numbers(run: Any) -> Any:
        return finished(dataclasses.replace(run, model=without_dropout(run.model)))

    with mock.patch.object(capture, "to_training_model", without_random_numbers):
        training = onward.from_keras(model, objects.inputs, example_targets=objects.targets, **objects.options)
    leaves = [x for x in keras.tree.flatten((objects.inputs, objects.targets)) if x is not None]
    inputs = zip(training.inputs, leaves, strict=False)  # targets of a `train_step` are inputs, too
    batch = {value.name: np.asarray(x).astype(value.dtype.numpy()) for value, x in inputs}
    declared = {value.name: value for value in training.step().algorithm.inputs}
    names = targets_of(training)
    targets = keras.tree.flatten(objects.targets) if names else []
    batch |= {name: _fit(x, declared[name]) for name, x in zip(names, targets, strict=True)}
    losses, weights = _steps(objects, training, 0)
    return Run(training, batch, losses, weights, [_steps(objects, training, 1 + seed) for seed in range(NUDGES)])


def _fit(target: Any, declared: Any) -> np.ndarray:
    array, rank = np.asarray(target), len(declared.shape)
    array = array[..., 0] if array.ndim > rank else array[..., None] if array.ndim < rank else array
    return array.astype(declared.dtype.numpy())


def _steps(objects: Objects, training: Any, seed: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return losses and weights of steps that are undone; with a seed, from weights with other last digits."""
    model, initializers = objects.model, training.graph.initializers
    paths = [v.path for v in model.variables]
    with TrialRun(model, paths) as trial:
        if seed:
            arrays = nudged({v.path: array_of(v) for v in model.trainable_variables}, seed)
            for variable in model.trainable_variables:
                variable.assign(arrays[variable.path])
        results = [trial.step(objects.inputs, objects.targets) for _ in range(STEPS)]
    return [x.loss for x in results], {n: x for n, x in results[-1].weights.items() if n in initializers}
