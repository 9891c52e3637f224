"""Random numbers. A node with a seed draws the same numbers each time."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import widen
from onward.engines.shared.arrays import dtype_of

operators = Operators()


@operators.define("Dropout")
def dropout(x, ratio=None, training_mode=None, *, seed):
    probability = 0.5 if ratio is None else ratio.item()
    if training_mode is None or not training_mode.item() or probability == 0:
        return x, np.ones(x.shape, bool)
    mask = _generator(seed).random(x.shape) >= probability
    scale = 1 / (1 - probability) if probability < 1 else 0
    return np.where(mask, widen(x) * scale, 0).astype(x.dtype), mask


@operators.define("Bernoulli")
def bernoulli(x, *, dtype, seed):
    return (_generator(seed).random(x.shape) < x).astype(_type(dtype, x))


@operators.define("Multinomial")
def multinomial(x, *, dtype, sample_size, seed):
    bounds = np.exp(x - x.max(1, keepdims=True)).cumsum(1)
    draws = _generator(seed).random((len(x), sample_size)) * bounds[:, -1:]
    return (draws[:, :, None] >= bounds[:, None, :]).sum(2).astype(dtype_of(dtype))


operators(
    RandomNormal=lambda *, dtype, mean, scale, seed, shape: _normal(shape, dtype_of(dtype), seed, mean, scale),
    RandomNormalLike=lambda x, *, dtype, mean, scale, seed: _normal(x.shape, _type(dtype, x), seed, mean, scale),
    RandomUniform=lambda *, dtype, high, low, seed, shape: _uniform(shape, dtype_of(dtype), seed, low, high),
    RandomUniformLike=lambda x, *, dtype, high, low, seed: _uniform(x.shape, _type(dtype, x), seed, low, high),
)


def _normal(shape, dtype, seed, mean, scale):
    return _generator(seed).normal(mean, scale, shape).astype(dtype)


def _uniform(shape, dtype, seed, low, high):
    return _generator(seed).uniform(low, high, shape).astype(dtype)


def _generator(seed):
    return np.random.default_rng(None if seed is None else np.float32(seed).view(np.uint32).item())


def _type(dtype, x):
    return x.dtype if dtype is None else dtype_of(dtype)
