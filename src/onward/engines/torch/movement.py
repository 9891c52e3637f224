"""Operators that move elements, and that choose elements by index."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared import movement
from onward.engines.shared.movement import cut_for_pad
from onward.engines.torch.types import TYPES, by_bits, from_array, has_type, on_numpy

operators = Operators()


@operators.define("Pad")
@by_bits
def pad(x, pads, value=None, axes=None, *, mode):
    x, widths = cut_for_pad(x, pads, axes)
    if mode != "constant":
        for axis, width in enumerate(widths):
            if any(width):
                indices = np.pad(np.arange(x.shape[axis]), width, mode)
                x = x.index_select(axis, torch.from_numpy(indices).to(x.device))
        return x
    flat = [amount for pair in reversed(widths) for amount in pair]
    if not torch.is_tensor(value):
        return F.pad(x, flat, value=value)
    return torch.where(F.pad(torch.ones_like(x, dtype=torch.bool), flat), F.pad(x, flat), value)


operators(Trilu=by_bits(movement.trilu))


@operators.define("ConstantOfShape")
def constant_of_shape(shape, *, value, device="cpu"):
    value = np.zeros(1, np.float32) if value is None else value
    if not has_type(value.dtype):
        return np.full(shape.tolist(), value)
    return from_array(value).to(device).expand(*shape.tolist(), 1).squeeze(-1)


@operators.define("EyeLike")
def eye_like(x, *, dtype, k):
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return (columns - rows[:, None] == k).to(x.dtype if dtype is None else TYPES[dtype])


@operators.define("Range")
def range_(start, limit, delta, *, device="cpu"):
    """Return start + i * delta, as the standard defines it; `torch.arange` rounds otherwise."""
    count = max(0, math.ceil((limit.item() - start.item()) / delta.item()))
    step, first = (from_array(value).to(device) for value in (delta, start))
    return (torch.arange(count, device=device) * step + first).to(first.dtype)


# ---- indexing --------------------------------------------------------------------------------------------------------


def _wrap(indices, size):
    """Return int64 indices without negative ones, which count from the end."""
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


@operators.define("Gather")
@by_bits
def gather(x, indices, *, axis):
    if not torch.is_tensor(indices):
        return x.select(axis, indices)
    indices = _wrap(indices, x.shape[axis])
    axis %= x.ndim
    y = x.index_select(axis, indices.reshape(-1))
    return y.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


@operators.define("GatherElements")
@by_bits
def gather_elements(x, indices, *, axis):
    return x.gather(axis, _wrap(indices, x.shape[axis]))


@operators.define("GatherND")
@by_bits
def gather_nd(x, indices, *, batch_dims):
    rest = indices.ndim - 1 - batch_dims
    batch = [
        torch.arange(size, device=x.device).reshape(-1, *[1] * (batch_dims - 1 - i + rest))
        for i, size in enumerate(x.shape[:batch_dims])
    ]
    return x[(*batch, *indices.long().unbind(-1))]


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operators.define("ScatterElements")
@by_bits
def scatter_elements(x, indices, updates, *, axis, reduction):
    indices = _wrap(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    if reduction == "add":
        return x.scatter_add(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, _REDUCTIONS[reduction])


@operators.define("ScatterND")
@by_bits
def scatter_nd(x, indices, updates, *, reduction):
    coordinates = indices.long().unbind(-1)
    if reduction in ("none", "add"):
        return x.index_put(coordinates, updates, accumulate=reduction == "add")
    sizes = x.shape[: len(coordinates)]
    rows = torch.zeros_like(coordinates[0])
    for coordinate, size in zip(coordinates, sizes, strict=True):
        rows = rows * size + _wrap(coordinate, size)
    flat = x.reshape(math.prod(sizes), -1)
    updates = updates.reshape(-1, flat.shape[1])
    y = flat.scatter_reduce(0, rows.reshape(-1, 1).expand_as(updates), updates, _REDUCTIONS[reduction])
    return y.reshape(x.shape)


@operators.define("OneHot")
@by_bits
def one_hot(indices, depth, values, *, axis):
    depth = int(np.ravel(depth)[0])
    axis %= indices.ndim + 1
    indices = _wrap(indices, depth).unsqueeze(axis)
    classes = torch.arange(depth, device=indices.device).reshape(-1, *[1] * (indices.ndim - 1 - axis))
    return torch.where(indices == classes, values[1], values[0])


@operators.define("Compress")
@by_bits
def compress(x, condition, *, axis):
    if axis is None:
        x, axis = x.reshape(-1), 0
    return x.index_select(axis, condition.nonzero().squeeze(1))


operators(NonZero=by_bits(lambda x: x.nonzero().T))


@operators.define("Unique")
def unique(x, *, axis, sorted):
    if axis is None:
        x, axis = x.reshape(-1), 0
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    positions = torch.arange(x.shape[axis], device=x.device)
    first = torch.zeros_like(counts).scatter_reduce(0, inverse, positions, "amin", include_self=False)
    if not sorted:
        order = first.argsort()
        values, first, counts = values.index_select(axis, order), first[order], counts[order]
        inverse = order.argsort()[inverse]
    return values, first, inverse, counts


@operators.define("NonMaxSuppression")
def non_max_suppression(*inputs, center_point_box, outputs):
    return on_numpy("NonMaxSuppression", *inputs, center_point_box=center_point_box, outputs=outputs)
