"""Every optimizer, schedule and loss of Keras that has a counterpart: the losses go on as Keras's do."""

from __future__ import annotations

import numpy as np
import pytest
from marks import needs

keras = pytest.importorskip("keras")
from keras_runs import agree, batches, binary, goes_on, mlp, one_hot, positive, real, step, whole  # noqa: E402

from onward.errors import UnsupportedError  # noqa: E402
from onward.frameworks.keras import from_keras  # noqa: E402

pytestmark = [needs("keras"), needs("tensorflow")]

optimizers, losses, schedules = keras.optimizers, keras.losses, keras.optimizers.schedules

OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.05),
    "SGD, decay": lambda: optimizers.SGD(0.05, weight_decay=0.1),
    "SGD, momentum": lambda: optimizers.SGD(0.05, momentum=0.8),
    "SGD, Nesterov": lambda: optimizers.SGD(0.05, momentum=0.8, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01, epsilon=1e-3),
    "Adam, amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "Adam, decay": lambda: optimizers.Adam(0.01, weight_decay=0.1),
    "AdamW": lambda: optimizers.AdamW(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.05, initial_accumulator_value=1e-6),
    "Adadelta": lambda: optimizers.Adadelta(0.5),
    "Adamax": lambda: optimizers.Adamax(0.02),
    "Nadam": lambda: optimizers.Nadam(0.02),
    "RMSprop": lambda: optimizers.RMSprop(0.02),
    "RMSprop, momentum": lambda: optimizers.RMSprop(0.02, momentum=0.9, weight_decay=0.1),
    "RMSprop, centered": lambda: optimizers.RMSprop(0.02, momentum=0.9, centered=True),
    "Lion": lambda: optimizers.Lion(0.002, weight_decay=0.1),
    "Lamb": lambda: optimizers.Lamb(0.02, weight_decay=0.1),
    "clipnorm": lambda: optimizers.SGD(0.05, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.Adam(0.05, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.05, clipvalue=0.05),
    "use_ema": lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=3),
}


@pytest.mark.slow("Nadam")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    goes_on(mlp(OPTIMIZERS[name]()), steps=7, probe="," not in name)  # a class is tried once in the conversion, too


def test_averages_of_weights_go_on():
    run = mlp(optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9))
    with pytest.raises(UnsupportedError, match="no step was made"):
        from_keras(run.model)
    training = goes_on(run, before=3, steps=0)
    average = run.model.optimizer._model_variables_moving_average[0].numpy()
    np.testing.assert_array_equal(training.initializer("ema/mlp/hidden/kernel").const_value.numpy(), average)


def test_an_optimizer_that_has_not_begun():
    goes_on(mlp(optimizers.Adagrad(0.05)), before=0)


SCHEDULES = {
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.1, 4, 0.7),
    "staircase": lambda: schedules.ExponentialDecay(0.1, 4, 0.7, staircase=True),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([6, 9], [0.1, 0.02, 0.05]),
    "PiecewiseConstantDecay, even": lambda: schedules.PiecewiseConstantDecay([6, 9], [0.1, 0.05, 0.025]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.1, 12, 0.01, 2.0),
    "CosineDecay": lambda: schedules.CosineDecay(0.1, 12, 0.1),
    "warm-up": lambda: schedules.CosineDecay(0.01, 8, 0.1, warmup_target=0.1, warmup_steps=7),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.1, 4, t_mul=2.0, m_mul=1.0, alpha=0.1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    """With momentum, in which Keras keeps the rate of each step."""
    goes_on(mlp(optimizers.SGD(SCHEDULES[name](), momentum=0.9)), before=5, steps=10, probe=False)


class WarmUp(schedules.LearningRateSchedule):
    """A schedule without `get_config`."""

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        return 0.1 * keras.ops.where(step < 7, step / 7, keras.ops.cos((step - 7) / 10))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda: schedules.InverseTimeDecay(0.1, 5, 0.5),
        lambda: schedules.PolynomialDecay(0.1, 5, cycle=True),
        lambda: schedules.CosineDecayRestarts(0.1, 5, m_mul=0.5),
        WarmUp,
    ],
)
def test_other_schedules_are_traced_with_the_optimizer(schedule):
    goes_on(mlp(optimizers.AdamW(schedule(), clipnorm=0.5)), before=5, steps=10)


LOSSES = {
    "mse": ("mse", None, real(3)),
    "mae": ("mae", None, real(3)),
    "Huber": (losses.Huber(0.5), None, real(3)),
    "mape": ("mape", None, positive(3)),
    "msle": ("msle", "softplus", positive(3)),
    "LogCosh": (losses.LogCosh(), None, real(3)),
    "KLDivergence": (losses.KLDivergence(), "softmax", one_hot(3)),
    "poisson": ("poisson", "softplus", positive(3)),
    "CosineSimilarity": (losses.CosineSimilarity(), None, positive(3)),
    "hinge": ("hinge", None, binary(3)),
    "squared_hinge": ("squared_hinge", None, binary(3)),
    "categorical_hinge": ("categorical_hinge", None, one_hot(3)),
    "categorical, softmax": ("categorical_crossentropy", "softmax", one_hot(3)),
    "categorical, smoothed": (
        losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        None,
        one_hot(3),
    ),
    "categorical, probabilities": (losses.CategoricalCrossentropy(label_smoothing=0.1), "softplus", one_hot(3)),
    "sparse, logits": (losses.SparseCategoricalCrossentropy(from_logits=True), None, whole(3)),
    "sparse, probabilities": ("sparse_categorical_crossentropy", "softplus", whole(3)),
    "sparse, ignored": (losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0), None, whole(3)),
    "binary, logits": (losses.BinaryCrossentropy(from_logits=True), None, binary(3)),
    "binary, sigmoid": ("binary_crossentropy", "sigmoid", binary(3)),
    "binary, probabilities": ("binary_crossentropy", "hard_sigmoid", binary(3)),
    "binary, smoothed": (losses.BinaryCrossentropy(label_smoothing=0.2), "sigmoid", binary(3)),
    "focal": (losses.BinaryFocalCrossentropy(apply_class_balancing=True), "sigmoid", binary(3)),
    "focal, logits": (losses.BinaryFocalCrossentropy(from_logits=True, label_smoothing=0.1), None, binary(3)),
    "focal, probabilities": (losses.BinaryFocalCrossentropy(gamma=3.0), "hard_sigmoid", binary(3)),
    "focal classes": (losses.CategoricalFocalCrossentropy(label_smoothing=0.1), "softmax", one_hot(3)),
    "focal classes, logits": (losses.CategoricalFocalCrossentropy(from_logits=True), None, one_hot(3)),
    "Dice": (losses.Dice(), "sigmoid", binary(3)),
    "Tversky": (losses.Tversky(alpha=0.3, beta=0.7), "sigmoid", binary(3)),
    "generalized": (losses.CategoricalGeneralizedCrossEntropy(q=0.3), "softmax", whole(3)),
    "focal, sum": (losses.BinaryFocalCrossentropy(reduction="sum"), "sigmoid", binary(3)),
    "mse, sum": (losses.MeanSquaredError(reduction="sum"), None, real(3)),
    "binary, sum": (losses.BinaryCrossentropy(from_logits=True, reduction="sum"), None, binary(3)),
    "LogCosh, sum": (losses.LogCosh(reduction="sum"), None, real(3)),
    "sparse, sum": (losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"), None, whole(3)),
}


TRIED = {"mse", "sparse, logits", "binary, smoothed", "focal, sum"}
"""Of each kind of target one that is also tried in the conversion, which takes as long as all the rest."""


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    loss, last, target = LOSSES[name]
    goes_on(mlp(optimizers.SGD(0.02), loss, target=target, last=last), probe=name in TRIED)


@pytest.mark.parametrize(
    ("loss", "last", "target", "size"),
    [
        ("binary_crossentropy", "sigmoid", binary(3), 100.0),
        ("sparse_categorical_crossentropy", "softmax", whole(3), 100.0),
        ("binary_crossentropy", "exponential", binary(3), 10.0),
        ("categorical_crossentropy", "exponential", one_hot(3), 10.0),
    ],
)
def test_saturated_probabilities(loss, last, target, size):
    """On TensorFlow Keras looks behind a softmax or sigmoid; else it clips, and gradients vanish."""
    run = mlp(optimizers.SGD(1e-3), loss, target=target, last=last)
    out = run.model.get_layer("out")
    out.kernel.assign(out.kernel * size)
    goes_on(run, before=0)


def test_a_reduction_that_leaves_a_vector_is_refused():
    with pytest.raises(UnsupportedError, match="reduction"):
        from_keras(mlp(loss=losses.MeanSquaredError(reduction=None)).model)


def test_losses_of_positions():
    """Several labels for each sample."""
    layers = keras.layers
    inputs = layers.Input((4, 5))
    model = keras.Model(inputs, layers.Dense(3)(layers.LayerNormalization()(inputs)))
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True))
    data = batches(real(4, 5), whole(3, 4))
    step(model, next(data))
    agree(from_keras(model), model, data)
