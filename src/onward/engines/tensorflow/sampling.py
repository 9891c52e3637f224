"""Random tensors, by TensorFlow's own generator."""

from __future__ import annotations

import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.tensors import dtype_of, scalar, sizes

operators = Operators()


def _uniform(shape, dtype, seed, low=0.0, high=1.0):
    return tf.random.uniform(shape, low, high, dtype, _whole(seed))


def _normal(shape, dtype, seed, mean, scale):
    return tf.random.normal(shape, mean, scale, dtype, _whole(seed))


def _whole(seed):
    return None if seed is None else int(seed)


@operators.define("Dropout")
def dropout(x, ratio=None, training=None, *, seed):
    share = 0.5 if ratio is None else float(ratio)
    if training is None or not training or share == 0:
        return x, tf.ones_like(x, tf.bool)
    mask = _uniform(sizes(x), tf.float32, seed) >= share
    return tf.where(mask, x / scalar(1 - share, x), scalar(0, x)), mask


@operators.define("Bernoulli")
def bernoulli(p, *, dtype, seed):
    kind = _like(p, dtype)
    return tf.cast(tf.cast(_uniform(sizes(p), tf.float32, seed), p.dtype) < p, kind)


@operators.define("Multinomial")
def multinomial(x, *, dtype, sample_size, seed):
    return tf.cast(tf.random.categorical(x, sample_size, tf.int64, _whole(seed)), dtype_of(dtype))


def _like(x, dtype):
    return x.dtype if dtype is None else dtype_of(dtype)


operators(
    RandomNormal=lambda *, dtype, mean, scale, seed, shape: _normal(shape, dtype_of(dtype), seed, mean, scale),
    RandomNormalLike=lambda x, *, dtype, mean, scale, seed: _normal(sizes(x), _like(x, dtype), seed, mean, scale),
    RandomUniform=lambda *, dtype, high, low, seed, shape: _uniform(shape, dtype_of(dtype), seed, low, high),
    RandomUniformLike=lambda x, *, dtype, high, low, seed: _uniform(sizes(x), _like(x, dtype), seed, low, high),
)
