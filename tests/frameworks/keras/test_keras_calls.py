"""Calls and steps that users write in Python, traced: Keras itself makes the same steps, with nothing drawn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from marks import needs

keras = pytest.importorskip("keras")
from keras import layers, ops  # noqa: E402

import onward  # noqa: E402
from onward.agreement.steps import without_dropout  # noqa: E402
from onward.engines import start  # noqa: E402
from onward.errors import UnsupportedError  # noqa: E402
from onward.frameworks.keras import capture, from_keras  # noqa: E402
from onward.frameworks.keras.probe import nothing_drawn  # noqa: E402

pytestmark = [needs("keras"), needs("tensorflow")]

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)


class Gan(keras.Model):
    def __init__(self, *, together=False):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(8, "relu"), layers.Dense(6)])
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        self.seeds, self.together = keras.random.SeedGenerator(0), together

    def compile(self):
        super().compile(loss="mse")
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_optimizer, self.g_optimizer = keras.optimizers.Adam(1e-2), keras.optimizers.SGD(1e-2)

    def train_step(self, real):
        import tensorflow as tf

        rows = ops.shape(real)[0]
        fake = self.generator(keras.random.normal((rows, 3), mean=0.3, seed=self.seeds))
        truth = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])
        own, others = self.discriminator.trainable_weights, self.generator.trainable_weights
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(truth, self.discriminator(ops.concatenate([fake, real])))
        d_gradients = tape.gradient(d_loss, own)
        if not self.together:
            self.d_optimizer.apply_gradients(zip(d_gradients, own, strict=True))
        with tf.GradientTape() as tape:
            noise = keras.random.normal((rows, 3), mean=0.3, seed=self.seeds)
            g_loss = self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(noise)))
        g_gradients = tape.gradient(g_loss, others)
        if self.together:
            self.d_optimizer.apply_gradients(zip(d_gradients, own, strict=True))
        self.g_optimizer.apply_gradients(zip(g_gradients, others, strict=True))
        return {"loss": d_loss}


def test_a_train_step_with_two_optimizers_becomes_two_steps(monkeypatch):
    model = Gan()
    model.compile()
    finish = capture.to_training_model
    still = lambda run: finish(dataclasses.replace(run, model=without_dropout(run.model)))
    assert [step.algorithm.name for step in from_keras(model, X).steps] == ["step1", "step2"]
    monkeypatch.setattr(capture, "to_training_model", still)
    training = from_keras(model, X)
    with start(training, threads=1) as engine:
        for _ in range(3):
            engine.step(dict.fromkeys(engine.inputs, X))
        state = engine.state()
    with nothing_drawn():
        for _ in range(3):
            model.train_step(ops.convert_to_tensor(X))
    for variable in model.trainable_variables:
        np.testing.assert_allclose(state[variable.path], np.array(variable), rtol=2e-4, atol=1e-6)


def test_losses_from_before_an_update_are_refused():
    model = Gan(together=True)
    model.compile()
    with pytest.raises(UnsupportedError, match="before an update"):
        from_keras(model, X)


class OwnGradients(keras.Model):
    """Clips gradients, or adds those of their sum."""

    is_second_order = False

    def train_step(self, data):
        import tensorflow as tf

        (x, y), variables = data, self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = inner.gradient(loss, variables)
        if self.is_second_order:
            second = outer.gradient(gradients, variables)
            gradients = [0.5 * a + 0.5 * b for a, b in zip(gradients, second, strict=True)]
        else:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("second", [False, True])
def test_gradients_that_a_train_step_changes(second):
    """The trial compares them with those of Keras. A cross entropy of logits is larger than that of probabilities."""
    inputs, last = keras.Input((6,)), layers.Dense(3, "softmax")
    model = OwnGradients(inputs, last(layers.Dropout(0.3)(layers.Dense(7, "tanh")(inputs))))
    last.kernel.assign(last.kernel * (1 if second else 50))
    model.is_second_order = second
    model.compile("sgd", "sparse_categorical_crossentropy")
    training = from_keras(model, X, example_targets=np.arange(8) % 3)
    assert onward.check(training) == []


def test_gradients_through_a_batch_normalization_are_refused():
    model = OwnGradients(inputs := keras.Input((6,)), layers.BatchNormalization()(layers.Dense(3)(inputs)))
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="through a BatchNormalization"):
        from_keras(model, X, example_targets=X[:, :3])


def test_random_numbers_of_a_call_are_drawn_anew_and_a_constant_seed_is_refused():
    class Noisy(keras.Model):
        def __init__(self, seed):
            super().__init__()
            self.seed, self.dense = seed, layers.Dense(2)

        def call(self, x):
            return self.dense(x + keras.random.normal(ops.shape(x), seed=self.seed))

    model = Noisy(keras.random.SeedGenerator(0))
    model.compile("sgd", "mse")
    training = from_keras(model, X, example_targets=X[:, :2])
    losses = []
    for _ in range(2):  # the same numbers again after a restart
        with start(training, threads=1) as engine:
            losses.append([float(engine.step({"x": X, "target": X[:, :2]})["loss"]) for _ in range(2)])
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
    model = Noisy(7)
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="seed is constant"):
        from_keras(model, X, example_targets=X[:, :2])


def test_masks_reach_the_layers_and_the_loss():
    """The trial compares with Keras; without the masks it fails."""
    tokens = np.random.default_rng(1).integers(1, 9, (8, 5)).astype(np.int32)
    tokens[:4, 2:] = 0
    net = [layers.Embedding(9, 4, mask_zero=True), layers.GRU(3, return_sequences=True), layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *net])
    model.compile("sgd", "sparse_categorical_crossentropy")
    training = from_keras(model, tokens, example_targets=tokens % 3)
    assert onward.check(training) == []
