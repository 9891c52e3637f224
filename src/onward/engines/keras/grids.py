"""Images of other sizes."""

from __future__ import annotations

import numpy as np
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.values import dtype_of
from onward.engines.shared.resize import resized_axes

operators = Operators()


@operators.define("Resize")
def resize(
    x,
    roi=None,
    scales=None,
    sizes=None,
    *,
    antialias=0,
    axes=None,
    coordinate_transformation_mode="half_pixel",
    cubic_coeff_a=-0.75,
    exclude_outside=0,
    extrapolation_value=0.0,
    keep_aspect_ratio_policy="stretch",
    mode="nearest",
    nearest_mode="round_prefer_floor",
):
    """A size that is not known stays as it is."""
    changes = resized_axes(
        [size or 1 for size in x.shape],
        *(None if given is None else np.asarray(given) for given in (roi, scales, sizes)),
        antialias=antialias,
        axes=axes,
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        keep_aspect_ratio_policy=keep_aspect_ratio_policy,
        mode=mode,
        nearest_mode=nearest_mode,
    )
    for axis, matrix, outside, picks in changes:
        if picks:
            x = ops.take(x, matrix.argmax(1).astype(np.int32), axis)
        else:
            x = ops.moveaxis(
                ops.matmul(ops.moveaxis(x, axis, -1), ops.convert_to_tensor(matrix.T, dtype_of(x))), -1, axis
            )
        if outside.any():
            along = outside.reshape([-1 if i == axis else 1 for i in range(len(x.shape))])
            x = ops.where(along, ops.cast(extrapolation_value, dtype_of(x)), x)
    return x
