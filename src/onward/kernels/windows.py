"""How windows slide over images, as kernels want to know it: along two axes, with pads that are numbers.

A signal, [N, C, W], is an image of one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from onward.shapes import Dims
from onward.transform.padding import same_padding

T = TypeVar("T")


def window_of(given: Mapping[str, Any], kernel: Sequence[int], sizes: Dims) -> dict[str, list[int]] | None:
    """The window that attributes describe, on an image of these sizes; None if its pads are known only when it runs."""
    strides, dilations = (list(given.get(name) or [1] * len(kernel)) for name in ("strides", "dilations"))
    pads = _pads(given, kernel, strides, dilations, sizes[2:])
    if pads is None:
        return None
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    return {
        "kernel_shape": of_two_axes(kernel, 1),
        "strides": of_two_axes(strides, 1),
        "dilations": of_two_axes(dilations, 1),
        "pads": [*of_two_axes(before, 0), *of_two_axes(after, 0)],
    }


def of_two_axes(each: Sequence[T], usual: T) -> list[T]:
    """What there is of each spatial axis, with something for the height of a signal."""
    return [*[usual] * (2 - len(each)), *each]


def _pads(
    given: Mapping[str, Any], kernel: Sequence[int], strides: list[int], dilations: list[int], sizes: Dims
) -> list[int] | None:
    if given["auto_pad"] == "NOTSET":
        return list(given["pads"] or [0] * 2 * len(kernel))
    if given["auto_pad"] == "VALID":
        return [0] * 2 * len(kernel)
    known = [n for n in sizes if isinstance(n, int)]
    if len(known) < len(sizes):
        return None
    numbers = zip(known, kernel, strides, dilations, strict=True)
    pads = [same_padding(size, (n - 1) * gap + 1, stride, given["auto_pad"]) for size, n, stride, gap in numbers]
    return [n for side in zip(*pads, strict=True) for n in side]
