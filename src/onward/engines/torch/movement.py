"""Operators that move elements, or make them of nothing."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.torch.types import TYPES, by_bits, from_array, has_type

operators = Operators()
operators(
    Shape=lambda x, *, start, end: np.array(x.shape[start:end], np.int64),
    Size=lambda x: np.array(x.numel(), np.int64),
)


@operators.define("Reshape")
@by_bits
def reshape(x, shape, *, allowzero):
    sizes = shape.tolist()
    return x.reshape(sizes if allowzero else [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)])


@operators.define("Flatten")
@by_bits
def flatten(x, *, axis):
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operators.define("Squeeze")
@by_bits
def squeeze(x, axes=None):
    return x.squeeze() if axes is None else x.squeeze(tuple(np.ravel(axes).tolist()))


@operators.define("Unsqueeze")
@by_bits
def unsqueeze(x, axes):
    axes = np.ravel(axes).tolist()
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


operators(
    Transpose=by_bits(lambda x, *, perm: x.permute(perm or tuple(range(x.ndim))[::-1])),
    Concat=by_bits(lambda *inputs, axis: torch.cat(inputs, axis)),
)


@operators.define("Split")
@by_bits
def split(x, sizes=None, *, axis, num_outputs, outputs):
    return x.split(parts(x.shape[axis], outputs) if sizes is None else sizes.tolist(), axis)


def parts(size: int, count: int) -> list[int]:
    """Equal ones, but for the last."""
    part = -(-size // count)
    return [min(part, max(0, size - i * part)) for i in range(count)]


@operators.define("Slice")
@by_bits
def slices(x, starts, ends, axes=None, steps=None):
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes, steps, strict=True):
        x = _slice(x, range(*slice(start, end, step).indices(x.shape[axis])), axis)
    return x


def _slice(x, places, axis):
    if places.step < 0:
        return _slice(x, places[::-1], axis).flip(axis)
    if not places:
        return x.narrow(axis, 0, 0)
    at = [slice(None)] * x.ndim
    at[axis] = slice(places[0], places[-1] + 1, places.step)
    return x[tuple(at)]


operators(
    Expand=by_bits(lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(shape.tolist())))),
    Tile=by_bits(lambda x, repeats: x.repeat(repeats.tolist())),
)


@operators.define("Pad")
@by_bits
def pad(x, pads, value=None, axes=None, *, mode):
    axes = range(x.ndim) if axes is None else axes.tolist()
    before, after = pads[: len(axes)].tolist(), pads[len(axes) :].tolist()
    if mode != "constant":
        for axis, begin, end in zip(axes, before, after, strict=True):
            places = _places(np.arange(-begin, x.shape[axis] + end), x.shape[axis], mode)
            x = x.index_select(axis, torch.from_numpy(places).to(x.device)) if begin or end else x
        return x
    amounts = [(0, 0)] * x.ndim
    for axis, begin, end in zip(axes, before, after, strict=True):
        amounts[axis] = begin, end
    flat = [amount for pair in reversed(amounts) for amount in pair]
    if not torch.is_tensor(value):
        return F.pad(x, flat, value=value)
    return torch.where(F.pad(torch.ones_like(x, dtype=torch.bool), flat), F.pad(x, flat), value)


def _places(positions, size, mode):
    """Which elements are at positions beyond the ends of an axis."""
    if mode == "edge":
        return positions.clip(0, size - 1)
    if mode == "wrap":
        return positions % size
    period = max(2 * (size - 1), 1)
    return size - 1 - abs(size - 1 - positions % period)


@operators.define("Trilu")
@by_bits
def trilu(x, k=0, *, upper):
    return (torch.triu if upper else torch.tril)(x, k)


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
    """The first as it is, and the others from it, as the standard counts them."""
    count = max(0, math.ceil((limit.item() - start.item()) / delta.item()))
    step, first = (from_array(value).to(device) for value in (delta, start))
    return (torch.arange(count, device=device) * step + first).to(first.dtype)


@operators.define("ConcatFromSequence")
def concat_from_sequence(items, *, axis, new_axis):
    return torch.stack(items, axis) if new_axis else torch.cat(items, axis)


@operators.define("SplitToSequence")
def split_to_sequence(x, sizes=None, *, axis, keepdims):
    if sizes is None:
        return [item if keepdims else item.squeeze(axis) for item in x.split(1, axis)]
    return list(x.split(sizes.item() if sizes.ndim == 0 else sizes.tolist(), axis))
