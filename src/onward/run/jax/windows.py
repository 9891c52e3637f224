"""Where windows lie: for convolutions and pools."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax


def paddings(auto_pad, pads, sizes, kernel, strides, dilations):
    """How much is added (before, after) each axis."""
    count = len(sizes)
    if auto_pad in ("NOTSET", "VALID"):
        pads = pads if pads and auto_pad == "NOTSET" else [0] * 2 * count
        return list(zip(pads[:count], pads[count:], strict=True))
    reaches = map(reach, kernel, dilations)
    totals = [
        max((math.ceil(size / stride) - 1) * stride + covered - size, 0)
        for size, stride, covered in zip(sizes, strides, reaches, strict=True)
    ]
    return [halves(total, larger_last=auto_pad == "SAME_UPPER") for total in totals]


def halves(total, *, larger_last):
    small, large = total // 2, total - total // 2
    return (small, large) if larger_last else (large, small)


def reach(size, dilation):
    """How many elements a window covers."""
    return (size - 1) * dilation + 1


def with_ceiling(amounts, sizes, kernel, strides, dilations):
    """More at the end, so that windows that are not full count; none that starts in what is added there."""
    more = []
    for (before, after), size, length, stride, dilation in zip(
        amounts, sizes, kernel, strides, dilations, strict=True
    ):
        covered = reach(length, dilation)
        count = math.ceil((before + size + after - covered) / stride) + 1
        count -= (count - 1) * stride >= before + size
        more.append((before, max(after, (count - 1) * stride + covered - before - size)))
    return more


def counts(size, before, after, length, stride, dilation, *, padded):
    """How many elements each window along an axis has; with those of `padded` = (before, after)."""
    inside = np.zeros(before + size + after, np.int64)
    inside[before - padded[0] : before + size + padded[1]] = 1
    starts = np.arange(0, len(inside) - reach(length, dilation) + 1, stride)
    return inside[starts[:, None] + dilation * np.arange(length)].sum(1)


def windows(x, kernel, strides, dilations, amounts, fill):
    """The elements of each window along a new last axis."""
    padded = lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * 2 + [(*amount, 0) for amount in amounts])
    sizes = [
        (whole - reach(length, dilation)) // stride + 1
        for whole, length, stride, dilation in zip(padded.shape[2:], kernel, strides, dilations, strict=True)
    ]
    found = []
    for place in itertools.product(*map(range, kernel)):
        starts = [i * dilation for i, dilation in zip(place, dilations, strict=True)]
        ends = [start + (n - 1) * stride + 1 for start, n, stride in zip(starts, sizes, strides, strict=True)]
        found.append(lax.slice(padded, (0, 0, *starts), (*padded.shape[:2], *ends), (1, 1, *strides)))
    return jnp.stack(found, -1)
