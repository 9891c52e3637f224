"""Frequencies. The two parts of complex numbers are the last axis."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators

operators = Operators()


def _complex(x):
    exact = x.astype(jnp.promote_types(x.dtype, np.float32))
    return exact[..., 0] if x.shape[-1] == 1 else lax.complex(exact[..., 0], exact[..., 1])


def _parts(y, dtype):
    return jnp.stack([y.real, y.imag], -1).astype(dtype)


@operators.define("DFT")
def dft(x, length=None, axis=None, *, inverse, onesided):
    place = (-2 if axis is None else axis.item()) % x.ndim
    count = None if length is None else length.item()
    values = _complex(x)
    if inverse and onesided:
        return jnp.fft.irfft(values, count, place)[..., None].astype(x.dtype)
    transform = jnp.fft.ifft if inverse else jnp.fft.rfft if onesided else jnp.fft.fft
    return _parts(transform(values, count, place), x.dtype)
