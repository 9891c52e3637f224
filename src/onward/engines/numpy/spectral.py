"""Fourier transforms and windows. A complex number is two real ones, on a last axis."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32
from onward.engines.numpy.reference import from_reference

operators = Operators()


@operators.define("DFT")
@in_float32
def dft(x, length=None, axis=None, *, inverse, onesided):
    axis = -2 if axis is None else axis.item()
    axis, size = axis % x.ndim, x.shape[axis]
    signal = _complex(x)
    if inverse and onesided:
        count = 2 * (size - 1) if length is None else length.item()
        return np.fft.irfft(signal, count, axis)[..., None].astype(x.dtype)
    count = size if length is None else length.item()
    y = (np.fft.ifft if inverse else np.fft.fft)(signal, count, axis)
    return _real(y.take(range(count // 2 + 1), axis) if onesided else y, x.dtype)


operators(MelWeightMatrix=from_reference("MelWeightMatrix"))


@operators.define("HannWindow")
def hann_window(size, *, output_datatype, periodic):
    return _window(size, [0.5, -0.5], output_datatype, periodic)


@operators.define("HammingWindow")
def hamming_window(size, *, output_datatype, periodic):
    return _window(size, [25 / 46, -21 / 46], output_datatype, periodic)


@operators.define("BlackmanWindow")
def blackman_window(size, *, output_datatype, periodic):
    return _window(size, [0.42, -0.5, 0.08], output_datatype, periodic)


def _window(size, coefficients, output_datatype, periodic):
    """A sum of cosines; a periodic window is one element longer, and lacks its last."""
    count = size.item()
    turn = 2 * np.pi * np.arange(count) / (count if periodic else count - 1)
    total = sum(c * np.cos(i * turn) for i, c in enumerate(coefficients))
    return np.asarray(total).astype(ir.DataType(output_datatype).numpy())


def _complex(x):
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _real(y, dtype):
    return np.stack([y.real, y.imag], -1).astype(dtype)
