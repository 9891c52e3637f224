"""Optimizers of Keras that nobody knows: an update is traced, on any backend, and training goes on with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from marks import needs
from paths import TESTS

import onward
from onward.engines import start
from onward.errors import MismatchError

keras = pytest.importorskip("keras")
from keras import ops  # noqa: E402
from keras_runs import on_backend  # noqa: E402

pytestmark = needs("keras", "tensorflow")


class Belief(keras.optimizers.Optimizer):
    """AdaBelief, with a factor for all variables that falls with each of them."""

    def __init__(self, learning_rate=0.01, beta=0.9, name="belief", **settings):
        super().__init__(learning_rate=learning_rate, name=name, **settings)
        self.beta = beta

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._m, self._v = self.add_optimizer_variables(variables, ["m", "v"])
        self._factor = self.add_variable((), initializer="ones", name="factor")

    def update_step(self, gradient, variable, learning_rate):
        place = self._get_variable_index(variable)
        rate, g = ops.cast(learning_rate, variable.dtype), ops.cast(gradient, variable.dtype)
        t = ops.cast(self.iterations + 1, variable.dtype)
        m, v = self._m[place], self._v[place]
        self.assign(m, m * self.beta + (1 - self.beta) * g)
        self.assign(v, v * 0.99 + 0.01 * ops.square(g - m))
        self.assign(self._factor, self._factor * 0.999)
        change = self._factor * (m / (1 - ops.power(self.beta, t))) / (ops.sqrt(v) + 1e-3)
        self.assign_sub(variable, rate * change)

    def get_config(self):
        return {**super().get_config(), "beta": self.beta}


class Erratic(Belief):
    """Depends on a number of Python that nobody sees."""

    calls = 0

    def update_step(self, gradient, variable, learning_rate):
        Erratic.calls += 1
        self.assign_sub(variable, learning_rate * gradient / Erratic.calls)


RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((6, 4)).astype("f"), RNG.integers(0, 3, 6)


def compiled(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(model: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        model.reset_metrics()
        losses.append(float(model.train_on_batch(X, Y, return_dict=True)["loss"]))
    return losses


def goes_on(model: Any) -> Any:
    """Ten steps on ONNX Runtime, and five back in Keras."""
    training = onward.from_keras(model)
    assert onward.check(training) == []
    with start(training, threads=1) as engine:
        image, labels = engine.inputs
        losses = [float(engine.step({image: X, labels: Y})["loss"]) for _ in range(10)]
        end = engine.updated()
    np.testing.assert_allclose(losses, train(model, 10), rtol=1e-5)
    np.testing.assert_allclose(train(onward.to_keras(end), 5), train(model, 5), rtol=1e-5)
    return training


def of_ones_own(begun: int) -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.9)
    model = compiled(Belief(rate, weight_decay=0.01, clipnorm=0.5))
    train(model, begun)
    (group,) = onward.describe(goes_on(model)).steps[0].groups
    assert (group.optimizer, group.slots, group.hyper) == ("Belief", ("m", "v", "factor"), {"lr": 0.02})


def test_a_class_of_ones_own() -> None:
    of_ones_own(3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Ftrl", "Adafactor"])
def test_classes_of_keras(name: str) -> None:
    goes_on(compiled(getattr(keras.optimizers, name)(0.01)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param(name, marks=needs(name)) for name in ("jax", "torch")])
def test_other_backends(backend: str) -> None:
    code = "import test_keras_traced as t; t.of_ones_own(0); t.of_ones_own(3)"
    on_backend(backend, "-c", code, folder=TESTS / "frameworks" / "keras")


def test_what_a_trace_does_not_see() -> None:
    with pytest.raises(MismatchError, match="by the optimizer Erratic is off"):
        onward.from_keras(compiled(Erratic()))
