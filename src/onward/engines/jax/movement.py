"""Shapes, and elements that move."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from onward.engines.framework import Operators
from onward.engines.shared.arrays import dtype_of
from onward.engines.shared.movement import cut_for_pad

operators = Operators()


@operators.define("Pad")
def pad(x, pads, constant=None, axes=None, *, mode):
    x, widths = cut_for_pad(x, pads, axes)
    if mode != "constant":
        return jnp.pad(x, widths, mode=mode)
    value = jnp.zeros((), x.dtype) if constant is None else constant.reshape(()).astype(x.dtype)
    return lax.pad(x, value, [(*width, 0) for width in widths])


@operators.define("EyeLike")
def eye_like(x, *, dtype=None, k):
    return jnp.eye(*x.shape, k=k, dtype=x.dtype if dtype is None else dtype_of(dtype))
