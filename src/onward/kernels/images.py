"""Resize as tables, which give the source pixels and weights of each new pixel; sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from onward.constants import constant_ints, constant_tensor
from onward.kernels.patterns import Constants, producer_of
from onward.model.core import values
from onward.model.walk import attributes
from onward.shapes import Dims, dims
from onward.standard import is_standard
from onward.transform.context import Context
from onward.transform.padding import same_padding
from onward.transform.types import fill_in_types


class Table(NamedTuple):
    """Source indices and their weights per position along an axis, [positions, 1 or 2]."""

    sources: np.ndarray
    parts: np.ndarray


def write_out_scales(context: Context) -> None:
    """Make constants of computed scales, from which shape inference gets later sizes."""
    replaced = False
    for node in context.graph:
        scales = node.inputs[2] if node.op_type == "Resize" and is_standard(node) and len(node.inputs) > 2 else None
        constant = Constants().array(scales)
        if constant is not None and constant_tensor(scales) is None:
            with context.before(node) as op:
                node.replace_input_with(2, op.constant(constant).value)
            replaced = True
    if replaced:
        fill_in_types(context.model, values(context.graph))


def tables_of(node: ir.Node, opset: int) -> list[Table] | None:
    """Return the table of a Resize per spatial axis; None if it is unknown, or a complex mode."""
    settings, before, after = attributes(node, opset), dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None or not _is_simple(settings):
        return None
    scales = _scales(node, settings, len(before))
    if scales is None or not _keeps_channels(node, settings, scales):
        return None
    tables = []
    for axis in range(2, len(before)):
        old, new = before[axis], after[axis]
        if not isinstance(old, int) or not isinstance(new, int) or old == 0:
            return None
        tables.append(_table(settings, old, new, scales.get(axis, np.float32(new) / np.float32(old))))
    return tables


def _is_simple(settings: Mapping[str, Any]) -> bool:
    is_plain = not settings["antialias"] and settings["keep_aspect_ratio_policy"] == "stretch"
    return is_plain and settings["mode"] in _MODES and settings["coordinate_transformation_mode"] in _POSITIONS


def _scales(node: ir.Node, settings: Mapping[str, Any], rank: int) -> dict[int, np.float32] | None:
    """Return the given scales by axis; empty if there are sizes; None if they are unknown."""
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return {}
    scales = Constants().array(node.inputs[2])
    if scales is None:
        return None
    axes = range(rank) if settings["axes"] is None else [axis % rank for axis in settings["axes"]]
    return dict(zip(axes, scales, strict=True))


def _keeps_channels(node: ir.Node, settings: Mapping[str, Any], scales: Mapping[int, np.float32]) -> bool:
    """True if the numbers of images and channels stay the same, even if they are unknown."""
    before, after = (dims(value) or () for value in (node.inputs[0], node.outputs[0]))
    if scales:
        return all(axis > 1 or scale == 1 for axis, scale in scales.items())
    if settings["axes"] is not None:
        return all(axis % len(before) > 1 for axis in settings["axes"])
    return before[:2] == after[:2] or _begins_with_shape(node.inputs[3], node.inputs[0])


def _begins_with_shape(sizes: ir.Value | None, x: ir.Value | None) -> bool:
    """True if sizes are computed as the first two sizes of `x` and others, as exporters do."""
    joined = producer_of(sizes, "Concat")
    cut = producer_of(joined.inputs[0], "Slice") if joined is not None else None
    shape = producer_of(cut.inputs[0], "Shape") if cut is not None else None
    if cut is None or shape is None or shape.attributes:
        return False
    return shape.inputs[0] is x and [constant_ints(value) for value in cut.inputs[1:]] == [(0,), (2,), (0,)]


def _table(settings: Mapping[str, Any], old: int, new: int, scale: np.float32) -> Table:
    """Return the table of an axis, in float32 as in ONNX Runtime: the last digit decides ties."""
    targets = np.arange(new, dtype=np.float32)
    if scale != 1:
        targets = _POSITIONS[settings["coordinate_transformation_mode"]](
            targets, scale, np.float32(old), np.float32(new)
        )
    return _MODES[settings["mode"]](targets, old, settings["nearest_mode"])


def _nearest(positions: np.ndarray, size: int, rounding: str) -> Table:
    sources = np.clip(_ROUNDINGS[rounding](positions.astype(np.float64)), 0, size - 1).astype(np.int64)[:, None]
    return Table(sources, np.ones(sources.shape, np.float32))


def _linear(positions: np.ndarray, size: int, rounding: str) -> Table:
    positions = np.clip(positions, np.float32(0), np.float32(size - 1))
    left = positions.astype(np.int64)
    right = np.minimum(left + 1, size - 1)
    parts = np.stack([right - positions, positions - left], 1).astype(np.float32)
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
_POSITIONS: dict[str, Callable[[np.ndarray, np.float32, np.float32, np.float32], np.ndarray]] = {
    "asymmetric": lambda x, scale, old, new: x / scale,
    "half_pixel": lambda x, scale, old, new: (x + _HALF) / scale - _HALF,
    "pytorch_half_pixel": lambda x, scale, old, new: (x + _HALF) / scale - _HALF if new > 1 else 0 * x,
    "align_corners": lambda x, scale, old, new: x * (old - 1) / (new - 1) if new > 1 else 0 * x,
}
"""Positions of new pixels in the old image."""


# ---- windows that slide over images ----------------------------------------------------------------------------------
#
# Kernels take them along two axes, with pads that are numbers. A signal, [N, C, W], is an image of one line.


T = TypeVar("T")


def window_of(settings: Mapping[str, Any], kernel: Sequence[int], sizes: Dims) -> dict[str, list[int]] | None:
    """Return the window of the attributes on an image of these sizes; None if pads are unknown."""
    strides, dilations = (list(settings.get(name) or [1] * len(kernel)) for name in ("strides", "dilations"))
    pads = _pads(settings, kernel, strides, dilations, sizes[2:])
    if pads is None:
        return None
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    return {
        "kernel_shape": of_two_axes(kernel, 1),
        "strides": of_two_axes(strides, 1),
        "dilations": of_two_axes(dilations, 1),
        "pads": [*of_two_axes(before, 0), *of_two_axes(after, 0)],
    }


def of_two_axes(values_: Sequence[T], default: T) -> list[T]:
    """Return values of two spatial axes; a signal gets the default for its height."""
    return [*[default] * (2 - len(values_)), *values_]


def _pads(
    settings: Mapping[str, Any], kernel: Sequence[int], strides: list[int], dilations: list[int], sizes: Dims
) -> list[int] | None:
    if settings["auto_pad"] == "NOTSET":
        return list(settings["pads"] or [0] * 2 * len(kernel))
    if settings["auto_pad"] == "VALID":
        return [0] * 2 * len(kernel)
    lengths = [n for n in sizes if isinstance(n, int)]
    if len(lengths) < len(sizes):
        return None
    axes = zip(lengths, kernel, strides, dilations, strict=True)
    pads = [same_padding(size, (n - 1) * gap + 1, stride, settings["auto_pad"]) for size, n, stride, gap in axes]
    return [n for side in zip(*pads, strict=True) for n in side]
