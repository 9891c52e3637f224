"""Fourier transforms."""

from __future__ import annotations

import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.tensors import wide

operators = Operators()


@operators.define("DFT")
def dft(x, length=None, axis=None, *, inverse, onesided):
    """Complex numbers are pairs in the last axis. A one-sided inverse transform gives real ones."""
    place = (-2 if axis is None else axis.item()) % x.shape.rank
    order = list(range(x.shape.rank - 1))
    order[place], order[-1] = order[-1], order[place]
    lines = tf.transpose(_complex(wide(x)), order)
    real = bool(inverse and onesided)
    size = length.item() if length is not None else 2 * (lines.shape[-1] - 1) if real else lines.shape[-1]
    if real:
        half = size // 2 + 1
        result = _with_length(lines, half)
        y = tf.signal.irfft(result, [size])[..., None]
    else:
        result = (tf.signal.ifft if inverse else tf.signal.fft)(_with_length(lines, size))
        y = _pairs(result[..., : size // 2 + 1] if onesided else result)
    return tf.cast(tf.transpose(y, [*order, x.shape.rank - 1]), x.dtype)


def _with_length(x, size):
    """With zeros behind the end, or cut there."""
    missing = [(0, 0)] * (x.shape.rank - 1) + [(0, max(size - x.shape[-1], 0))]
    return tf.pad(x[..., :size], missing)


def _complex(x):
    return tf.complex(x[..., 0], x[..., 1] if x.shape[-1] == 2 else tf.zeros_like(x[..., 0]))


def _pairs(x):
    return tf.stack([tf.math.real(x), tf.math.imag(x)], -1)
