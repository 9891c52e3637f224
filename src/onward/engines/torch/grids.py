"""Values between the elements of a grid."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared.resize import as_resize

operators = Operators()


@operators.define("Resize")
@as_resize
def resize(x, along, extrapolation_value, mode):
    y = x if x.is_floating_point() or mode == "nearest" else x.float()
    for axis, matrix, outside, picks in along:
        y = _pick(y, matrix.argmax(1), axis) if picks else _weigh(y, matrix, axis)
        if outside.any():
            beyond = torch.from_numpy(outside).to(x.device).reshape([-1 if i == axis else 1 for i in range(y.ndim)])
            y = torch.where(beyond, extrapolation_value, y)
    return y if x.dtype == y.dtype else y.round().to(x.dtype)


def _pick(x, places, axis):
    return x.index_select(axis, torch.from_numpy(places).to(x.device))


def _weigh(x, matrix, axis):
    """The product with a matrix, of which few elements are not zero."""
    count = (matrix != 0).sum(1).max()
    places = np.argsort(matrix == 0, axis=1, kind="stable")[:, :count]
    weights = torch.from_numpy(np.take_along_axis(matrix, places, 1)).to(x)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    return sum(_pick(x, places[:, i], axis) * weights[:, i].reshape(shape) for i in range(count))


_MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}


@operators.define("GridSample")
def grid_sample(x, grid, *, align_corners, mode, padding_mode):
    return F.grid_sample(x, grid, _MODES[mode], padding_mode, bool(align_corners))


operators(AffineGrid=lambda theta, size, *, align_corners: F.affine_grid(theta, size.tolist(), bool(align_corners)))
