"""TensorFlow in the grid. Its optimizers and schedules are Keras's; losses of its own are functions of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from grid.record import Outcome
from grid.side import HIDDEN, INPUTS, OUTPUTS, Arrays, Data, goes_on, in_words
from onward.frameworks.tensorflow import from_tensorflow, to_tensorflow
from onward.model import Model

LOSSES = {
    "sparse_softmax_cross_entropy_with_logits(t, y)": Data(None, ("labels",)),
    "softmax_cross_entropy_with_logits(t, y)": Data(None, ("one_hot",)),
    "sigmoid_cross_entropy_with_logits(t, y)": Data(None, ("binary",)),
    "weighted_cross_entropy_with_logits(t, y, 2.0)": Data(None, ("binary",)),
    "l2_loss(y - t)": Data(),
    "log_poisson_loss(t, y)": Data(None, ("positive",)),
    "compute_average_loss((y - t) ** 2)": Data(),
    "scale_regularization_loss((y - t) ** 2)": Data(),
    "ctc_loss(t, y, tf.fill([8], 3), tf.fill([8], 7), logits_time_major=False)": Data(None, ("words",)),
    "nce_loss(tf.ones([9, 4]), tf.ones([9]), t[:, None], y, 3, 9)": Data(None, ("labels",)),
    "sampled_softmax_loss(tf.ones([9, 4]), tf.ones([9]), t[:, None], y, 3, 9)": Data(None, ("labels",)),
}
RATE = 0.05


def public(kind: str) -> set[str]:
    return {name for name in dir(tf.nn) if name.endswith(("loss", "with_logits"))} if kind == "losses" else set()


def rows(kind: str) -> Sequence[str]:
    return list(LOSSES) if kind == "losses" else []


# ---- from TensorFlow -------------------------------------------------------------------------------------------------


class _Network(tf.Module):  # type: ignore[misc]
    def __init__(self, loss: str):
        super().__init__("network")
        rng = np.random.default_rng(0)
        sizes = (INPUTS, HIDDEN), (HIDDEN, OUTPUTS)
        self.kernels = [tf.Variable(rng.normal(size=shape) / 2, dtype=tf.float32) for shape in sizes]
        self.bias = tf.Variable(tf.zeros(OUTPUTS), name="bias")
        self._loss = compile(f"tf.nn.{loss}", "loss", "eval")

    def __call__(self, x: Any, t: Any) -> dict[str, Any]:
        y = tf.tanh(x @ self.kernels[0]) @ self.kernels[1] + self.bias
        return {"loss": tf.reduce_mean(eval(self._loss, {"tf": tf, "t": t, "y": y}))}


def read(kind: str, row: str) -> Outcome:
    """The loss is a part of the function; the optimizer is a recipe's from the beginning."""
    data, network = LOSSES[row], _Network(row)

    def step(batch: list[np.ndarray]) -> float:
        with tf.GradientTape() as tape:
            loss = network(*batch)["loss"]
        variables = network.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
        return float(loss)

    def convert() -> Model:
        return from_tensorflow(network, tuple(data.batch(0)), loss="value:loss", optimizer=f"sgd:lr={RATE}")

    return in_words(kind, goes_on(step, convert, data))


# ---- to TensorFlow ---------------------------------------------------------------------------------------------------


def make(kind: str, training: Model, batches: Iterable[Arrays]) -> tuple[Outcome, list[float]]:
    module = to_tensorflow(training)
    return Outcome("exact"), [float(module.train_step(**batch)["loss"]) for batch in batches]
