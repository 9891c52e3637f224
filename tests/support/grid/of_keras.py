"""Keras in the grid, on TensorFlow."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

from grid.record import Outcome
from grid.side import BEFORE, HIDDEN, INPUTS, OUTPUTS, Arrays, Data, goes_on, in_words
from onward.frameworks.keras import from_keras, to_keras
from onward.frameworks.keras.forward import GraphOptimizer
from onward.model import Model

OPTIMIZERS = [
    *("SGD()", "SGD(weight_decay=0.1)", "SGD(momentum=0.9)", "SGD(momentum=0.9, nesterov=True)"),
    *("SGD(momentum=0.9, weight_decay=0.1)", "SGD(clipnorm=0.1)", "SGD(use_ema=True)", "SGD(loss_scale_factor=2)"),
    *("Adam(epsilon=1e-3)", "Adam(amsgrad=True, epsilon=1e-3)", "Adam(weight_decay=0.1)", "AdamW(epsilon=1e-3)"),
    "Adam(gradient_accumulation_steps=2, learning_rate=0.02)",
    *("Adagrad(initial_accumulator_value=1e-6)", "Adadelta()", "Adadelta(weight_decay=0.1)", "Adamax()", "Nadam()"),
    *("RMSprop(epsilon=1e-3)", "RMSprop(momentum=0.9, weight_decay=0.1)", "RMSprop(centered=True)"),
    *("Lion(weight_decay=0.1)", "Lamb()", "Lamb(weight_decay=0.1)"),
    *("Adafactor()", "Ftrl()", "Muon()", "ScheduleFreeAdamW()", "LossScaleOptimizer(SGD())"),
    *("MultiOptimizer(OptimizerMap(SGD(), {'out/.*': Adam()}))", "Own()"),
]
RATES = {"Adadelta": 1.0, "Lion": 2e-3}

SCHEDULES = [
    *("ExponentialDecay(0.1, 4, 0.7)", "ExponentialDecay(0.1, 4, 0.7, staircase=True)"),
    *("PiecewiseConstantDecay([4, 7], [0.1, 0.05, 0.025])", "PiecewiseConstantDecay([4, 7], [0.1, 0.02, 0.05])"),
    *("PolynomialDecay(0.1, 8, 0.01, 2.0)", "PolynomialDecay(0.1, 8, cycle=True)"),
    *("CosineDecay(0.1, 8, 0.1)", "CosineDecay(0.01, 6, 0.1, warmup_target=0.1, warmup_steps=4)"),
    *(
        "CosineDecayRestarts(0.1, 4)",
        "CosineDecayRestarts(0.1, 4, m_mul=0.5)",
        "InverseTimeDecay(0.1, 4, 0.5)",
        "Own()",
    ),
]

LOSSES = {
    "SparseCategoricalCrossentropy(from_logits=True)": Data(None, ("labels",)),
    "SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)": Data(None, ("labels",)),
    "SparseCategoricalCrossentropy()": Data("Softmax", ("labels",)),
    "CategoricalCrossentropy(from_logits=True)": Data(None, ("one_hot",)),
    "CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)": Data(None, ("one_hot",)),
    "CategoricalCrossentropy(label_smoothing=0.1)": Data("Softplus", ("one_hot",)),
    "BinaryCrossentropy(from_logits=True)": Data(None, ("binary",)),
    "BinaryCrossentropy()": Data("Sigmoid", ("binary",)),
    "BinaryCrossentropy(label_smoothing=0.1)": Data("Sigmoid", ("binary",)),
    "MeanSquaredError()": Data(),
    "MeanSquaredError(reduction='sum')": Data(),
    "MeanSquaredError(reduction=None)": Data(),
    "MeanAbsoluteError()": Data(),
    "Huber(0.3)": Data(),
    "LogCosh()": Data(),
    "MeanAbsolutePercentageError()": Data(None, ("positive",)),
    "MeanSquaredLogarithmicError()": Data("Softplus", ("positive",)),
    "KLDivergence()": Data("Softmax", ("shares",)),
    "Poisson()": Data("Softplus", ("positive",)),
    "CosineSimilarity()": Data(),
    "Hinge()": Data(None, ("binary",)),
    "SquaredHinge()": Data(None, ("binary",)),
    "CategoricalHinge()": Data(None, ("one_hot",)),
    "CTC()": Data(None, ("one_hot",)),
    **dict.fromkeys(("BinaryFocalCrossentropy()", "Dice()", "Tversky()"), Data("Sigmoid", ("binary",))),
    "CategoricalFocalCrossentropy()": Data("Softmax", ("one_hot",)),
    "CategoricalGeneralizedCrossEntropy()": Data("Softmax", ("labels",)),
    "Circle()": Data(None, ("labels",)),
}
_ABSTRACT = {"Optimizer", "Loss", "LearningRateSchedule", "OptimizerMap"}
"""`OptimizerMap` is a part of MultiOptimizer."""


class OwnOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """What a user may have written: steps along the sign of the gradient."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    def __call__(self, step: Any) -> Any:
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


def public(kind: str) -> set[str]:
    found = vars(_HOMES[kind])
    return {name for name, value in found.items() if inspect.isclass(value)} - _ABSTRACT


_HOMES = {"optimizers": keras.optimizers, "losses": keras.losses, "schedules": keras.optimizers.schedules}


def rows(kind: str) -> Sequence[str]:
    return {"optimizers": OPTIMIZERS, "losses": list(LOSSES), "schedules": SCHEDULES}[kind]


# ---- from Keras ------------------------------------------------------------------------------------------------------


def read(kind: str, row: str) -> Outcome:
    data = LOSSES[row] if kind == "losses" else Data()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((INPUTS,), name="x"),
            layers.Dense(HIDDEN, "tanh", name="hidden"),
            layers.Dense(OUTPUTS, data.last and data.last.lower(), name="out"),
        ],
        name="network",
    )
    rate = eval(row, {**vars(keras.optimizers.schedules), "Own": OwnSchedule}) if kind == "schedules" else 0.02
    optimizer = eval(row, _optimizers()) if kind == "optimizers" else keras.optimizers.SGD(rate, momentum=0.9)
    loss = eval(row, dict(vars(keras.losses))) if kind == "losses" else "mse"
    model.compile(optimizer, loss)

    def step(batch: list[np.ndarray]) -> float:
        model.reset_metrics()
        return float(model.train_on_batch(*batch, return_dict=True)["loss"])

    return in_words(
        kind, goes_on(step, lambda: from_keras(model, probe=False), data, 0 if kind == "losses" else BEFORE)
    )


def _optimizers() -> dict[str, Any]:
    classes = {name: getattr(keras.optimizers, name) for name in public("optimizers")} | {"Own": OwnOptimizer}
    whole = {name: classes.pop(name) for name in ("LossScaleOptimizer", "MultiOptimizer")}
    rates = {name: keras.optimizers.schedules.ExponentialDecay(RATES.get(name, 0.02), 1, 0.9) for name in classes}
    made = {name: functools.partial(kind, learning_rate=rates[name]) for name, kind in classes.items()}
    return {**made, **whole, "OptimizerMap": keras.optimizers.OptimizerMap}


# ---- to Keras --------------------------------------------------------------------------------------------------------


def make(kind: str, training: Model, batches: Iterable[Arrays]) -> tuple[Outcome, list[float]]:
    model = to_keras(training)
    losses = []
    for batch in batches:
        x, *targets = batch.values()
        model.reset_metrics()
        losses.append(float(model.train_on_batch(x, targets[0] if len(targets) == 1 else targets)))
    return _outcome(kind, model), losses


def _outcome(kind: str, model: Any) -> Outcome:
    if kind == "losses":
        return Outcome("native", f"`{type(model.loss).__name__}`") if model.loss is not None else Outcome("exact")
    if isinstance(model.optimizer, GraphOptimizer):
        return Outcome("exact")
    rate = model.optimizer._learning_rate
    made = model.optimizer if kind == "optimizers" else None if hasattr(rate, "numpy") else rate
    return Outcome("native", f"`{type(made).__name__}`" if made is not None else "")
