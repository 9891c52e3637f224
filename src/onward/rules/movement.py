"""Operators that move, repeat or drop elements: their derivatives move them back."""

import numpy as np
import onnx_ir as ir

from onward.constants import constant_ints
from onward.rules.common import iota, rank
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


gradient("Reshape", "Flatten")(lambda op, dy, x, *shape: shaped_like(op, dy, x))
gradient("Squeeze")(lambda op, dy, x, axes: shaped_like(op, dy, x) if axes is None else op.Unsqueeze(dy, axes))


@gradient("Unsqueeze")
def unsqueeze(op, dy, x, axes):
    """dX = dY in the shape of X. Unsqueeze takes a single axis also as a scalar, but Squeeze does not."""
    return op.Squeeze(dy, op.Reshape(axes, [-1]) if rank(axes) == 0 else axes)


@gradient("Cast", "CastLike", inputs=(0,))
def cast(op, dy, x, *others):
    """dX = dY in the type of X."""
    return op.CastLike(dy, x) if x.dtype is None else dy


# ---- the same elements in another order ------------------------------------------------------------------------------


@gradient("Transpose")
def transpose(op, dy, x, *, perm):
    """dX = dY with the inverse permutation."""
    return op.Transpose(dy, perm=None if perm is None else [int(axis) for axis in np.argsort(perm)])


@gradient("DepthToSpace")
def depth_to_space_gradient(op, dy, x, *, blocksize, mode):
    """dX = dY moved back to the channels."""
    if mode == "DCR":
        return op.SpaceToDepth(dy, blocksize=blocksize)
    return space_to_depth(op, dy, blocksize=blocksize, mode=mode)


gradient("SpaceToDepth")(lambda op, dy, x, *, blocksize, mode: op.DepthToSpace(dy, blocksize=blocksize, mode=mode))


@body("DepthToSpace")
def depth_to_space(op, x, *, blocksize, mode):
    """Move channels to blocks of the plane, whose index is the first axis of the channels (DCR) or the last (CRD)."""
    height, width, block = along(op, x, 2), along(op, x, 3), [blocksize, blocksize]
    blocks = op.Reshape(x, join_shape(op, *([[0], block, [-1]] if mode == "DCR" else [[0, -1], block]), height, width))
    blocks = op.Transpose(blocks, perm=[0, 3, 4, 1, 5, 2] if mode == "DCR" else [0, 1, 4, 2, 5, 3])
    sides = ([n[0] * blocksize] if isinstance(n, list) else n * [blocksize] for n in (height, width))
    return op.Reshape(blocks, join_shape(op, [0, -1], *sides))


@body("SpaceToDepth")
def space_to_depth(op, x, *, blocksize, mode="DCR"):
    size = [blocksize]
    height, width = (
        [n[0] // blocksize] if isinstance(n, list) else n / size for n in (along(op, x, 2), along(op, x, 3))
    )
    blocks = op.Reshape(x, join_shape(op, [0, 0], height, size, width, size))
    blocks = op.Transpose(blocks, perm=[0, 3, 5, 1, 2, 4] if mode == "DCR" else [0, 1, 3, 5, 2, 4])
    return op.Reshape(blocks, join_shape(op, [0, -1], height, width))


@gradient("ReverseSequence")
def reverse_sequence_gradient(op, dy, x, lengths, *, batch_axis, time_axis):
    """dX = dY reversed again."""
    return op.ReverseSequence(dy, lengths, batch_axis=batch_axis, time_axis=time_axis)


@body("ReverseSequence")
def reverse_sequence(op, x, lengths, *, batch_axis, time_axis):
    """Reverse the first `lengths` elements along the time axis; time and batch are the first two axes."""
    time, example = (iota(op, op.Gather(op.Shape(x), np.int64(axis))) for axis in (time_axis, batch_axis))
    time = op.Unsqueeze(time, [batch_axis])
    example, lengths = (op.Unsqueeze(n, [time_axis]) for n in (example, lengths))
    source = op.Where(time < lengths, lengths - 1 - time, time)
    pair = (source, op.Expand(example, op.Shape(source)))[:: -1 if batch_axis == 0 else 1]
    return op.GatherND(x, op.Concat(*(op.Unsqueeze(n, [2]) for n in pair), axis=2))


@gradient("Concat")
def concat(op, dy, *xs, axis):
    """dX_i = the slice of dY that was X_i."""
    if len(xs) == 1:
        return dy
    return op.Split(dy, join_shape(op, *(along(op, x, axis) for x in xs)), axis=axis, outputs=len(xs))


@gradient("Split")
def split(op, dys, x, sizes, *, ys, axis):
    """dX = all dY_i concatenated, zeros where nothing depends on Y_i."""
    named = [y if y.value.name else y.named("unused") for y in ys]  # an omitted output also has a shape
    parts = [fill(op, extent(op, y), 0, x) if dy is None else dy for dy, y in zip(dys, named, strict=True)]
    return op.Concat(*parts, axis=axis)


@gradient("Slice")
def slice_(op, dy, x, starts, ends, axes, steps):
    """dX = dY at the elements of the slice, else 0."""
    if steps is not None and set(constant_ints(steps.value) or (0,)) != {1}:
        return undo_selection(op, dy, x, lambda numbers: op.Slice(numbers, starts, ends, axes, steps), "none")
    if axes is None:  # the first ones, as many as there are starts
        count = along(op, starts, 0)
        axes = op.constant(list(range(count[0]))) if isinstance(count, list) else iota(op, op.Size(starts))
    axes = _long(op, axes)
    pads = _known_pads(x, starts, ends, axes)
    if pads is None:
        size, left, first = _sizes(op, x, axes), _sizes(op, dy, axes), _long(op, starts)
        if min(constant_ints(starts.value) or (-1,)) < 0:
            first = op.Max(op.Where(first < 0, first + size, first), 0)
        first = op.Min(first, size)
        pads = op.Concat(first, size - first - left, axis=0)
    return pad_axes(op, dy, pads, axes)


def _known_pads(x, starts, ends, axes):
    """Return the numbers of elements before and after a slice; None if they are not known."""
    first, last, over = (constant_ints(numbers.value) for numbers in (starts, ends, axes))
    if first is None or last is None or over is None or x.value.shape is None:
        return None
    sizes = [x.value.shape[axis] for axis in over]
    if not all(isinstance(size, int) for size in sizes):
        return None
    slices = [range(size)[i:j] for size, i, j in zip(sizes, first, last, strict=True)]
    behind = [size - taken.start - len(taken) for size, taken in zip(sizes, slices, strict=True)]
    return [taken.start for taken in slices] + behind


gradient("Trilu")(lambda op, dy, x, k, *, upper: op.Trilu(dy, k, upper=upper))


@gradient("CenterCropPad")
def center_crop_pad(op, dy, x, shape, *, axes):
    """dX = dY padded where X was cropped, and cropped where it was padded."""
    return op.CenterCropPad(dy, op.Shape(x) if axes is None else op.Gather(op.Shape(x), list(axes)), axes=axes)


def _sizes(op, x, axes):
    """Return the sizes of some axes of `x` (default: all)."""
    shape = op.Shape(x)
    return shape if axes is None else op.Gather(shape, axes)


def _long(op, values):
    """Return starts or axes as int64: those of a Slice have one type, and ONNX infers no Pad with axes of int32."""
    if values is None or values.dtype == ir.DataType.INT64:
        return values
    numbers = constant_ints(values.value)
    return op.constant(list(numbers)) if numbers is not None else op.Cast(values, to=ir.DataType.INT64)


gradient("Expand", broadcasts=(0,))(lambda op, dy, x, shape: dy)


@gradient("Tile")
def tile(op, dy, x, repeats):
    """dX = the sum over the even axes of dY as (repeats_0, size_0, repeats_1, size_1, ...)."""
    shape, count = extent(op, x), constant_ints(repeats.value)
    if isinstance(shape, list) and count is not None:
        pairs = [n for pair in zip(count, shape, strict=True) for n in pair]
    else:
        pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.Shape(x), [1]), axis=1)
        pairs = op.Reshape(pairs, [-1])
    if x.value.shape is None:
        copies = op.Range(np.int64(0), op.Size(pairs), np.int64(2))
    else:
        copies = list(range(0, 2 * rank(x), 2))
    return op.ReduceSum(reshape_to(op, dy, pairs), copies, keepdims=0, noop_with_empty_axes=1)


@gradient("Pad", broadcasts=(2,))
def pad(op, dy, x, pads, value, axes, *, mode):
    """dX = dY cropped, and the padding goes to the value; in other modes, dX sums all copies of an element."""
    if mode != "constant":
        return undo_selection(op, dy, x, lambda numbers: pad_axes(op, numbers, pads, axes, mode=mode))
    frame = None if value is None else dy * pad_axes(op, filled_like(op, x, 0), pads, axes, op.scalar(1, x))
    return _crop(op, dy, pads, axes), None, frame


def _crop(op, dy, pads, axes):
    """Undo padding with constants: crop the padding; add zeros where pads are negative."""
    numbers = constant_ints(pads.value)
    if numbers is None:
        begin, end = op.Split(op.Max(pads, 0), num_outputs=2, axis=0, outputs=2)
        cropped = op.Slice(dy, begin, _sizes(op, dy, axes) - end, _long(op, axes))
        return pad_axes(op, cropped, op.Max(-pads, 0), axes)
    pads = numbers
    begin, end = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    if max(pads, default=0) > 0:
        stop = [-n if n > 0 else END for n in end]
        dy = op.Slice(dy, [max(n, 0) for n in begin], stop, _long(op, axes))
    if min(pads, default=0) < 0:
        dy = pad_axes(op, dy, [max(-n, 0) for n in pads], axes)
    return dy
