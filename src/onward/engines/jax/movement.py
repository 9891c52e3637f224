"""Shapes, and elements that move."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.jax.values import dtype_of

operators = Operators()
operators(
    Shape=lambda x, *, start, end=None: np.array(x.shape[start:end], np.int64),
    Size=lambda x: np.array(x.size, np.int64),
)


@operators.define("Reshape")
def reshape(x, shape, *, allowzero):
    sizes = [x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(shape.tolist())]
    return x.reshape(sizes)


@operators.define("Flatten")
def flatten(x, *, axis):
    before = math.prod(x.shape[:axis])
    return x.reshape(before, math.prod(x.shape[axis:]))


operators(
    Squeeze=lambda x, axes=None: jnp.squeeze(x, None if axes is None else tuple(axes.tolist())),
    Unsqueeze=lambda x, axes: jnp.expand_dims(x, tuple(np.atleast_1d(axes).tolist())),
    Transpose=lambda x, *, perm=None: jnp.transpose(x, perm),
    Concat=lambda *xs, axis: jnp.concatenate(xs, axis),
)


@operators.define("Split")
def split(x, sizes=None, *, axis, num_outputs=None, outputs):
    if sizes is None:
        count = num_outputs or outputs
        each = -(-x.shape[axis] // count)
        places = [each * i for i in range(1, count)]
    else:
        places = np.cumsum(sizes)[:-1].tolist()
    return tuple(jnp.split(x, places, axis))


@operators.define("Slice")
def cut(x, starts, ends, axes=None, steps=None):
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    kept = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts.tolist(), ends.tolist(), steps, strict=True):
        end = None if step < 0 and end < -x.shape[axis] else end
        kept[axis] = slice(start, end, step)
    return x[tuple(kept)]


operators(
    Expand=lambda x, shape: jnp.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist()))),
    Tile=lambda x, repeats: jnp.tile(x, repeats.tolist()),
)


@operators.define("Pad")
def pad(x, pads, constant=None, axes=None, *, mode):
    amounts = [(0, 0)] * x.ndim
    count = len(pads) // 2
    for i, axis in enumerate(range(x.ndim) if axes is None else axes.tolist()):
        amounts[axis] = (pads[i].item(), pads[count + i].item())
    if mode == "constant":
        value = jnp.zeros((), x.dtype) if constant is None else constant.reshape(()).astype(x.dtype)
        return lax.pad(x, value, [(*amount, 0) for amount in amounts])
    cuts = (slice(max(-a, 0), size - max(-b, 0)) for (a, b), size in zip(amounts, x.shape, strict=True))
    return jnp.pad(x[tuple(cuts)], [(max(a, 0), max(b, 0)) for a, b in amounts], mode=mode)


@operators.define("Trilu")
def trilu(x, k=None, *, upper):
    return (jnp.triu if upper else jnp.tril)(x, 0 if k is None else k.item())


@operators.define("ConstantOfShape")
def constant_of_shape(shape, *, value=None):
    return np.full(shape.tolist(), *([0, np.float32] if value is None else [value.item(), value.dtype]))


@operators.define("EyeLike")
def eye_like(x, *, dtype=None, k):
    return jnp.eye(*x.shape, k=k, dtype=x.dtype if dtype is None else dtype_of(dtype))


@operators.define("Range")
def steps(start, limit, delta):
    start, limit, delta = (number.reshape(()) for number in (start, limit, delta))
    count = max(math.ceil((limit - start) / delta), 0)
    return (start + np.arange(count) * delta).astype(start.dtype)


@operators.define("ConcatFromSequence")
def concat_from_sequence(sequence, *, axis, new_axis):
    return jnp.stack(sequence, axis) if new_axis else jnp.concatenate(sequence, axis)


@operators.define("SplitToSequence")
def split_to_sequence(x, sizes=None, *, axis, keepdims):
    total = x.shape[axis]
    if sizes is None:
        parts = jnp.split(x, total, axis)
        return parts if keepdims else [jnp.squeeze(part, axis) for part in parts]
    places = np.cumsum(sizes)[:-1] if sizes.ndim else np.arange(sizes.item(), total, sizes.item())
    return jnp.split(x, places.tolist(), axis)
