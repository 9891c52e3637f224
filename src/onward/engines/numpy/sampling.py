"""Random numbers. A node with a seed draws the same numbers each time."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.engines.numpy.precision import widen

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
    return (draws[:, :, None] >= bounds[:, None, :]).sum(2).astype(ir.DataType(dtype).numpy())


@operators.define("RandomNormal")
def random_normal(*, dtype, mean, scale, seed, shape):
    return _generator(seed).normal(mean, scale, shape).astype(ir.DataType(dtype).numpy())


@operators.define("RandomNormalLike")
def random_normal_like(x, *, dtype, mean, scale, seed):
    return _generator(seed).normal(mean, scale, x.shape).astype(_type(dtype, x))


@operators.define("RandomUniform")
def random_uniform(*, dtype, high, low, seed, shape):
    return _generator(seed).uniform(low, high, shape).astype(ir.DataType(dtype).numpy())


@operators.define("RandomUniformLike")
def random_uniform_like(x, *, dtype, high, low, seed):
    return _generator(seed).uniform(low, high, x.shape).astype(_type(dtype, x))


def _generator(seed):
    return np.random.default_rng(None if seed is None else np.float32(seed).view(np.uint32).item())


def _type(dtype, x):
    return x.dtype if dtype is None else ir.DataType(dtype).numpy()
