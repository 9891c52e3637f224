"""Shapes, and elements that move. What says how large something is, is a list of whole numbers.

On TensorFlow a number that nobody knows yet is a tensor.
"""

from __future__ import annotations

import math

import numpy as np
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.values import available, dtype_of

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
def parts(x, sizes=None, *, axis=0, num_outputs=None, outputs=1):
    if sizes is None:
        count = num_outputs or outputs
        sizes = [-(-x.shape[axis] // count)] * count
    return tuple(ops.split(x, np.cumsum(sizes)[:-1].tolist(), axis)) if len(sizes) > 1 else (x,)


@operators.define("Slice")
def cut(x, starts, ends, axes=None, steps=None):
    """On PyTorch, steps only go forward."""
    for axis, start, end, step in zip(
        axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True
    ):
        if isinstance(step, int) and step < 0:
            size = x.shape[axis]
            places = np.arange(size)[slice(start, None if end < -size else end, step)]
            x = ops.take(x, places.astype(np.int32), axis)
        else:
            before = (slice(None),) * (axis % len(x.shape))
            x = x[(*before, slice(start, None if isinstance(end, int) and end >= 2**31 - 1 else end, step))]
    return x


@operators.define("Expand")
def expand(x, shape):
    rank = max(len(x.shape), len(shape))
    pairs = zip([1] * (rank - len(x.shape)) + list(ops.shape(x)), [1] * (rank - len(shape)) + list(shape), strict=True)
    return ops.broadcast_to(x, [own if _is(wanted, 1) else wanted for own, wanted in pairs])


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
    kept = columns - rows[:, None] >= k if upper else columns - rows[:, None] <= k
    return ops.where(kept, x, ops.zeros_like(x))


@operators.define("ConstantOfShape")
def fill(shape, *, value=None):
    """The value is a number and its type."""
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
def sequence_of_parts(x, sizes=None, *, axis=0, keepdims=1):
    """Parts of given sizes, or of one size but for the last, which may be smaller."""
    if not isinstance(sizes, list):
        whole, rest = divmod(x.shape[axis], sizes or 1)
        pieces = parts(x, [sizes or 1] * whole + [rest] * bool(rest), axis=axis)
    else:
        pieces = parts(x, sizes, axis=axis)
    return [ops.squeeze(piece, axis) if sizes is None and not keepdims else piece for piece in pieces]
