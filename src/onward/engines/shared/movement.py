"""Operators that move elements, or choose elements by index."""

from __future__ import annotations

import math

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import place_along, xp

operators = Operators()

operators(
    Shape=lambda x, *, start, end=None: np.array(x.shape[start:end], np.int64),
    Size=lambda x: np.array(math.prod(x.shape), np.int64),
)


@operators.define("Reshape")
def reshape(x, shape, *, allowzero):
    sizes = [x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(shape.tolist())]
    return xp.reshape(x, sizes)


operators(Flatten=lambda x, *, axis: xp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))))


@operators.define("Squeeze")
def squeeze(x, axes=None):
    if axes is None:
        return xp.squeeze(x)
    return xp.squeeze(x, tuple(axes.ravel().tolist())) if axes.size else x


@operators.define("Unsqueeze")
def unsqueeze(x, axes):
    rank = len(x.shape) + axes.size
    for axis in sorted(axis % rank for axis in axes.ravel().tolist()):
        x = xp.expand_dims(x, axis)
    return x


operators(Transpose=lambda x, *, perm=None: xp.transpose(x, perm), Concat=lambda *xs, axis: xp.concatenate(xs, axis))


@operators.define("Split")
def split(x, sizes=None, *, axis, num_outputs=None, outputs):
    if sizes is not None:
        return tuple(xp.split(x, np.cumsum(sizes)[:-1].tolist(), axis))
    total, count = x.shape[axis], num_outputs or outputs
    return tuple(xp.split(x, [min(-(-total // count) * i, total) for i in range(1, count)], axis))


@operators.define("Slice")
def slices(x, starts, ends, axes=None, steps=None):
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    chosen, backwards = [slice(None)] * len(x.shape), []
    for axis, start, end, step in zip(axes, starts.tolist(), ends.tolist(), steps, strict=True):
        indices = range(*slice(start, end, step).indices(x.shape[axis]))
        if step < 0:
            indices = indices[::-1]
            backwards.append(axis)
        chosen[axis] = slice(indices.start, indices.stop, indices.step) if indices else slice(0, 0)
    return xp.flip(x[tuple(chosen)], tuple(backwards)) if backwards else x[tuple(chosen)]


operators(
    Expand=lambda x, shape: xp.broadcast_to(x, np.broadcast_shapes(tuple(x.shape), tuple(shape.tolist()))),
    Tile=lambda x, repeats: xp.tile(x, repeats.tolist()),
)


def cut_for_pad(x, pads, axes):
    """Crop a tensor by negative padding. Return it and the (before, after) padding per axis."""
    amounts = [(0, 0)] * len(x.shape)
    count = len(pads) // 2
    for i, axis in enumerate(range(count) if axes is None else axes.tolist()):
        amounts[axis] = (pads[i].item(), pads[count + i].item())
    if any(min(amount) < 0 for amount in amounts):
        x = x[tuple(slice(max(-before, 0), min(after, 0) or None) for before, after in amounts)]
    return x, [(max(before, 0), max(after, 0)) for before, after in amounts]


@operators.define("Trilu")
def trilu(x, k=None, *, upper):
    return (xp.triu if upper else xp.tril)(x, 0 if k is None else int(k))


@operators.define("ConstantOfShape")
def constant_of_shape(shape, *, value=None):
    return np.full(shape.tolist(), *([0, np.float32] if value is None else [value.item(), value.dtype]))


@operators.define("Range")
def count(start, limit, delta):
    start, limit, delta = (number.reshape(()) for number in (start, limit, delta))
    steps = np.arange(max(math.ceil((limit - start) / delta), 0))
    return (start + steps * delta).astype(start.dtype)


@operators.define("ConcatFromSequence")
def concat_from_sequence(sequence, *, axis, new_axis):
    return xp.stack(sequence, axis) if new_axis else xp.concatenate(sequence, axis)


@operators.define("SplitToSequence")
def split_to_sequence(x, sizes=None, *, axis, keepdims):
    total = x.shape[axis]
    if sizes is not None and sizes.ndim:
        return list(xp.split(x, np.cumsum(sizes)[:-1].tolist(), axis))
    size = 1 if sizes is None else sizes.item()
    tensors = xp.split(x, list(range(size, total, size)), axis)
    return [xp.squeeze(tensor, axis) for tensor in tensors] if sizes is None and not keepdims else list(tensors)


# ---- indexing: negative positions count from the end -----------------------------------------------------------------


def wrap_indices(indices, size):
    return short(xp.where(indices < 0, indices + size, indices), size)


def short(indices, size):
    """Cast indices to 32 bits if they suffice, for compiled callers whose JAX has no 64 bits."""
    return indices.astype(np.int32) if size < 2**31 else indices


def along(indices, axis):
    """Return the full coordinates of `indices` along one axis, for all their elements."""
    coordinates = list(np.ix_(*map(np.arange, indices.shape)))
    coordinates[axis] = indices
    return tuple(coordinates)


def coordinates_of(indices, batch_dims=0):
    """Return index tuples along the last axis as one array per axis, batch axes first."""
    free = indices.ndim - 1 - batch_dims
    batch = (rows.reshape(*rows.shape, *[1] * free) for rows in np.ix_(*map(np.arange, indices.shape[:batch_dims])))
    return (*batch, *xp.moveaxis(indices, -1, 0))


@operators.define("GatherElements")
def gather_elements(x, indices, *, axis):
    return x[along(wrap_indices(indices, x.shape[axis]), axis)]


@operators.define("GatherND")
def gather_nd(x, indices, *, batch_dims):
    return x[coordinates_of(short(indices, max(x.shape)), batch_dims)]


@operators.define("OneHot")
def one_hot(indices, depth, values, *, axis):
    size = int(depth.item())
    classes = xp.expand_dims(xp.where(indices < 0, indices + size, indices), axis)
    hot = classes == place_along(np.arange(size).astype(classes.dtype), axis, classes.ndim)
    return xp.where(hot, values[1], values[0])


def unique_elements(x, axis, sorted):
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    if not sorted:
        order = np.argsort(first)
        values = values.take(order, axis or 0)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return values, first, inverse.reshape(-1), counts
