"""Padding and windows of convolutions and pools. Numbers are per spatial axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onward.transform.padding import same_padding

Ints = Sequence[int]
Pair = tuple[int, int]


def paddings(auto_pad: str, pads: Ints | None, sizes: Ints, kernel: Ints, strides: Ints, dilations: Ints) -> list[Pair]:
    """Return the (before, after) padding per axis."""
    count = len(sizes)
    if auto_pad in ("NOTSET", "VALID"):
        pads = pads if pads and auto_pad == "NOTSET" else [0] * 2 * count
        return list(zip(pads[:count], pads[count:], strict=True))
    return [
        same_padding(size, reach(length, dilation), stride, auto_pad)
        for size, length, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True)
    ]


def cut_off(
    auto_pad: str, pads: Ints | None, sizes: Ints, kernel: Ints, strides: Ints, dilations: Ints, more: Ints,
    output_shape: Ints | None,
) -> list[Pair]:  # fmt: skip
    """Return the (before, after) cropping per axis of a transposed convolution."""
    if not output_shape and auto_pad.startswith("SAME"):
        output_shape = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    if not output_shape:
        return paddings(auto_pad, pads, sizes, kernel, strides, dilations)
    reaches = map(reach, kernel, dilations)
    full = [(n - 1) * s + covered + m for n, s, covered, m in zip(sizes, strides, reaches, more, strict=True)]
    totals = [size - target for size, target in zip(full, output_shape[-len(sizes) :], strict=True)]
    return [halves(total, larger_last=auto_pad == "SAME_UPPER") for total in totals]


def halves(total: int, *, larger_last: bool) -> Pair:
    small, large = total // 2, total - total // 2
    return (small, large) if larger_last else (large, small)


def reach(length: int, dilation: int) -> int:
    """Return the extent of a window in elements."""
    return (length - 1) * dilation + 1


def with_ceiling(amounts: Sequence[Pair], sizes: Ints, kernel: Ints, strides: Ints, dilations: Ints) -> list[Pair]:
    """Return padding for `ceil_mode`: more at the end, unless a window would start in the padding."""
    more = []
    for (before, after), size, length, stride, dilation in zip(amounts, sizes, kernel, strides, dilations, strict=True):
        covered = reach(length, dilation)
        count = math.ceil((before + size + after - covered) / stride) + 1
        count -= (count - 1) * stride >= before + size
        more.append((before, max(after, (count - 1) * stride + covered - before - size)))
    return more


def counts(size: int, amount: Pair, counted: Pair, length: int, stride: int, dilation: int) -> np.ndarray:
    """Return the number of elements of each window along an axis, with the `counted` padding."""
    before, after = amount
    inside = np.zeros(before + size + after, np.int64)
    inside[before - counted[0] : before + size + counted[1]] = 1
    starts = np.arange(0, len(inside) - reach(length, dilation) + 1, stride)
    return inside[starts[:, None] + dilation * np.arange(length)].sum(1)
