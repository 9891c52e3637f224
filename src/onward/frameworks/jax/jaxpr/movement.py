"""Shapes, and elements that move."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import END, as_pads, cast, constant_of, permute, reverse, stack, unstack
from onward.frameworks.jax.jaxpr.emitter import fill, reshape_to

primitives = Operators()
# ---- shapes ----------------------------------------------------------------------------------------------------------


@primitives.define("reshape")
def reshape(op, x, *, dimensions, ins, outs):
    if dimensions is not None:
        x = permute(op, x, dimensions)
    return x if ins[0].shape == outs[0].shape else reshape_to(op, x, outs[0].shape)


@primitives.define("transpose")
def transpose(op, x, *, permutation, ins):
    return permute(op, x, [*permutation, *range(len(permutation), len(ins[0].shape))])


@primitives.define("broadcast_in_dim")
def broadcast_in_dim(op, x, *sizes, broadcast_dimensions, ins, outs):
    """The axes of `x` among others of size 1, and then as large as they are to be."""
    shape, own = outs[0].shape, list(broadcast_dimensions)
    if not ins[0].shape and (number := constant_of(x)) is not None:
        return fill(op, shape, number, outs[0].dtype) if shape else x
    own += range(len(shape) - len(ins[0].shape) + len(own), len(shape))  # the numbers of a random key stay last
    new = [axis for axis in range(len(shape)) if axis not in own]
    before = [ins[0].shape[own.index(axis)] if axis in own else 1 for axis in range(len(shape))]
    x = op.Unsqueeze(x, new) if new and own else x
    return x if tuple(before) == tuple(shape) and own else op.Expand(x, op.shape(shape))


primitives(
    squeeze=lambda op, x, *, dimensions: op.Squeeze(x, list(dimensions)) if dimensions else x,
    concatenate=lambda op, *xs, dimension: op.Concat(*xs, axis=dimension),
    tile=lambda op, x, *, reps: op.Tile(x, list(reps)),
    split=lambda op, x, *, sizes, axis: op.Split(x, op.shape(sizes), axis=axis, outputs=len(sizes)),
    stack=lambda op, *xs, axis: stack(op, xs, axis),
    unstack=lambda op, x, *, axis, outs: unstack(op, x, len(outs), axis),
    rev=lambda op, x, *, dimensions: reverse(op, x, dimensions),
    dim_as_value=lambda op, *, dim, outs: cast(op, op.size(dim), outs[0].dtype),
    dimension_size=lambda op, x, *, dimension, ins, outs: cast(op, op.size(ins[0].shape[dimension]), outs[0].dtype),
)


# ---- parts -----------------------------------------------------------------------------------------------------------


@primitives.define("slice")
def cut(op, x, *, start_indices, limit_indices, strides, ins):
    steps = strides or [1] * len(start_indices)
    parts = [
        (axis, start, limit, step)
        for axis, (start, limit, step) in enumerate(zip(start_indices, limit_indices, steps, strict=True))
        if (start, limit, step) != (0, ins[0].shape[axis], 1)
    ]
    if not parts:
        return x
    axes, starts, limits, steps = zip(*parts, strict=True)
    return op.Slice(x, op.shape(starts), op.shape(limits), list(axes), list(steps))


@primitives.define("pad")
def pad(op, x, value, *, padding_config, ins):
    """Between elements first, then around them; what is negative is cut off."""
    x, _ = spread_elements(op, x, value, ins[0].shape, [between for _, _, between in padding_config])
    return pad_axes(op, x, value, [(low, high) for low, high, _ in padding_config])


def spread_elements(op, x, value, shape, between):
    """`x` with so many times `value` between its elements along each axis, and its shape then."""
    sizes = list(shape)
    for axis, count in enumerate(between):
        if count:
            amounts = [(0, count * (i == axis + 1)) for i in range(len(sizes) + 1)]
            x = pad_axes(op, op.Unsqueeze(x, [axis + 1]), value, amounts)
            sizes[axis] *= count + 1
            x = op.Slice(reshape_to(op, x, sizes), [0], [-count], [axis])
            sizes[axis] -= count
    return x, sizes


def pad_axes(op, x, value, amounts):
    """`x` with so many times `value` before and after its elements along each axis."""
    cut_away = [(axis, -min(low, 0), -min(high, 0)) for axis, (low, high) in enumerate(amounts) if min(low, high) < 0]
    if cut_away:
        axes, starts, ends = (list(part) for part in zip(*cut_away, strict=True))
        x = op.Slice(x, starts, [-end or END for end in ends], axes)
    # Of all axes: ONNX Runtime, where it moves a Transpose past a Pad, does not look at the axes that a Pad names.
    around = as_pads([(max(low, 0), max(high, 0)) for low, high in amounts])
    return op.Pad(x, op.shape(around), value, mode="constant") if any(around) else x


# ---- made ------------------------------------------------------------------------------------------------------------


@primitives.define("iota")
def iota(op, *sizes, dtype, shape, dimension):
    if sizes:
        raise UnsupportedError("its size is only known at run time")
    numbers = cast(op, positions(op, shape[dimension]), dtype)
    if len(shape) == 1:
        return numbers
    column = op.Unsqueeze(numbers, [axis for axis in range(len(shape)) if axis != dimension])
    return op.Expand(column, op.shape(shape))


def positions(op, size):
    """The numbers from 0 to a size, in 64 bits."""
    if isinstance(size, int):
        return op.constant(np.arange(size))
    return op.Range(op.constant(np.int64(0)), op.size(size), op.constant(np.int64(1)))


primitives(**dict.fromkeys(("empty", "empty2"), lambda op, *, outs: fill(op, outs[0].shape, 0, outs[0].dtype)))
