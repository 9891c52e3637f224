"""Activations."""

from __future__ import annotations

import math

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.elementwise import erf
from onward.engines.numpy.precision import in_float32

operators = Operators()

operators(Relu=lambda x: np.maximum(x, x.dtype.type(0)))


@operators.define("LeakyRelu")
@in_float32
def leaky_relu(x, *, alpha):
    return np.where(x < 0, alpha * x, x)


@operators.define("PRelu")
@in_float32
def prelu(x, slope):
    return np.where(x < 0, slope * x, x)


@operators.define("Elu")
@in_float32
def elu(x, *, alpha):
    return np.where(x < 0, alpha * np.expm1(x), x)


@operators.define("Celu")
@in_float32
def celu(x, *, alpha):
    return np.where(x < 0, alpha * np.expm1(x / alpha), x)


@operators.define("Selu")
@in_float32
def selu(x, *, alpha, gamma):
    return gamma * np.where(x <= 0, alpha * np.expm1(x), x)


@operators.define("Gelu")
@in_float32
def gelu(x, *, approximate):
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


@operators.define("Mish")
@in_float32
def mish(x):
    return x * np.tanh(softplus(x))


@operators.define("Swish")
@in_float32
def swish(x, *, alpha):
    return x * sigmoid(alpha * x)


@operators.define("SwiGLU")
@in_float32
def swiglu(gate, x, *, alpha):
    return swish(gate, alpha=alpha) * x


@operators.define("HardSigmoid")
@in_float32
def hard_sigmoid(x, *, alpha, beta):
    return np.clip(alpha * x + beta, 0, 1)


@operators.define("HardSwish")
@in_float32
def hard_swish(x):
    return x * np.clip(x / 6 + 0.5, 0, 1)


@operators.define("Sigmoid")
@in_float32
def sigmoid(x):
    small = np.exp(-np.abs(x))  # which cannot overflow
    return np.where(x >= 0, 1, small) / (1 + small)


@operators.define("Softplus")
@in_float32
def softplus(x):
    return np.logaddexp(x, x.dtype.type(0))


@operators.define("Softsign")
@in_float32
def softsign(x):
    return x / (1 + np.abs(x))


@operators.define("Shrink")
@in_float32
def shrink(x, *, lambd, bias):
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)).astype(x.dtype)


@operators.define("ThresholdedRelu")
@in_float32
def thresholded_relu(x, *, alpha):
    return np.where(x > alpha, x, 0)


@operators.define("Softmax")
def softmax(x, *, axis):
    """In the type of `x` throughout, as the standard's body of it is, on which its own results rest."""
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


@operators.define("LogSoftmax")
@in_float32
def log_softmax(x, *, axis):
    x = x - x.max(axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


@operators.define("Hardmax")
def hardmax(x, *, axis):
    result = np.zeros_like(x)
    np.put_along_axis(result, x.argmax(axis, keepdims=True), x.dtype.type(1), axis)
    return result
