"""Operators that move elements, and make tensors of a given size."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators

operators = Operators()

operators(
    Shape=lambda x, *, start, end: np.array(x.shape[start:end], np.int64),
    Size=lambda x: np.array(x.size, np.int64),
)


@operators.define("Reshape")
def reshape(x, shape, *, allowzero):
    sizes = shape.tolist()
    if not allowzero:
        sizes = [size or x.shape[i] for i, size in enumerate(sizes)]
    return x.reshape(sizes)


operators(
    Flatten=lambda x, *, axis: x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])),
    Squeeze=lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(axes.tolist())),
)


@operators.define("Unsqueeze")
def unsqueeze(x, axes):
    rank = x.ndim + axes.size
    new = {axis % rank for axis in axes.ravel().tolist()}
    old = iter(x.shape)
    return x.reshape([1 if i in new else next(old) for i in range(rank)])


operators(
    Transpose=lambda x, *, perm: x.transpose(perm),
    Concat=lambda *xs, axis: np.concatenate(xs, axis),
)


@operators.define("Split")
def split(x, sizes=None, *, axis, num_outputs, outputs):
    parts = num_outputs or outputs
    return tuple(_parts(x, -(-x.shape[axis] // parts) if sizes is None else sizes, axis))


@operators.define("Slice")
def slice_(x, starts, ends, axes=None, steps=None):
    places = [slice(None)] * x.ndim
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    for axis, start, end, step in zip(axes, starts.tolist(), ends.tolist(), steps, strict=True):
        places[axis] = slice(start, end, step)
    return x[tuple(places)]


operators(
    Expand=lambda x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist()))),
    Tile=lambda x, repeats: np.tile(x, repeats.tolist()),
)


@operators.define("Pad")
def pad(x, pads, value=None, axes=None, *, mode):
    axes = range(x.ndim) if axes is None else axes.tolist()
    begins, ends = [0] * x.ndim, [0] * x.ndim
    for axis, begin, end in zip(axes, pads[: len(axes)].tolist(), pads[len(axes) :].tolist(), strict=True):
        begins[axis], ends[axis] = begin, end
    if min(begins + ends, default=0) < 0:  # takes away
        x = x[tuple(slice(max(-b, 0), n + min(e, 0)) for b, e, n in zip(begins, ends, x.shape, strict=True))]
    widths = [(max(begin, 0), max(end, 0)) for begin, end in zip(begins, ends, strict=True)]
    if mode != "constant":
        return np.pad(x, widths, mode)
    result = np.zeros([b + n + e for n, (b, e) in zip(x.shape, widths, strict=True)], x.dtype)
    if value is not None:
        result[...] = value
    result[tuple(slice(b, b + n) for n, (b, _) in zip(x.shape, widths, strict=True))] = x
    return result


@operators.define("Trilu")
def trilu(x, k=None, *, upper):
    return (np.triu if upper else np.tril)(x, 0 if k is None else k.item())


@operators.define("ConstantOfShape")
def constant_of_shape(shape, *, value):
    result = np.zeros(shape.tolist(), np.float32 if value is None else value.dtype)
    if value is not None:
        result[...] = value.reshape(())
    return result


@operators.define("EyeLike")
def eye_like(x, *, dtype, k):
    return np.eye(*x.shape, k=k).astype(x.dtype if dtype is None else ir.DataType(dtype).numpy())


@operators.define("Range")
def range_(start, limit, delta):
    first, step = start.item(), delta.item()
    count = max(math.ceil((limit.item() - first) / step), 0)
    return (first + np.arange(count) * step).astype(start.dtype)


@operators.define("ConcatFromSequence")
def concat_from_sequence(sequence, *, axis, new_axis):
    return np.stack(sequence, axis) if new_axis else np.concatenate(sequence, axis)


@operators.define("SplitToSequence")
def split_to_sequence(x, sizes=None, *, axis, keepdims):
    parts = _parts(x, 1 if sizes is None else sizes, axis)
    return [part.squeeze(axis) for part in parts] if sizes is None and not keepdims else parts


def _parts(x, sizes, axis):
    """Pieces of these sizes, or all of one size but for the last."""
    if np.ndim(sizes) == 0:
        ends = range(int(sizes), x.shape[axis], int(sizes))
    else:
        ends = np.cumsum(sizes)[:-1]
    return np.split(x, ends, axis)
