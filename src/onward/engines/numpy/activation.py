"""Activations."""

from __future__ import annotations

import math

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.elementwise import erf
from onward.engines.numpy.precision import in_float32

operators = Operators()


@in_float32
def gelu(x, *, approximate):
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


@in_float32
def sigmoid(x):
    small = np.exp(-np.abs(x))  # which cannot overflow
    return np.where(x >= 0, 1, small) / (1 + small)


@in_float32
def softplus(x):
    return np.logaddexp(x, x.dtype.type(0))


@in_float32
def shrink(x, *, lambd, bias):
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)).astype(x.dtype)


operators(
    Relu=lambda x: np.maximum(x, x.dtype.type(0)),
    LeakyRelu=in_float32(lambda x, *, alpha: np.where(x < 0, alpha * x, x)),
    PRelu=in_float32(lambda x, slope: np.where(x < 0, slope * x, x)),
    Elu=in_float32(lambda x, *, alpha: np.where(x < 0, alpha * np.expm1(x), x)),
    Celu=in_float32(lambda x, *, alpha: np.where(x < 0, alpha * np.expm1(x / alpha), x)),
    Selu=in_float32(lambda x, *, alpha, gamma: gamma * np.where(x <= 0, alpha * np.expm1(x), x)),
    Gelu=gelu,
    Mish=in_float32(lambda x: x * np.tanh(softplus(x))),
    Swish=in_float32(lambda x, *, alpha: x * sigmoid(alpha * x)),
    SwiGLU=in_float32(lambda gate, x, *, alpha: gate * sigmoid(alpha * gate) * x),
    HardSigmoid=in_float32(lambda x, *, alpha, beta: np.clip(alpha * x + beta, 0, 1)),
    HardSwish=in_float32(lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    Sigmoid=sigmoid,
    Softplus=softplus,
    Softsign=in_float32(lambda x: x / (1 + np.abs(x))),
    Shrink=shrink,
    ThresholdedRelu=in_float32(lambda x, *, alpha: np.where(x > alpha, x, 0)),
)


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
