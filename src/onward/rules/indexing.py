"""Operators that read and write elements by their position.

What is read from one place several times, the derivative adds up there: at heart each rule is one ScatterElements.
Where shapes are known when the graph is built they become constants, otherwise they are computed when it runs.
"""

import math

import numpy as np
import onnx_ir as ir

from onward.constants import HALVES, constant_ints
from onward.rules.registry import gradient, no_gradient

END = np.iinfo(np.int64).max

no_gradient("the result depends on which elements are equal, not smoothly on their values", "Unique")


# ---- shapes, known or not --------------------------------------------------------------------------------------------


def extent(op, x, start=0, stop=None):
    """The dimensions of `x` from `start` to `stop`: numbers where they are known, else a tensor."""
    shape = x.value.shape
    if shape is None:
        return op.Shape(x, start=start or None, end=stop)
    some = list(shape)[start:stop]
    if all(isinstance(n, int) for n in some):
        return some
    part = op.Shape(x, start=start or None, end=stop)
    part.value.shape = ir.Shape([len(some)])
    return part


def join_shape(op, *parts):
    """One shape out of several parts."""
    if all(isinstance(part, list) for part in parts):
        return [n for part in parts for n in part]
    some = [part for part in parts if part != []]
    return op.Concat(*some, axis=0) if len(some) > 1 else some[0]


def along(op, x, axis):
    """The dimension of `x` along `axis`."""
    return extent(op, x, axis, axis + 1 if axis != -1 else None)


def after(op, x, axis):
    """The dimensions of `x` behind `axis`."""
    return extent(op, x, axis + 1) if axis != -1 else []


def positive(axis, x):
    """The axis counted from the front, if the number of axes is known."""
    return axis if x.value.shape is None else axis % max(x.value.shape.rank(), 1)


def fill(op, shape, number, like):
    """A tensor of equal numbers, of the type of `like`."""
    if like.dtype is None or (like.dtype is ir.DataType.BFLOAT16 and op.opset < 20):
        return op.CastLike(op.ConstantOfShape(shape, value=np.full(1, number, np.float32)), like)
    tensor = ir.Tensor(np.full(1, number).astype(like.dtype.numpy()), dtype=like.dtype)
    return op.ConstantOfShape(shape, value=tensor)


def filled_like(op, x, number):
    """A tensor of equal numbers, of the type and the shape of `x`."""
    return fill(op, extent(op, x), number, x).like(x.value)


def reshape_to(op, x, shape):
    """`x` with another shape, in which a zero means that there are no elements."""
    zero_free = isinstance(shape, list) and 0 not in shape
    return op.Reshape(x, shape, allowzero=None if zero_free else 1)


def merge_axes(op, x, start):
    """`x` with its axes from `start` on made one."""
    behind = extent(op, x, start)
    size = [math.prod(behind)] if isinstance(behind, list) else op.ReduceProd(behind, keepdims=1)
    result = reshape_to(op, x, join_shape(op, extent(op, x, 0, start), size))
    if x.value.shape is not None:
        result.value.shape = ir.Shape([*x.value.shape[:start], size[0] if isinstance(size, list) else None])
    return result


def split_axis(op, x, axis, count):
    """`x` with an axis made two, the first of them with `count` elements."""
    size = along(op, x, axis)
    size = [size[0] // count] if isinstance(size, list) else op.Div(size, [count])
    result = reshape_to(op, x, join_shape(op, extent(op, x, 0, axis), [count], size, extent(op, x, axis + 1)))
    if x.value.shape is not None:
        inner = size[0] if isinstance(size, list) else None
        result.value.shape = ir.Shape([*x.value.shape[:axis], count, inner, *x.value.shape[axis + 1 :]])
    return result


def shaped_like(op, value, x):
    """`value` in the shape of `x`."""
    wanted, given = x.value.shape, value.value.shape
    if wanted is None or 0 in wanted:
        return reshape_to(op, value, extent(op, x))
    if sum(not isinstance(size, int) for size in wanted) < 2:
        return reshape_to(op, value, [size if isinstance(size, int) else -1 for size in wanted])
    same = zip(wanted, [] if given is None else given, strict=False)
    kept = [a == b and not isinstance(a, int) and a.value is not None for a, b in same]
    shape = [0 if i < len(kept) and kept[i] else size for i, size in enumerate(wanted)]
    if all(isinstance(size, int) for size in shape):
        return op.Reshape(value, shape)  # 0 means that of `value`
    return reshape_to(op, value, extent(op, x))


def count_elements(op, shape):
    """The numbers of all elements of a tensor of this shape: 0, 1, 2 ..."""
    number = op.constant(np.int64(np.prod(shape))) if isinstance(shape, list) else op.ReduceProd(shape, keepdims=0)
    return reshape_to(op, op.Range(np.int64(0), number, np.int64(1)), shape)


def _ones(op, shape):
    """As many ones as a shape has dimensions."""
    if isinstance(shape, list):
        return [1] * len(shape)
    if shape.value.shape is not None and isinstance(shape.value.shape[0], int):
        return [1] * shape.value.shape[0]
    return op.ConstantOfShape(op.Shape(shape), value=np.ones(1, np.int64))


def on_axis(op, vector, x, axis):
    """The vector as a tensor of the rank of `x`, along the axis: a number, or a tensor with one."""
    if x.value.shape is not None and isinstance(axis, int):
        shape = [1] * x.value.shape.rank()
        shape[axis] = -1
        return op.Reshape(vector, shape)
    ones = op.ConstantOfShape(op.Shape(op.Shape(x)), value=np.ones(1, np.int64))
    axis = [axis] if isinstance(axis, int) else op.Reshape(axis, [1])
    return op.Reshape(vector, op.ScatterElements(ones, axis, [-1], axis=0))


def pad_axes(op, x, pads, axes=None, value=None, mode=None):
    """`x` with elements added in front of and behind some of its axes, or all of them.

    Where it is known how many axes there are, the Pad is one of all of them: ONNX Runtime moves a Transpose past a Pad
    as if it had no `axes`, and then fails.
    """
    if axes is not None and x.value.shape is not None:
        pads, axes = _pads_of_all_axes(op, pads, axes, x.value.shape.rank()), None
    last = () if value is None and axes is None else (value,) if axes is None else (value, axes)
    return op.Pad(x, pads, *last, mode=mode)


def _pads_of_all_axes(op, pads, axes, rank):
    some, over = (n if isinstance(n, list) else constant_ints(n.value) for n in (pads, axes))
    if some is not None and over is not None:
        places = [axis % rank + side * rank for side in (0, 1) for axis in over]
        known = dict(zip(places, some, strict=True))
        return [known.get(place, 0) for place in range(2 * rank)]
    front = op.constant([axis % rank for axis in over]) if over is not None else op.Mod(axes, rank)
    places = op.Concat(front, front + rank, axis=0)
    return op.ScatterElements(np.zeros(2 * rank, np.int64), places, pads)


# ---- adding at positions ---------------------------------------------------------------------------------------------


def add_at(op, shape, indices, updates, axis=0, reduction="add"):
    """Zeros with `updates` added at `indices`. In float32 for shorter types, whose sums lose digits."""
    if reduction == "add" and updates.dtype in HALVES:
        updates = op.Cast(updates, to=ir.DataType.FLOAT)
    return op.ScatterElements(fill(op, shape, 0, updates), indices, updates, axis=axis, reduction=reduction)


def add_along(op, dy, x, positions, axis, reduction="add"):
    """The derivative of y = x at `positions`, of any shape, along `axis`."""
    axis, behind = positive(axis, x), after(op, x, axis)
    shape = join_shape(op, extent(op, x, 0, axis), _size(op, positions), behind)
    index = op.Expand(op.Reshape(positions, join_shape(op, [-1], _ones(op, behind))), shape)
    return add_at(op, extent(op, x), index, dy if _is_vector(positions) else reshape_to(op, dy, shape), axis, reduction)


def _is_vector(x):
    return x.value.shape is not None and x.value.shape.rank() == 1


def _size(op, x):
    """The number of elements of `x`, as a shape."""
    shape = extent(op, x)
    return [int(np.prod(shape))] if isinstance(shape, list) else op.Reshape(op.Size(x), [1])


def undo_selection(op, dy, x, select, reduction="add"):
    """The derivative of y = select(x), which only picks elements: apply it to their numbers, and add dy at these."""
    chosen = op.Reshape(select(count_elements(op, extent(op, x))), [-1])
    chosen.value.shape = ir.Shape([None])
    return shaped_like(op, add_at(op, _size(op, x), chosen, op.Reshape(dy, [-1]), reduction=reduction), x)


# ---- gather ----------------------------------------------------------------------------------------------------------


@gradient("Gather")
def gather(op, dy, x, indices, *, axis):
    """y = x[indices]: dX[indices] += dY."""
    shape, index = indices.value.shape, constant_ints(indices.value)
    if shape is not None and shape.rank() < 2 and index is not None and len(index) == 1:
        return _put_back(op, dy if shape.rank() else op.Unsqueeze(dy, [axis]), x, index[0], axis)
    return add_along(op, dy, x, indices, axis)


def _put_back(op, dy, x, index, axis):
    """Zeros like `x`, but for dY at one known position."""
    size = along(op, x, axis)
    if isinstance(size, list):
        pads = [index % size[0], size[0] - 1 - index % size[0]]
    else:
        pads = join_shape(op, [index], size - (index + 1)) if index >= 0 else join_shape(op, size + index, [-1 - index])
    return pad_axes(op, dy, pads, [axis])


@gradient("GatherElements")
def gather_elements(op, dy, x, indices, *, axis):
    """y = x[indices]: dX[indices] += dY."""
    return add_at(op, extent(op, x), indices, dy, positive(axis, x))


@gradient("GatherND")
def gather_nd(op, dy, x, indices, *, batch_dims):
    """y = x[indices]: dX[indices] += dY, with the leading axes made one."""
    rows = _Rows(op, x, indices, batch_dims)
    return shaped_like(op, add_at(op, rows.table, rows.index, reshape_to(op, dy, rows.chosen)), x)


@gradient("Compress")
def compress(op, dy, x, condition, *, axis):
    """y = x where the condition holds along the axis: dY goes back there, the rest is 0."""
    kept = op.Squeeze(op.NonZero(condition), [0])
    kept.value.shape = ir.Shape([None])
    if axis is not None:
        return add_along(op, dy, x, kept, axis, "none")
    return shaped_like(op, add_at(op, _size(op, x), kept, dy, reduction="none"), x)


class _Rows:
    """The leading axes of `x` that tuples of indices address, seen as one axis of rows."""

    def __init__(self, op, x, indices, batch_dims=0):
        width = extent(op, indices, -1)
        if isinstance(width, list):
            head, rest = extent(op, x, 0, batch_dims + width[0]), extent(op, x, batch_dims + width[0])
        else:
            shape, depth = op.Shape(x), width + batch_dims
            head, rest = op.Slice(shape, [0], depth), op.Slice(shape, depth, [END])
        position = op.Reshape(op.GatherND(count_elements(op, head), indices, batch_dims=batch_dims or None), [-1])
        rows = [int(np.prod(head))] if isinstance(head, list) else op.ReduceProd(head, keepdims=1)
        self.table = join_shape(op, rows, rest)
        self.chosen = join_shape(op, op.Shape(position), rest)
        self.index = op.Expand(op.Reshape(position, join_shape(op, [-1], _ones(op, rest))), self.chosen)


# ---- scatter ---------------------------------------------------------------------------------------------------------


@gradient("ScatterElements")
def scatter_elements(op, dy, x, indices, updates, *, y, axis, reduction):
    """y = x with the updates written, added, multiplied or compared at the indices.

    Elements that are equally large (max, min) share dY evenly. Where several updates are written to one place the
    standard leaves open which one stays; each gets dY then. A product (mul) may have zeros among its factors; if there
    are three or more, derivatives above the second are lost.
    """
    return _scatter_derivatives(op, dy, x, indices, updates, y, positive(axis, x), reduction or "none")


@gradient("ScatterND")
def scatter_nd(op, dy, x, indices, updates, *, y, reduction):
    """As ScatterElements, with the leading axes made one."""
    rows = _Rows(op, x, indices)
    dy, data, y = (reshape_to(op, value, rows.table) for value in (dy, x, y))
    dx, _, du = _scatter_derivatives(op, dy, data, rows.index, reshape_to(op, updates, rows.chosen), y, 0, reduction)
    return shaped_like(op, dx, x), None, shaped_like(op, du, updates)


def _scatter_derivatives(op, dy, x, indices, updates, y, axis, reduction):
    """The derivatives with respect to x and, last, the updates."""

    def at(value):
        return op.Gather(value, indices) if _is_vector(indices) else op.GatherElements(value, indices, axis=axis)

    def scatter(into, what, reduction):
        return op.ScatterElements(into, indices, what, axis=axis, reduction=reduction)

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
    """For each update the product of those that go to the same place: by division, where it is not zero itself."""
    none, zero = filled_like(op, x, 0), op.Equal(updates, 0)
    factor = op.Where(zero, 1, updates)
    without_zeros = at(scatter(filled_like(op, x, 1), factor, "mul"))
    zeros = at(scatter(none, op.CastLike(zero, x), "add"))
    other_zero = at(scatter(none, op.Where(zero, updates, 0), "add")) - updates  # 0; what counts is its derivative
    others = op.Where(zeros > 1, op.Where(zeros > 2, 0, other_zero), 1)
    return op.Where(zero, without_zeros * others, at(product) / factor)


@gradient("OneHot", inputs=(2,))
def one_hot(op, dy, indices, depth, values, *, axis):
    """y = on at the indices, else off: each gets the sum of dY over its places."""
    depth = op.Reshape(op.Cast(depth, to=ir.DataType.INT64), np.zeros(0, np.int64))
    index = op.Unsqueeze(op.Cast(indices, to=ir.DataType.INT64), [axis])
    places = op.Range(np.int64(0), depth, np.int64(1))
    places = op.Reshape(places, join_shape(op, [-1], _ones(op, after(op, dy, axis))))
    on = op.Equal(op.Where(index < 0, index + depth, index), places)
    sums = (op.ReduceSum(op.Where(on, *pair), keepdims=0) for pair in ((0, dy), (dy, 0)))
    return None, None, op.Concat(*(op.Reshape(total, [1]) for total in sums), axis=0)
