"""Activations."""

from __future__ import annotations

from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.values import dtype_of

operators = Operators()
operators(Relu=ops.relu)


@operators.define("LeakyRelu")
def leaky_relu(x, *, alpha=0.01):
    return ops.where(x > 0, x, alpha * x)


@operators.define("PRelu")
def parametric_relu(x, slope):
    return ops.where(x > 0, x, slope * x)


def _below_zero(x):
    """Return what is not above 0. At 0 backends do not agree about the slope of `minimum`."""
    return ops.where(x > 0, ops.zeros_like(x), x)


@operators.define("Elu")
def elu(x, *, alpha=1.0):
    return ops.where(x > 0, x, alpha * ops.expm1(_below_zero(x)))


@operators.define("Celu")
def celu(x, *, alpha=1.0):
    return ops.where(x > 0, x, alpha * ops.expm1(_below_zero(x) / alpha))


@operators.define("Selu")
def selu(x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return gamma * elu(x, alpha=alpha)


@operators.define("Gelu")
def gelu(x, *, approximate="none"):
    return ops.gelu(x, approximate=approximate == "tanh")


@operators.define("Mish")
def mish(x):
    return x * ops.tanh(ops.softplus(x))


@operators.define("Swish")
def swish(x, *, alpha=1.0):
    return x * ops.sigmoid(alpha * x)


@operators.define("HardSigmoid")
def hard_sigmoid(x, *, alpha=0.2, beta=0.5):
    y = alpha * x + beta  # at the bounds backends do not agree about the slope of `clip`
    return ops.where(y <= 0, ops.zeros_like(y), ops.where(y >= 1, ops.ones_like(y), y))


operators(HardSwish=ops.hard_swish, Sigmoid=ops.sigmoid, Softplus=ops.softplus, Softsign=ops.softsign)


@operators.define("Shrink")
def shrink(x, *, bias=0.0, lambd=0.5):
    return ops.where(x < -lambd, x + bias, ops.where(x > lambd, x - bias, ops.zeros_like(x)))


@operators.define("ThresholdedRelu")
def thresholded_relu(x, *, alpha=1.0):
    return ops.where(x > alpha, x, ops.zeros_like(x))


@operators.define("Softmax")
def softmax(x, *, axis=-1):
    return ops.softmax(x, axis)


@operators.define("LogSoftmax")
def log_softmax(x, *, axis=-1):
    return ops.log_softmax(x, axis)


@operators.define("Hardmax")
def hardmax(x, *, axis=-1):
    return ops.one_hot(ops.argmax(x, axis), x.shape[axis], axis=axis, dtype=dtype_of(x))
