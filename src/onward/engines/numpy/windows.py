"""Windows that slide over the spatial axes of a tensor: what convolutions and pools have in common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class Windows:
    """Where windows are, along each spatial axis."""

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    begins: Sequence[int]
    """How far the first window begins before the first element."""
    counts: Sequence[int]

    @property
    def extents(self) -> list[int]:
        """From the first element of a window to its last."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    @property
    def covered(self) -> list[int]:
        """From the first element of the first window to the last of the last."""
        return [(n - 1) * s + e for n, s, e in zip(self.counts, self.strides, self.extents, strict=True)]

    def of(self, x, fill=0):
        """All windows of an array: [..., *counts, *kernel], with `fill` outside of it."""
        rank = len(self.kernel)
        axes = tuple(range(x.ndim - rank, x.ndim))
        padded = np.full((*x.shape[:-rank], *self.covered), fill, x.dtype)
        inside = [min(size, c - b) for size, b, c in zip(x.shape[-rank:], self.begins, self.covered, strict=True)]
        target = tuple(slice(b, b + n) for b, n in zip(self.begins, inside, strict=True))
        padded[(..., *target)] = x[(..., *map(slice, inside))]
        found = np.lib.stride_tricks.sliding_window_view(padded, self.extents, axes)
        return found[(..., *(slice(None, None, s) for s in (*self.strides, *self.dilations)))]

    def sum(self, values, sizes):
        """The reverse: an array of these sizes, to which each window [..., *counts, *kernel] adds its values."""
        rank = len(self.kernel)
        room = [max(c, b + n) for c, b, n in zip(self.covered, self.begins, sizes, strict=True)]
        result = np.zeros((*values.shape[: -2 * rank], *room), values.dtype)
        for place in np.ndindex(*self.kernel):
            starts = [p * d for p, d in zip(place, self.dilations, strict=True)]
            ends = [b + (n - 1) * s + 1 for b, n, s in zip(starts, self.counts, self.strides, strict=True)]
            result[(..., *map(slice, starts, ends, self.strides))] += values[(..., *place)]
        return result[(..., *(slice(b, b + n) for b, n in zip(self.begins, sizes, strict=True)))]


def windows(
    sizes: Sequence[int],
    kernel: Sequence[int],
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    ceil_mode: int = 0,
) -> Windows:
    """The windows over axes of these sizes, as attributes say."""
    rank = len(kernel)
    made = Windows(kernel, strides or [1] * rank, dilations or [1] * rank, [0] * rank, [0] * rank)
    begins, ends = halves(pads, rank)
    if auto_pad.startswith("SAME"):
        made.counts = [math.ceil(n / s) for n, s in zip(sizes, made.strides, strict=True)]
        missing = [max(c - n, 0) for c, n in zip(made.covered, sizes, strict=True)]
        made.begins = [m // 2 if auto_pad == "SAME_UPPER" else m - m // 2 for m in missing]
        return made
    if auto_pad != "VALID":
        made.begins = begins
    else:
        ends = [0] * rank
    made.counts = [
        _count(n, b, e, extent, s, ceil_mode)
        for n, b, e, extent, s in zip(sizes, made.begins, ends, made.extents, made.strides, strict=True)
    ]
    return made


def halves(pads: Sequence[int] | None, rank: int) -> tuple[Sequence[int], Sequence[int]]:
    """What is added at the beginnings and at the ends."""
    return (pads[:rank], pads[rank:]) if pads else ([0] * rank, [0] * rank)


def _count(size: int, begin: int, end: int, extent: int, stride: int, ceil_mode: int) -> int:
    room = size + begin + end - extent
    if not ceil_mode:
        return room // stride + 1
    count = math.ceil(room / stride) + 1
    return count - ((count - 1) * stride >= size + begin)  # none begins beyond the end
