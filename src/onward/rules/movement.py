"""Operators that move elements, repeat them or leave some out: their derivatives move them back."""

import numpy as np
import onnx_ir as ir

from onward.constants import constant_ints
from onward.rules.indexing import (
    END,
    along,
    extent,
    fill,
    filled_like,
    join_shape,
    pad_axes,
    reshape_to,
    shaped_like,
    undo_selection,
)
from onward.rules.registry import body, gradient, no_gradient

no_gradient("the result is a constant", "Constant", "ConstantOfShape", "EyeLike")
no_gradient("the result is a sequence of numbers, whose length depends on the inputs", "Range")


# ---- the same elements in another shape or type ----------------------------------------------------------------------


@gradient("Reshape", "Flatten")
def reshape(op, dy, x, *others):
    """dX = dY in the shape of X."""
    return shaped_like(op, dy, x)


@gradient("Squeeze")
def squeeze(op, dy, x, axes):
    """dX = dY in the shape of X."""
    return shaped_like(op, dy, x) if axes is None else op.Unsqueeze(dy, axes)


@gradient("Unsqueeze")
def unsqueeze(op, dy, x, axes):
    """dX = dY in the shape of X. A single axis may be given as a number, which Squeeze does not take."""
    is_number = axes.value.shape is not None and not axes.value.shape.rank()
    return op.Squeeze(dy, op.Reshape(axes, [-1]) if is_number else axes)


@gradient("Cast", "CastLike", inputs=(0,))
def cast(op, dy, x, *others):
    """dX = dY in the type of X; none from or to a type that is not floating-point, unless it stands for one."""
    return op.CastLike(dy, x) if x.dtype is None else dy


# ---- the same elements in another order ------------------------------------------------------------------------------


@gradient("Transpose")
def transpose(op, dy, x, *, perm):
    """dX = dY with the inverse permutation."""
    return op.Transpose(dy, perm=None if perm is None else [int(axis) for axis in np.argsort(perm)])


@gradient("DepthToSpace")
def depth_to_space_gradient(op, dy, x, *, blocksize, mode):
    """dX = dY moved back to the channels."""
    return op.SpaceToDepth(dy, blocksize=blocksize) if mode == "DCR" else _space_to_depth(op, dy, blocksize, mode)


@gradient("SpaceToDepth")
def space_to_depth_gradient(op, dy, x, *, blocksize, mode):
    """dX = dY moved back to the plane."""
    return op.DepthToSpace(dy, blocksize=blocksize, mode=mode)


@body("DepthToSpace")
def depth_to_space(op, x, *, blocksize, mode):
    """Channels as blocks of the plane: these are the first part of the numbers of channels (DCR), or the last."""
    height, width, sides = along(op, x, 2), along(op, x, 3), [blocksize, blocksize]
    inside = [[0], sides, [-1]] if mode == "DCR" else [[0, -1], sides]
    blocks = op.Reshape(x, join_shape(op, *inside, height, width))
    blocks = op.Transpose(blocks, perm=[0, 3, 4, 1, 5, 2] if mode == "DCR" else [0, 1, 4, 2, 5, 3])
    return op.Reshape(blocks, join_shape(op, [0, -1], *(_scale(op, n, blocksize) for n in (height, width))))


@body("SpaceToDepth")
def space_to_depth(op, x, *, blocksize, mode="DCR"):
    """The reverse."""
    return _space_to_depth(op, x, blocksize, mode)


def _space_to_depth(op, x, size, mode):
    height, width = ([n[0] // size] if isinstance(n, list) else n / [size] for n in (along(op, x, 2), along(op, x, 3)))
    blocks = op.Reshape(x, join_shape(op, [0, 0], height, [size], width, [size]))
    blocks = op.Transpose(blocks, perm=[0, 3, 5, 1, 2, 4] if mode == "DCR" else [0, 1, 3, 5, 2, 4])
    return op.Reshape(blocks, join_shape(op, [0, -1], height, width))


def _scale(op, size, factor):
    return [size[0] * factor] if isinstance(size, list) else size * [factor]


@gradient("ReverseSequence")
def reverse_sequence_gradient(op, dy, x, lengths, *, batch_axis, time_axis):
    """dX = dY reversed again."""
    return op.ReverseSequence(dy, lengths, batch_axis=batch_axis, time_axis=time_axis)


@body("ReverseSequence")
def reverse_sequence(op, x, lengths, *, batch_axis, time_axis):
    """The first `lengths` elements along the axis of time from the last to the first; the axes are the first two."""
    time, example = (
        op.Range(np.int64(0), op.Gather(op.Shape(x), np.int64(axis)), np.int64(1)) for axis in (time_axis, batch_axis)
    )
    time, (example, lengths) = (
        op.Unsqueeze(time, [batch_axis]),
        (op.Unsqueeze(n, [time_axis]) for n in (example, lengths)),
    )
    places = op.Where(time < lengths, lengths - 1 - time, time)
    pair = (places, op.Expand(example, op.Shape(places)))[:: -1 if batch_axis == 0 else 1]
    return op.GatherND(x, op.Concat(*(op.Unsqueeze(n, [2]) for n in pair), axis=2))


# ---- putting together and taking apart -------------------------------------------------------------------------------


@gradient("Concat")
def concat(op, dy, *xs, axis):
    """dX_i = the part of dY that was X_i."""
    if len(xs) == 1:
        return dy
    return op.Split(dy, join_shape(op, *(along(op, x, axis) for x in xs)), axis=axis, outputs=len(xs))


@gradient("Split")
def split(op, dys, x, sizes, *, ys, axis):
    """dX = all dY_i behind each other, zeros where nothing depends on Y_i."""
    named = [y if y.value.name else y.named("part") for y in ys]  # an output that is left out has a shape as well
    parts = [fill(op, extent(op, y), 0, x) if dy is None else dy for dy, y in zip(dys, named, strict=True)]
    return op.Concat(*parts, axis=axis)


# ---- a part of the elements ------------------------------------------------------------------------------------------


@gradient("Slice")
def slice_(op, dy, x, starts, ends, axes, steps):
    """dX = dY at the elements that were taken, else 0."""
    if steps is not None and set(constant_ints(steps.value) or (0,)) != {1}:
        return undo_selection(op, dy, x, lambda numbers: op.Slice(numbers, starts, ends, axes, steps), "none")
    axes = _first_axes(op, starts) if axes is None else axes
    pads = _known_frame(x, starts, ends, axes)
    if pads is None:
        size, left, first = _sizes(op, x, axes), _sizes(op, dy, axes), _long(op, starts)
        if min(constant_ints(starts.value) or (-1,)) < 0:
            first = op.Max(op.Where(first < 0, first + size, first), 0)
        first = op.Min(first, size)
        pads = op.Concat(first, size - first - left, axis=0)
    return pad_axes(op, dy, pads, axes)


def _first_axes(op, starts):
    """The axes of a Slice that names none: the first ones, as many as it has starts."""
    shape = starts.value.shape
    if shape is not None and isinstance(shape[0], int):
        return op.constant(list(range(shape[0])))
    return op.Range(np.int64(0), op.Size(starts), np.int64(1))


def _known_frame(x, starts, ends, axes):
    """How many elements a slice leaves out in front of and behind what it takes, if that is certain."""
    first, last = constant_ints(starts.value), constant_ints(ends.value)
    over = constant_ints(axes.value)
    if first is None or last is None or over is None or x.value.shape is None:
        return None
    sizes = [x.value.shape[axis] for axis in over]
    if not all(isinstance(size, int) for size in sizes):
        return None
    parts = [range(size)[i:j] for size, i, j in zip(sizes, first, last, strict=True)]
    behind = [size - part.start - len(part) for size, part in zip(sizes, parts, strict=True)]
    return [part.start for part in parts] + behind


@gradient("Trilu")
def trilu(op, dy, x, k, *, upper):
    """dX = the same triangle of dY."""
    return op.Trilu(dy, k, upper=upper) if k is not None else op.Trilu(dy, upper=upper)


@gradient("CenterCropPad")
def center_crop_pad(op, dy, x, shape, *, axes):
    """dX = dY padded where X was cropped, and cropped where it was padded."""
    return op.CenterCropPad(dy, op.Shape(x) if axes is None else op.Gather(op.Shape(x), list(axes)), axes=axes)


def _sizes(op, x, axes):
    """The dimensions of `x` along the given axes, or along all of them."""
    shape = op.Shape(x)
    return shape if axes is None else op.Gather(shape, axes)


def _long_only(op, axes):
    """The last input of a Slice, whose type must be that of the others."""
    return () if axes is None else (_long(op, axes),)


def _long(op, values):
    return values if values.dtype == ir.DataType.INT64 else op.Cast(values, to=ir.DataType.INT64)


# ---- elements several times ------------------------------------------------------------------------------------------


@gradient("Expand", broadcasts=(0,))
def expand(op, dy, x, shape):
    """dX = dY summed over the axes along which X was repeated."""
    return dy


@gradient("Tile")
def tile(op, dy, x, repeats):
    """dX = the sum of all copies, which are the even axes of dY as (repeats_0, size_0, repeats_1, size_1, ...)."""
    shape, count = extent(op, x), constant_ints(repeats.value)
    if isinstance(shape, list) and count is not None:
        pairs = [n for pair in zip(count, shape, strict=True) for n in pair]
    else:
        pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.Shape(x), [1]), axis=1)
        pairs = op.Reshape(pairs, [-1])
    if x.value.shape is None:
        copies = op.Range(np.int64(0), op.Size(pairs), np.int64(2))
    else:
        copies = list(range(0, 2 * x.value.shape.rank(), 2))
    return op.ReduceSum(reshape_to(op, dy, pairs), copies, keepdims=0, noop_with_empty_axes=1)


@gradient("Pad", broadcasts=(2,))
def pad(op, dy, x, pads, value, axes, *, mode):
    """Constant: dX = the part of dY that was X, and the frame around it goes to the value; else each copy counts."""
    if mode != "constant":
        return undo_selection(op, dy, x, lambda numbers: pad_axes(op, numbers, pads, axes, mode=mode))
    frame = None if value is None else dy * pad_axes(op, filled_like(op, x, 0), pads, axes, op.scalar(1, x))
    known = constant_ints(pads.value)
    return _crop(op, dy, pads, axes) if known is None else _crop_by(op, dy, known, axes), None, frame


def _crop(op, dy, pads, axes):
    """Undo padding with constants: leave out what was added; add zeros where pads are negative."""
    begin, end = op.Split(op.Max(pads, 0), num_outputs=2, axis=0, outputs=2)
    part = op.Slice(dy, begin, _sizes(op, dy, axes) - end, *_long_only(op, axes))
    return pad_axes(op, part, op.Max(-pads, 0), axes)


def _crop_by(op, dy, pads, axes):
    """The same for pads that are known."""
    begin, end = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    if max(pads, default=0) > 0:
        stop = [-n if n > 0 else END for n in end]
        dy = op.Slice(dy, [max(n, 0) for n in begin], stop, *_long_only(op, axes))
    if min(pads, default=0) < 0:
        dy = pad_axes(op, dy, [max(-n, 0) for n in pads], axes)
    return dy
