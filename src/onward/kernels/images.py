"""Images in other sizes, as tables (of which lines and columns each new one is mixed, and to what parts); windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from onward.constants import constant_ints, constant_tensor
from onward.kernels.patterns import Known, made_by
from onward.model.core import values
from onward.model.walk import attributes
from onward.shapes import Dims, dims
from onward.standard import is_standard
from onward.transform.context import Context
from onward.transform.padding import same_padding
from onward.transform.types import fill_in_types


class Table(NamedTuple):
    """Of each place along an axis, [places, 1 or 2]."""

    sources: np.ndarray
    parts: np.ndarray


def write_out_scales(context: Context) -> None:
    """Make constants of scales that an exporter has put together of some: sizes that follow are inferred from them."""
    replaced = False
    for node in context.graph:
        scales = node.inputs[2] if node.op_type == "Resize" and is_standard(node) and len(node.inputs) > 2 else None
        known = Known().array(scales)
        if known is not None and constant_tensor(scales) is None:
            with context.before(node) as op:
                node.replace_input_with(2, op.constant(known).value)
            replaced = True
    if replaced:
        fill_in_types(context.model, values(context.graph))


def tables_of(node: ir.Node, opset: int) -> list[Table] | None:
    """What a Resize does along each spatial axis; None if that is not known, or not only there, or not so simple."""
    given, before, after = attributes(node, opset), dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None or not _is_simple(given):
        return None
    scales = _scales(node, given, len(before))
    if scales is None or not _keeps_channels(node, given, scales):
        return None
    tables = []
    for axis in range(2, len(before)):
        old, new = before[axis], after[axis]
        if not isinstance(old, int) or not isinstance(new, int) or old == 0:
            return None
        tables.append(_table(given, old, new, scales.get(axis, np.float32(new) / np.float32(old))))
    return tables


def _is_simple(given: Mapping[str, Any]) -> bool:
    is_plain = not given["antialias"] and given["keep_aspect_ratio_policy"] == "stretch"
    return is_plain and given["mode"] in _MODES and given["coordinate_transformation_mode"] in _PLACES


def _scales(node: ir.Node, given: Mapping[str, Any], rank: int) -> dict[int, np.float32] | None:
    """The scales that are given, by axis: none if sizes are, which say it all; None if they are not known."""
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return {}
    scales = Known().array(node.inputs[2])
    if scales is None:
        return None
    axes = range(rank) if given["axes"] is None else [axis % rank for axis in given["axes"]]
    return dict(zip(axes, scales, strict=True))


def _keeps_channels(node: ir.Node, given: Mapping[str, Any], scales: Mapping[int, np.float32]) -> bool:
    """Whether images and channels stay as many, also where it is not known how many there are."""
    before, after = (dims(value) or () for value in (node.inputs[0], node.outputs[0]))
    if scales:
        return all(axis > 1 or scale == 1 for axis, scale in scales.items())
    if given["axes"] is not None:
        return all(axis % len(before) > 1 for axis in given["axes"])
    return before[:2] == after[:2] or _begins_with_shape(node.inputs[3], node.inputs[0])


def _begins_with_shape(sizes: ir.Value | None, x: ir.Value | None) -> bool:
    """Whether sizes are the first two of an image's and others, in the words of an exporter."""
    joined = made_by(sizes, "Concat")
    cut = made_by(joined.inputs[0], "Slice") if joined is not None else None
    shape = made_by(cut.inputs[0], "Shape") if cut is not None else None
    if cut is None or shape is None or shape.attributes:
        return False
    return shape.inputs[0] is x and [constant_ints(value) for value in cut.inputs[1:]] == [(0,), (2,), (0,)]


def _table(given: Mapping[str, Any], old: int, new: int, scale: np.float32) -> Table:
    """In float32, as ONNX Runtime does: what is nearest may depend on the last digit."""
    targets = np.arange(new, dtype=np.float32)
    if scale != 1:
        targets = _PLACES[given["coordinate_transformation_mode"]](targets, scale, np.float32(old), np.float32(new))
    return _MODES[given["mode"]](targets, old, given["nearest_mode"])


def _nearest(places: np.ndarray, size: int, rounding: str) -> Table:
    sources = np.clip(_ROUNDINGS[rounding](places.astype(np.float64)), 0, size - 1).astype(np.int64)[:, None]
    return Table(sources, np.ones(sources.shape, np.float32))


def _linear(places: np.ndarray, size: int, rounding: str) -> Table:
    places = np.clip(places, np.float32(0), np.float32(size - 1))
    left = places.astype(np.int64)
    right = np.minimum(left + 1, size - 1)
    parts = np.stack([right - places, places - left], 1).astype(np.float32)
    parts[left == right] = 0.5
    return Table(np.stack([left, right], 1), parts)


_MODES: dict[str, Callable[[np.ndarray, int, str], Table]] = {"nearest": _nearest, "linear": _linear}
_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
_HALF = np.float32(0.5)
_PLACES: dict[str, Callable[[np.ndarray, np.float32, np.float32, np.float32], np.ndarray]] = {
    "asymmetric": lambda x, scale, old, new: x / scale,
    "half_pixel": lambda x, scale, old, new: (x + _HALF) / scale - _HALF,
    "pytorch_half_pixel": lambda x, scale, old, new: (x + _HALF) / scale - _HALF if new > 1 else 0 * x,
    "align_corners": lambda x, scale, old, new: x * (old - 1) / (new - 1) if new > 1 else 0 * x,
}
"""Where places of the new image are in the old one."""


# ---- windows that slide over images ----------------------------------------------------------------------------------
#
# Kernels take them along two axes, with pads that are numbers. A signal, [N, C, W], is an image of one line.


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
