"""Values between the elements of a grid."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.resize import resized_axes

operators = Operators()


@operators.define("Resize")
def resize(
    x,
    roi=None,
    scales=None,
    sizes=None,
    *,
    antialias,
    axes=None,
    coordinate_transformation_mode,
    cubic_coeff_a,
    exclude_outside,
    extrapolation_value,
    keep_aspect_ratio_policy,
    mode,
    nearest_mode,
):
    resized = resized_axes(
        x.shape,
        roi,
        scales,
        sizes,
        antialias=antialias,
        axes=axes,
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        keep_aspect_ratio_policy=keep_aspect_ratio_policy,
        mode=mode,
        nearest_mode=nearest_mode,
    )
    for axis, matrix, outside, picks in resized:
        x = jnp.take(x, matrix.argmax(1), axis) if picks else _combined(x, matrix, axis)
        if outside.any():
            along = outside.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            x = jnp.where(along, extrapolation_value, x).astype(x.dtype)
    return x


def _combined(x, matrix, axis):
    """New elements along an axis, each a weighted sum of the old ones."""
    exact = jnp.promote_types(x.dtype, np.float32)
    y = jnp.moveaxis(jnp.tensordot(matrix.astype(exact), x.astype(exact), (1, axis)), 0, axis)
    return y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.round(y).astype(x.dtype)
