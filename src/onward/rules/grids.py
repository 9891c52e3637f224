"""Grids of places to sample an image at."""

from onward.rules.common import identity
from onward.rules.indexing import END, along, extent, fill, join_shape
from onward.rules.registry import gradient


@gradient("AffineGrid")
def affine_grid(op, dy, theta, size, *, align_corners):
    """Y = (P, 1) theta' for the places P of a plain grid, which is that of the identity: dtheta = dY' (P, 1)."""
    unit = op.Unsqueeze(identity(op, extent(op, theta, 1), theta), [0])
    one_image = op.Concat([1], op.Slice(size, [1], [END]), axis=0)
    places = op.AffineGrid(unit, one_image, align_corners=align_corners)
    axes = along(op, theta, 1)
    places = op.Reshape(places, join_shape(op, [-1], axes))
    ones = fill(op, op.Concat(op.Shape(places, end=1), [1], axis=0), 1, theta)
    rows = op.Reshape(dy, join_shape(op, [0], [-1], axes))
    return op.MatMul(op.Transpose(rows, perm=[0, 2, 1]), op.Concat(places, ones, axis=1))
