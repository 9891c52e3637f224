"""Random numbers of JAX. Training models have Onward's own generator, and do not come here."""

from __future__ import annotations

import secrets

import jax
import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import dtype_of

operators = Operators()


def _key(seed):
    return jax.random.key(secrets.randbits(32) if seed is None else int(np.float32(seed).view(np.uint32)))


@operators.define("Dropout")
def dropout(x, ratio=None, training_mode=None, *, seed=None):
    rate = 0.5 if ratio is None else ratio.item()
    if training_mode is None or not training_mode.item() or rate == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(_key(seed), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype), kept


@operators.define("Bernoulli")
def bernoulli(x, *, dtype=None, seed=None):
    return jax.random.bernoulli(_key(seed), x).astype(x.dtype if dtype is None else dtype_of(dtype))


@operators.define("Multinomial")
def multinomial(x, *, dtype, sample_size, seed=None):
    drawn = jax.random.categorical(_key(seed), x[:, None], shape=(len(x), sample_size))
    return drawn.astype(dtype_of(dtype))


def _normal(shape, dtype, seed, mean, scale):
    return (mean + scale * jax.random.normal(_key(seed), shape, np.float32)).astype(dtype)


def _uniform(shape, dtype, seed, low, high):
    return jax.random.uniform(_key(seed), shape, np.float32, low, high).astype(dtype)


def _like(x, dtype):
    return x.dtype if dtype is None else dtype_of(dtype)


operators(
    RandomNormal=lambda *, dtype, mean, scale, seed=None, shape: _normal(shape, dtype_of(dtype), seed, mean, scale),
    RandomNormalLike=lambda x, *, dtype=None, mean, scale, seed=None: _normal(
        x.shape, _like(x, dtype), seed, mean, scale
    ),
    RandomUniform=lambda *, dtype, high, low, seed=None, shape: _uniform(shape, dtype_of(dtype), seed, low, high),
    RandomUniformLike=lambda x, *, dtype=None, high, low, seed=None: _uniform(
        x.shape, _like(x, dtype), seed, low, high
    ),
)
