"""Activation functions. At a kink the derivative is that of the left side, or 0."""

from __future__ import annotations

import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.tensors import scalar

operators = Operators()

operators(
    Relu=tf.nn.relu,
    LeakyRelu=lambda x, *, alpha: tf.nn.leaky_relu(x, alpha),
    PRelu=lambda x, slope: tf.where(x > 0, x, x * slope),
)


def _below_zero(x, scale, width=1.0):
    """scale (exp(x / width) - 1) where x is not positive; elsewhere finite."""
    return scale * tf.math.expm1(tf.minimum(x, 0) / width)


operators(
    Elu=lambda x, *, alpha: tf.nn.elu(x) if alpha == 1 else tf.where(x > 0, x, _below_zero(x, alpha)),
    Celu=lambda x, *, alpha: tf.where(x > 0, x, _below_zero(x, alpha, alpha)),
    Selu=lambda x, *, alpha, gamma: gamma * tf.where(x > 0, x, _below_zero(x, alpha)),
    Gelu=lambda x, *, approximate: tf.nn.gelu(x, approximate == "tanh"),
    Mish=lambda x: x * tf.tanh(tf.math.softplus(x)),
    Swish=lambda x, *, alpha: tf.nn.silu(x, alpha),
    SwiGLU=lambda a, b, *, alpha: tf.nn.silu(a, alpha) * b,
    HardSigmoid=lambda x, *, alpha, beta: _cut(alpha * x + beta),
    HardSwish=lambda x: x * _cut(x / 6 + 0.5),
    Sigmoid=tf.sigmoid,
    Softplus=tf.math.softplus,
    Softsign=lambda x: x / (1 + tf.abs(x)),
)


def _cut(x):
    """Between 0 and 1; at both ends the derivative is 0."""
    return tf.where(x <= 0, scalar(0, x), tf.where(x >= 1, scalar(1, x), x))


def _softmax(x, axis):
    """A row of nothing but -inf, which a mask leaves, is NaN. Its derivative is 0, for the graph to choose another."""

    @tf.custom_gradient
    def softmax(x):
        y = tf.nn.softmax(x, axis)

        def gradient(dy):
            weight = tf.where(tf.math.is_nan(y), scalar(0, y), y)
            weighted = dy * weight
            return weighted - weight * tf.reduce_sum(weighted, axis, keepdims=True)

        return y, gradient

    return softmax(x)


@operators.define("Shrink")
def shrink(x, *, bias, lambd):
    zero = tf.zeros_like(x)
    below, above = (tf.cast(bound, x.dtype) for bound in (-lambd, lambd))
    return tf.where(x < below, x + tf.cast(bias, x.dtype), tf.where(x > above, x - tf.cast(bias, x.dtype), zero))


operators(
    ThresholdedRelu=lambda x, *, alpha: tf.where(x > alpha, x, scalar(0, x)),
    Softmax=lambda x, *, axis: _softmax(x, axis),
    LogSoftmax=lambda x, *, axis: tf.nn.log_softmax(x, axis),
    Hardmax=lambda x, *, axis: tf.one_hot(tf.argmax(x, axis), x.shape[axis], axis=axis, dtype=x.dtype),
)
