"""Operators that read and write elements by index.

The derivative adds up reads of the same element: at heart each rule is one ScatterElements. Shapes that are known when
the graph is built become constants; others are computed when it runs.
"""

import math

import numpy as np
import onnx_ir as ir

from onward.constants import HALVES, constant_ints
from onward.rules.common import iota, rank
from onward.rules.registry import gradient, no_gradient

END = np.iinfo(np.int64).max

no_gradient("the result depends on which elements are equal, not smoothly on their values", "Unique")


def extent(op, x, start=0, stop=None):
    """Return the sizes of axes `start` to `stop` of `x`: a list if all are known, else a tensor."""
    shape = x.value.shape
    if shape is None:
        return op.Shape(x, start=start or None, end=stop)
    sizes = list(shape)[start:stop]
    if all(isinstance(n, int) for n in sizes):
        return sizes
    result = op.Shape(x, start=start or None, end=stop)
    result.value.shape = ir.Shape([len(sizes)])
    return result


def join_shape(op, *parts):
    """Concatenate shapes, which are lists or tensors."""
    if all(isinstance(sizes, list) for sizes in parts):
        return [n for sizes in parts for n in sizes]
    some = [sizes for sizes in parts if sizes != []]
    return op.Concat(*some, axis=0) if len(some) > 1 else some[0]


def product(op, shape):
    """Return the product of a shape, as a shape of one axis."""
    return [math.prod(shape)] if isinstance(shape, list) else op.ReduceProd(shape, keepdims=1)


def along(op, x, axis):
    """Return the size of `axis`, as a shape of one axis."""
    return extent(op, x, axis, axis + 1 if axis != -1 else None)


def after(op, x, axis):
    """Return the sizes of the axes of `x` behind `axis`."""
    return extent(op, x, axis + 1) if axis != -1 else []


def positive(axis, x):
    """Return the axis counted from the front, if the rank is known."""
    return axis if x.value.shape is None else axis % max(rank(x), 1)


def fill(op, shape, number, like):
    """Return a tensor filled with a number, in the type of `like`."""
    if like.dtype is None or (like.dtype is ir.DataType.BFLOAT16 and op.opset < 20):
        return op.CastLike(op.ConstantOfShape(shape, value=np.full(1, number, np.float32)), like)
    tensor = ir.Tensor(np.full(1, number).astype(like.dtype.numpy()), dtype=like.dtype)
    return op.ConstantOfShape(shape, value=tensor)


def filled_like(op, x, number):
    """Return a tensor filled with a number, in the type and shape of `x`."""
    return fill(op, extent(op, x), number, x).like(x.value)


def reshape_to(op, x, shape):
    """Reshape `x`; a zero in the shape means no elements, not a copied size."""
    zero_free = isinstance(shape, list) and 0 not in shape
    return op.Reshape(x, shape, allowzero=None if zero_free else 1)


def merge_axes(op, x, start):
    """Merge the axes of `x` from `start` on into one."""
    size = product(op, extent(op, x, start))
    result = reshape_to(op, x, join_shape(op, extent(op, x, 0, start), size))
    if x.value.shape is not None:
        result.value.shape = ir.Shape([*x.value.shape[:start], size[0] if isinstance(size, list) else None])
    return result


def split_axis(op, x, axis, count):
    """Split an axis of `x` into two, the first of size `count`."""
    size = along(op, x, axis)
    size = [size[0] // count] if isinstance(size, list) else op.Div(size, [count])
    result = reshape_to(op, x, join_shape(op, extent(op, x, 0, axis), [count], size, extent(op, x, axis + 1)))
    if x.value.shape is not None:
        inner = size[0] if isinstance(size, list) else None
        result.value.shape = ir.Shape([*x.value.shape[:axis], count, inner, *x.value.shape[axis + 1 :]])
    return result


def shaped_like(op, value, x):
    """Reshape `value` to the shape of `x`."""
    target, source = x.value.shape, value.value.shape or ()
    if target is None or 0 in target:
        return reshape_to(op, value, extent(op, x))
    if sum(not isinstance(size, int) for size in target) < 2:
        return reshape_to(op, value, [size if isinstance(size, int) else -1 for size in target])
    shape = list(target)
    for i, (size, other) in enumerate(zip(target, source, strict=False)):
        if size == other and isinstance(size, ir.SymbolicDim) and size.value is not None:
            shape[i] = 0
    if all(isinstance(size, int) for size in shape):
        return op.Reshape(value, shape)  # 0 copies the size of `value`
    return reshape_to(op, value, extent(op, x))


def count_elements(op, shape):
    """Number the elements of a tensor of this shape: 0, 1, 2 ..."""
    number = op.constant(np.int64(np.prod(shape))) if isinstance(shape, list) else op.ReduceProd(shape, keepdims=0)
    return reshape_to(op, iota(op, number), shape)


def _ones(op, shape):
    """Return a shape of ones of the same rank."""
    if isinstance(shape, list):
        return [1] * len(shape)
    if shape.value.shape is not None and isinstance(shape.value.shape[0], int):
        return [1] * shape.value.shape[0]
    return op.ConstantOfShape(op.Shape(shape), value=np.ones(1, np.int64))


def on_axis(op, vector, x, axis):
    """Reshape a vector to the rank of `x`, along an axis: a number, or a tensor with one."""
    if x.value.shape is not None and isinstance(axis, int):
        shape = [1] * rank(x)
        shape[axis] = -1
        return op.Reshape(vector, shape)
    ones = op.ConstantOfShape(op.Shape(op.Shape(x)), value=np.ones(1, np.int64))
    axis = [axis] if isinstance(axis, int) else op.Reshape(axis, [1])
    return op.Reshape(vector, op.ScatterElements(ones, axis, [-1], axis=0))


def pad_axes(op, x, pads, axes=None, value=None, mode=None):
    """Pad `x` in front of and behind some of its axes, or all of them.

    If the rank is known, the Pad names no axes: ONNX Runtime moves a Transpose past a Pad with `axes` without changing
    these, and then fails.
    """
    if axes is not None and x.value.shape is not None:
        pads, axes = _pads_of_all_axes(op, pads, axes, rank(x)), None
    last = () if value is None and axes is None else (value,) if axes is None else (value, axes)
    return op.Pad(x, pads, *last, mode=mode)


def _pads_of_all_axes(op, pads, axes, rank):
    numbers, over = (n if isinstance(n, list) else constant_ints(n.value) for n in (pads, axes))
    if numbers is not None and over is not None:
        all_pads = [0] * 2 * rank
        for i, number in zip([axis % rank + side * rank for side in (0, 1) for axis in over], numbers, strict=True):
            all_pads[i] = number
        return all_pads
    front = op.constant([axis % rank for axis in over]) if over is not None else op.Mod(axes, rank)
    indices = op.Concat(front, front + rank, axis=0)
    return op.ScatterElements(np.zeros(2 * rank, np.int64), indices, pads)


def add_at(op, shape, indices, updates, axis=0, reduction="add"):
    """Return zeros with `updates` added at `indices`; in float32 for half precision, whose sums lose digits."""
    if reduction == "add" and updates.dtype in HALVES:
        updates = op.Cast(updates, to=ir.DataType.FLOAT)
    return op.ScatterElements(fill(op, shape, 0, updates), indices, updates, axis=axis, reduction=reduction)


def add_along(op, dy, x, positions, axis, reduction="add"):
    """Return the derivative of y = x at `positions`, of any shape, along `axis`."""
    axis, behind = positive(axis, x), after(op, x, axis)
    shape = join_shape(op, extent(op, x, 0, axis), _size(op, positions), behind)
    index = op.Expand(op.Reshape(positions, join_shape(op, [-1], _ones(op, behind))), shape)
    return add_at(op, extent(op, x), index, dy if rank(positions) == 1 else reshape_to(op, dy, shape), axis, reduction)


def _size(op, x):
    """Return the number of elements of `x`, as a shape of one axis."""
    shape = extent(op, x)
    return [math.prod(shape)] if isinstance(shape, list) else op.Reshape(op.Size(x), [1])


def undo_selection(op, dy, x, select, reduction="add"):
    """Return the derivative of y = select(x), which only picks elements: add dy at the selected indices."""
    indices = op.Reshape(select(count_elements(op, extent(op, x))), [-1])
    indices.value.shape = ir.Shape([None])
    return shaped_like(op, add_at(op, _size(op, x), indices, op.Reshape(dy, [-1]), reduction=reduction), x)


@gradient("Gather")
def gather(op, dy, x, indices, *, axis):
    """y = x[indices]: dX[indices] += dY."""
    index = constant_ints(indices.value)
    if rank(indices) not in (0, 1) or index is None or len(index) != 1:
        return add_along(op, dy, x, indices, axis)
    # Zeros, except for dY at one index.
    size, (index,) = along(op, x, axis), index
    if isinstance(size, list):
        pads = [index % size[0], size[0] - 1 - index % size[0]]
    else:
        pads = join_shape(op, [index], size - (index + 1)) if index >= 0 else join_shape(op, size + index, [-1 - index])
    return pad_axes(op, dy if rank(indices) else op.Unsqueeze(dy, [axis]), pads, [axis])


@gradient("GatherElements")
def gather_elements(op, dy, x, indices, *, axis):
    """y = x[indices]: dX[indices] += dY."""
    return add_at(op, extent(op, x), indices, dy, positive(axis, x))


@gradient("GatherND")
def gather_nd(op, dy, x, indices, *, batch_dims):
    """y = x[indices]: dX[indices] += dY, with the leading axes merged."""
    rows = _Rows(op, x, indices, batch_dims)
    return shaped_like(op, add_at(op, rows.table, rows.index, reshape_to(op, dy, rows.chosen)), x)


@gradient("Compress")
def compress(op, dy, x, condition, *, axis):
    """y = x where the condition holds along the axis: dX = dY there, 0 elsewhere."""
    indices = op.Squeeze(op.NonZero(condition), [0])
    indices.value.shape = ir.Shape([None])
    if axis is not None:
        return add_along(op, dy, x, indices, axis, "none")
    return shaped_like(op, add_at(op, _size(op, x), indices, dy, reduction="none"), x)


class _Rows:
    """Leading axes of `x` that tuples of indices address, merged into one axis of rows."""

    def __init__(self, op, x, indices, batch_dims=0):
        width = extent(op, indices, -1)
        if isinstance(width, list):
            head, rest = extent(op, x, 0, batch_dims + width[0]), extent(op, x, batch_dims + width[0])
        else:
            shape, depth = op.Shape(x), width + batch_dims
            head, rest = op.Slice(shape, [0], depth), op.Slice(shape, depth, [END])
        position = op.Reshape(op.GatherND(count_elements(op, head), indices, batch_dims=batch_dims or None), [-1])
        self.table = join_shape(op, product(op, head), rest)
        self.chosen = join_shape(op, op.Shape(position), rest)
        self.index = op.Expand(op.Reshape(position, join_shape(op, [-1], _ones(op, rest))), self.chosen)


@gradient("ScatterElements")
def scatter_elements(op, dy, x, indices, updates, *, y, axis, reduction):
    """y = x with the updates written, added, multiplied or compared at the indices.

    Ties (max, min) share dY evenly. If several updates are written to one element, the standard does not define which
    one stays: each gets dY. With three or more zeros among the factors of a product (mul), derivatives above the second
    are lost.
    """
    return _scatter_derivatives(op, dy, x, indices, updates, y, positive(axis, x), reduction or "none")


@gradient("ScatterND")
def scatter_nd(op, dy, x, indices, updates, *, y, reduction):
    """As ScatterElements, with the leading axes merged."""
    rows = _Rows(op, x, indices)
    dy, data, y = (reshape_to(op, value, rows.table) for value in (dy, x, y))
    dx, _, du = _scatter_derivatives(op, dy, data, rows.index, reshape_to(op, updates, rows.chosen), y, 0, reduction)
    return shaped_like(op, dx, x), None, shaped_like(op, du, updates)


def _scatter_derivatives(op, dy, x, indices, updates, y, axis, reduction):
    def at(value):
        return op.Gather(value, indices) if rank(indices) == 1 else op.GatherElements(value, indices, axis=axis)

    def scatter(target, values, reduction):
        return op.ScatterElements(target, indices, values, axis=axis, reduction=reduction)

    if reduction == "none":
        return scatter(dy, filled_like(op, updates, 0), "none"), None, at(dy)
    if reduction == "add":
        return dy, None, at(dy)
    if reduction == "mul":
        product = scatter(filled_like(op, x, 1), updates, "mul")
        return dy * product, None, at(dy * x) * _product_of_others(op, x, updates, product, at, scatter)
    old, new = (op.CastLike(op.Equal(*pair), dy) for pair in ((x, y), (updates, at(y))))
    share = dy / scatter(old, new, "add")
    return old * share, None, new * at(share)


def _product_of_others(op, x, updates, product, at, scatter):
    """Return for each update the product of the others at its index: by division, if it is not zero itself."""
    none, zero = filled_like(op, x, 0), op.Equal(updates, 0)
    factor = op.Where(zero, 1, updates)
    without_zeros = at(scatter(filled_like(op, x, 1), factor, "mul"))
    zeros = at(scatter(none, op.CastLike(zero, x), "add"))
    other_zero = at(scatter(none, op.Where(zero, updates, 0), "add")) - updates  # 0: only its derivative matters
    others = op.Where(zeros > 1, op.Where(zeros > 2, 0, other_zero), 1)
    return op.Where(zero, without_zeros * others, at(product) / factor)


@gradient("OneHot", inputs=(2,))
def one_hot(op, dy, indices, depth, values, *, axis):
    """y = on at the indices, else off: each gets the sum of dY over its elements."""
    depth = op.Reshape(op.Cast(depth, to=ir.DataType.INT64), np.zeros(0, np.int64))
    index = op.Unsqueeze(op.Cast(indices, to=ir.DataType.INT64), [axis])
    positions = op.Reshape(iota(op, depth), join_shape(op, [-1], _ones(op, after(op, dy, axis))))
    on = op.Equal(op.Where(index < 0, index + depth, index), positions)
    sums = (op.ReduceSum(op.Where(on, *pair), keepdims=0) for pair in ((0, dy), (dy, 0)))
    return None, None, op.Concat(*(op.Reshape(total, [1]) for total in sums), axis=0)
