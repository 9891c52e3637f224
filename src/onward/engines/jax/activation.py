"""Activations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators

operators = Operators()
operators(
    Relu=jax.nn.relu,
    LeakyRelu=lambda x, *, alpha: jnp.where(x > 0, x, alpha * x),
    PRelu=lambda x, slope: jnp.where(x > 0, x, slope * x),
    Elu=lambda x, *, alpha: jax.nn.elu(x, alpha),
    Celu=lambda x, *, alpha: jax.nn.celu(x, alpha),
    Selu=lambda x, *, alpha, gamma: gamma * jax.nn.elu(x, alpha),
    Gelu=lambda x, *, approximate: jax.nn.gelu(x, approximate=approximate == "tanh"),
    Mish=jax.nn.mish,
    Swish=lambda x, *, alpha: x * jax.nn.sigmoid(alpha * x),
    SwiGLU=lambda gate, x, *, alpha: gate * jax.nn.sigmoid(alpha * gate) * x,
    HardSigmoid=lambda x, *, alpha, beta: _unit(alpha * x + beta),
    HardSwish=lambda x: x * _unit(x / 6 + 0.5),
    Sigmoid=jax.nn.sigmoid,
    Softplus=jax.nn.softplus,
    Softsign=jax.nn.soft_sign,
)


def _unit(x):
    """Cut off below 0 and above 1, where the slope is 0."""
    return jnp.where(x <= 0, 0, jnp.where(x >= 1, 1, x)).astype(x.dtype)


@operators.define("Shrink")
def shrink(x, *, bias, lambd):
    shrunk = jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, 0))
    return shrunk.astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(x, axis):
    return jax.nn.softmax(x, axis)


@softmax.defjvp
def _softmax_jvp(axis, given, tangents):
    """What has no result, as a row that is masked as a whole, has no slope: a NaN that is replaced later stays away."""
    y, (change,) = softmax(*given, axis), tangents
    slope = jnp.where(jnp.isnan(y), 0, y)
    return y, slope * (change - jnp.sum(slope * change, axis, keepdims=True))


operators(
    ThresholdedRelu=lambda x, *, alpha: jnp.where(x > alpha, x, 0),
    Softmax=lambda x, *, axis: softmax(x, axis),
    LogSoftmax=lambda x, *, axis: jax.nn.log_softmax(x, axis),
)


@operators.define("Hardmax")
def hardmax(x, *, axis):
    places = np.arange(x.shape[axis]).reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    return (jnp.argmax(x, axis, keepdims=True) == places).astype(x.dtype)
