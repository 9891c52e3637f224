"""The model of a program without the program: it holds the same variables, and so is written to the same file.

Nothing of what was written is executed for that.
"""

from __future__ import annotations

from typing import Any

import keras

from onward.engines.keras.values import available
from onward.frameworks.keras.live import GraphOptimizer, TrainingModel
from onward.frameworks.keras.optimizer import twin_of
from onward.frameworks.keras.source import Source


def standing_in(source: Source, live: TrainingModel) -> Any:
    """A compiled model that Keras writes as it would write that of the program, with the state of the live one."""
    made = _model(source)(name=live.name)
    for held in source.model:
        getattr(made, held.attribute).assign(held.array)
    made.compile(optimizer=_optimizer(made, live, source), **live.losses_given)
    return made


def _model(source: Source) -> Any:
    def initialize(self: Any, **options: Any) -> None:
        keras.Model.__init__(self, **options)
        for name, array, trainable in source.model:
            dtype, shape = available(str(array.dtype)), array.shape
            made = self.add_weight(name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=trainable)
            setattr(self, name, made)
        self.built = True

    return _register(source, type(source.class_name, (keras.Model,), {"__init__": initialize}))


def _optimizer(made: Any, live: TrainingModel, source: Source) -> Any:
    given = live.optimizer
    if isinstance(given, GraphOptimizer):
        optimizer = _update(source)(learning_rate=float(given.learning_rate), name="update")
        optimizer.build(made.trainable_variables)
        for held in source.optimizer:
            getattr(optimizer, held.attribute).assign(held.array)
        optimizer.iterations.assign(given.iterations.value)
        return optimizer
    optimizer = twin_of(given, zip(live.trainable_variables, made.trainable_variables, strict=True))
    optimizer.build(made.trainable_variables)
    for ours, theirs in zip(given.variables, optimizer.variables, strict=True):
        theirs.assign(ours.value)
    return optimizer


def _update(source: Source) -> Any:
    def build(self: Any, variables: Any) -> None:
        if not self.built:
            keras.optimizers.Optimizer.build(self, variables)
            for name, array, _ in source.optimizer:
                setattr(self, name, self.add_variable(array.shape, dtype=available(str(array.dtype)), name=name))

    return _register(source, type("Update", (keras.optimizers.Optimizer,), {"build": build}))


def _register(source: Source, made: Any) -> Any:
    return keras.saving.register_keras_serializable(package=source.package)(made)
