"""Operators that move elements. Sizes are lists of integers, or tensors if unknown."""

from __future__ import annotations

import math

import keras
import numpy as np
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.types import available, dtype_of, is_float

operators = Operators()


@operators.define("Reshape")
def reshape(x, shape, *, allowzero=0):
    sizes = [x.shape[i] if _is(size, 0) and not allowzero else size for i, size in enumerate(shape)]
    sizes = [ops.shape(x)[i] if size is None else size for i, size in enumerate(sizes)]
    open_sizes = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
    if len(open_sizes) == 1 and not any(_is(size, -1) or _is(size, 0) for size in sizes):
        sizes[open_sizes[0]] = -1
    return ops.reshape(x, sizes)


def _is(size, number):
    return isinstance(size, int) and size == number


@operators.define("Flatten")
def flatten(x, *, axis=1):
    after = x.shape[axis:] if axis else x.shape
    if None in after:
        return ops.reshape(x, (math.prod(x.shape[:axis]), -1))
    return ops.reshape(x, (-1, math.prod(after)) if math.prod(after) else (x.shape[0], 0))


@operators.define("Squeeze")
def squeeze(x, axes=None):
    return ops.squeeze(x, None if axes is None else tuple(axes))


@operators.define("Unsqueeze")
def unsqueeze(x, axes):
    return ops.expand_dims(x, tuple(axes) if isinstance(axes, list) else axes)


@operators.define("Transpose")
def transpose(x, *, perm=None):
    return ops.transpose(x, perm)


@operators.define("Concat")
def join(*xs, axis):
    return ops.concatenate(xs, axis)


@operators.define("Split")
def split(x, sizes=None, *, axis=0, num_outputs=None, outputs=1):
    if sizes is None:
        count = num_outputs or outputs
        sizes = [-(-x.shape[axis] // count)] * count
    return tuple(ops.split(x, np.cumsum(sizes)[:-1].tolist(), axis)) if len(sizes) > 1 else (x,)


@operators.define("Slice")
def cut(x, starts, ends, axes=None, steps=None):
    """Return a slice. `x[...]` of PyTorch does not take negative steps."""
    for axis, start, end, step in zip(
        axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True
    ):
        if isinstance(step, int) and step < 0:
            size = x.shape[axis]
            indices = np.arange(size)[slice(start, None if end < -size else end, step)]
            x = ops.take(x, indices.astype(np.int32), axis)
        else:
            before = (slice(None),) * (axis % len(x.shape))
            x = x[(*before, slice(start, None if isinstance(end, int) and end >= 2**31 - 1 else end, step))]
    return x


@operators.define("Expand")
def expand(x, shape):
    rank = max(len(x.shape), len(shape))
    pairs = zip([1] * (rank - len(x.shape)) + list(ops.shape(x)), [1] * (rank - len(shape)) + list(shape), strict=True)
    return ops.broadcast_to(x, [own if _is(target, 1) else target for own, target in pairs])


@operators.define("Tile")
def tile(x, repeats):
    return ops.tile(x, repeats)


@operators.define("Pad")
def pad(x, pads, value=None, axes=None, *, mode="constant"):
    amounts, count = [(0, 0)] * len(x.shape), len(pads) // 2
    for i, axis in enumerate(range(len(x.shape)) if axes is None else axes):
        amounts[axis] = (pads[i], pads[count + i])
    if any(amount < 0 for pair in amounts for amount in pair):
        x = x[tuple(slice(max(-a, 0), min(b, 0) or None) for a, b in amounts)]
    amounts = [(max(a, 0), max(b, 0)) for a, b in amounts]
    if mode != "constant":
        for axis, amount in enumerate(amounts):
            if any(amount):
                x = ops.take(x, np.pad(np.arange(x.shape[axis], dtype=np.int32), amount, mode), axis)
        return x
    y = ops.pad(x, amounts)
    if value is None:
        return y
    inside = ops.pad(ops.ones_like(x, "bool"), amounts, constant_values=False)
    return ops.where(inside, y, ops.cast(ops.reshape(value, ()), dtype_of(x)))


@operators.define("Trilu")
def triangle(x, k=0, *, upper=1):
    rows, columns = (ops.arange(ops.shape(x)[axis], dtype="int32") for axis in (-2, -1))
    inside = columns - rows[:, None] >= k if upper else columns - rows[:, None] <= k
    return ops.where(inside, x, ops.zeros_like(x))


@operators.define("ConstantOfShape")
def fill(shape, *, value=None):
    """Return a filled tensor. The value is a number and its type."""
    number, dtype = value or (0.0, "float32")
    return ops.full(shape, number, dtype=available(dtype))


@operators.define("EyeLike")
def eye_like(x, *, dtype=None, k=0):
    return ops.eye(*x.shape, k=k, dtype=dtype_of(x) if dtype is None else available(dtype))


@operators.define("Range")
def numbers(start, limit, step):
    is_float = any(isinstance(number, float) for number in (start, limit, step))
    return ops.arange(start, limit, step, dtype="float32" if is_float else available("int64"))


@operators.define("ConcatFromSequence")
def join_sequence(sequence, *, axis, new_axis=0):
    return ops.stack(sequence, axis) if new_axis else ops.concatenate(sequence, axis)


@operators.define("SplitToSequence")
def split_to_sequence(x, sizes=None, *, axis=0, keepdims=1):
    """Split by a list of sizes, or by one size. The last tensor may be smaller then."""
    pieces = sizes
    if not isinstance(sizes, list):
        count, rest = divmod(x.shape[axis], sizes or 1)
        pieces = [sizes or 1] * count + [rest] * bool(rest)
    tensors = split(x, pieces, axis=axis)
    return [ops.squeeze(tensor, axis) if sizes is None and not keepdims else tensor for tensor in tensors]


# ---- indexing --------------------------------------------------------------------------------------------------------


def from_start(indices, size):
    return ops.where(indices < 0, indices + ops.cast(size, dtype_of(indices)), indices)


def with_dense_gradient(x):
    """Return x. A sparse gradient of TensorFlow would repeat rows, and optimizers would square each."""
    return x * 1 if keras.backend.backend() == "tensorflow" and is_float(x) else x


@operators.define("Gather")
def take(x, indices, *, axis=0):
    return ops.take(with_dense_gradient(x), from_start(indices, ops.shape(x)[axis]), axis)


@operators.define("GatherElements")
def take_along(x, indices, *, axis=0):
    axis %= len(x.shape)
    aligned = from_start(indices, ops.shape(x)[axis])
    rows = x[tuple(slice(None) if i == axis else slice(ops.shape(aligned)[i]) for i in range(len(x.shape)))]
    return ops.take_along_axis(rows, aligned, axis)


def flat_indices(indices, sizes):
    """Convert index tuples along the last axis to indices in the flattened indexed axes."""
    flat = 0
    for i, size in enumerate(sizes):
        size = ops.cast(size, dtype_of(indices))
        flat = flat * size + from_start(indices[..., i], size)
    return flat


def product_of(sizes):
    result = 1
    for size in sizes:
        result = result * size
    return result


@operators.define("GatherND")
def take_nd(x, indices, *, batch_dims=0):
    shape, count = list(ops.shape(x)), indices.shape[-1]
    indexed, rest = shape[batch_dims : batch_dims + count], shape[batch_dims + count :]
    flat = flat_indices(indices, indexed)
    batch = product_of(shape[:batch_dims])
    rows = ops.reshape(x, [batch * product_of(indexed), *rest])
    if batch_dims:
        first = ops.reshape(ops.arange(batch), [*shape[:batch_dims], *[1] * (len(flat.shape) - batch_dims)])
        flat = flat + ops.cast(first * product_of(indexed), dtype_of(flat))
    return ops.take(with_dense_gradient(rows), flat, 0)


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis=0, reduction="none"):
    shape, axis = list(ops.shape(x)), axis % len(x.shape)
    flat = 0
    for i, size in enumerate(shape):
        along = [-1 if j == i else 1 for j in range(len(shape))]
        own = ops.reshape(ops.arange(ops.shape(indices)[i], dtype=dtype_of(indices)), along)
        own = from_start(indices, size) if i == axis else own
        flat = flat * ops.cast(size, dtype_of(indices)) + own
    y = scatter(ops.reshape(x, [-1]), ops.reshape(flat, [-1]), ops.reshape(updates, [-1]), reduction)
    return ops.reshape(y, shape)


def scatter(x, indices, updates, reduction):
    """Replace rows of a table, or combine them with updates."""
    names = {"none": None, "add": "add", "max": "max", "min": "min", "mul": "mul"}
    return ops.scatter_update(x, indices[:, None], updates, reduction=names[reduction])


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction="none"):
    shape, count = list(ops.shape(x)), indices.shape[-1]
    flat = ops.reshape(flat_indices(indices, shape[:count]), [-1])
    rows = ops.reshape(x, [product_of(shape[:count]), *shape[count:]])
    new = ops.reshape(updates, [-1, *shape[count:]])
    return ops.reshape(scatter(rows, flat, new, reduction), shape)


@operators.define("OneHot")
def one_hot(indices, depth, values, *, axis=-1):
    size = depth[0] if isinstance(depth, list) else depth
    classes = ops.expand_dims(from_start(indices, size), axis)
    axis %= len(classes.shape)
    every = np.arange(size).reshape([-1 if i == axis else 1 for i in range(len(classes.shape))])
    return ops.where(classes == ops.convert_to_tensor(every, dtype_of(classes)), values[1], values[0])
