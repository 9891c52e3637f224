"""Convolutions."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import as_pads, cast, inverse, permute
from onward.frameworks.jax.jaxpr.movement import pad_axes, spread_elements
from onward.frameworks.jax.jaxpr.values import reshape_to

primitives = Operators()


@primitives.define("conv_general_dilated")
def convolution(
    op, x, kernel, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
    batch_group_count, ins, outs,
):  # fmt: skip
    """Conv, with the axes in the order that it has; where elements of `x` are to lie apart, zeros between them."""
    x, kernel = (cast(op, tensor, outs[0].dtype) for tensor in (x, kernel))
    order_x, order_kernel, order_y = dimension_numbers
    x, kernel = permute(op, x, order_x), permute(op, kernel, order_kernel)
    zero = op.constant(np.zeros((), outs[0].dtype))
    shape = [ins[0].shape[axis] for axis in order_x]
    x, sizes = spread_elements(op, x, zero, shape, [0, 0, *(apart - 1 for apart in lhs_dilation)])
    if batch_group_count > 1:
        x = _groups_as_features(op, x, sizes, batch_group_count)
    around = [(0, 0), (0, 0), *padding]
    if any(min(pair) < 0 for pair in padding):
        x, around = pad_axes(op, x, zero, around), [(0, 0)] * len(around)
    y = op.Conv(
        x,
        kernel,
        kernel_shape=[ins[1].shape[axis] for axis in order_kernel[2:]],
        strides=list(window_strides),
        pads=as_pads(around[2:]),
        dilations=list(rhs_dilation),
        group=feature_group_count * batch_group_count,
    )
    return permute(op, y, inverse(order_y))


def _groups_as_features(op, x, sizes, groups):
    """Groups of examples, each of which has kernels of its own, as groups of features."""
    count, features, *rest = sizes
    apart = reshape_to(op, x, [groups, count // groups, features, *rest])
    order = [1, 0, *range(2, 3 + len(rest))]
    return reshape_to(op, op.Transpose(apart, perm=order), [count // groups, groups * features, *rest])
