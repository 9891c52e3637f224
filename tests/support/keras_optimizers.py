"""An optimizer of Keras as people write them."""

from __future__ import annotations

import keras
from keras import ops


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
