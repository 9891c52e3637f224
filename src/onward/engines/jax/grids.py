"""Values between the elements of a grid."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.resize import as_resize

operators = Operators()


@operators.define("Resize")
@as_resize
def resize(x, along, extrapolation_value, mode):
    for axis, matrix, outside, picks in along:
        x = jnp.take(x, matrix.argmax(1), axis) if picks else _combine(x, matrix, axis)
        if outside.any():
            beyond = outside.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            x = jnp.where(beyond, extrapolation_value, x).astype(x.dtype)
    return x


def _combine(x, matrix, axis):
    """New elements along an axis, each a weighted sum of the old ones."""
    exact = jnp.promote_types(x.dtype, np.float32)
    y = jnp.moveaxis(jnp.tensordot(matrix.astype(exact), x.astype(exact), (1, axis)), 0, axis)
    return y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.round(y).astype(x.dtype)
