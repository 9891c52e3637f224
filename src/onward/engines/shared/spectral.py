"""Fourier transforms. A complex number is two real ones, on a last axis."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import xp

operators = Operators()


@operators.define("DFT")
def dft(x, length=None, axis=None, *, inverse, onesided):
    place = (-2 if axis is None else axis.item()) % x.ndim
    count = None if length is None else length.item()
    exact = x.astype(np.promote_types(x.dtype, np.float32))
    values = exact[..., 0] if x.shape[-1] == 1 else exact[..., 0] + 1j * exact[..., 1]
    if inverse and onesided:
        return xp.fft.irfft(values, count, place)[..., None].astype(x.dtype)
    y = (xp.fft.ifft if inverse else xp.fft.rfft if onesided else xp.fft.fft)(values, count, place)
    return xp.stack([y.real, y.imag], -1).astype(x.dtype)
