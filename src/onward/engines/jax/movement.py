"""Operators that move elements, and that choose elements by index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.jax.types import concrete_array
from onward.engines.shared.arrays import dtype_of
from onward.engines.shared.movement import along, coordinates_of, cut_for_pad, short, unique_elements, wrap_indices

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


# ---- indexing --------------------------------------------------------------------------------------------------------


@operators.define("Gather")
def gather(x, indices, *, axis):
    return jnp.take(x, wrap_indices(indices, x.shape[axis]), axis, mode="clip")


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    return _scatter(x, along(wrap_indices(indices, x.shape[axis]), axis), updates, reduction)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return _scatter(x, coordinates_of(short(indices, max(x.shape))), updates, reduction)


def _scatter(x, coordinates, updates, reduction):
    if reduction == "mul":
        return _scatter_product(x, coordinates, updates)
    at = x.at[coordinates]
    return {"none": at.set, "add": at.add, "max": at.max, "min": at.min}[reduction](updates)


@jax.custom_jvp
def _scatter_product(x, coordinates, updates):
    return x.at[coordinates].multiply(updates)


@_scatter_product.defjvp
def _scatter_product_jvp(inputs, tangents):
    """Multiply one factor at a time: JAX has no derivative for factors with the same index."""
    x, coordinates, updates = inputs
    coordinates = jnp.broadcast_arrays(*coordinates)
    rows = [at.reshape(-1) for at in coordinates]

    def multiply(x, updates):
        factors = updates.reshape(-1, *updates.shape[coordinates[0].ndim :])
        return lax.scan(
            lambda x, item: (x.at[item[0]].multiply(item[1], unique_indices=True), None), x, (tuple(rows), factors)
        )

    (y, _), (change, _) = jax.jvp(multiply, (x, updates), (tangents[0], tangents[2]))
    return y, change


@operators.define("Compress")
def compress(x, condition, *, axis=None):
    indices = np.flatnonzero(concrete_array(condition))
    return jnp.take(x.reshape(-1) if axis is None else x, indices, 0 if axis is None else axis)


operators(
    NonZero=lambda x: (
        np.stack(np.nonzero(concrete_array(x))) if x.ndim else np.zeros((0, int(concrete_array(x) != 0)), np.int64)
    ),
    Unique=lambda x, *, axis=None, sorted: unique_elements(concrete_array(x), axis, sorted),
)


@operators.define("NonMaxSuppression")
def non_max_suppression(boxes, scores, *limits, center_point_box):
    from onward.engines.numpy import Numpy

    return Numpy.operators["NonMaxSuppression"](
        concrete_array(boxes), concrete_array(scores), *limits, center_point_box=center_point_box, outputs=1
    )
