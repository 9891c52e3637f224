"""Ranges that are rounded to: what the file says about them, and the scales and zero points that they lead to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import constant_tensor
from onward.model.state import with_tags
from onward.recipe.quantize.settings import Settings, levels, most_symmetric
from onward.transform.quantised import RANGE_KEY, STORED_KEY

LEAST_SCALE = float(np.finfo(np.float32).eps)
"""Scales are not smaller than that, as in PyTorch."""


def described(settings: Settings, known: bool = False) -> str:
    """What the metadata of a QuantizeLinear says about its range, which may be known already."""
    facts: dict[str, Any] = {"ranges": settings.ranges}
    if settings.ranges == "moving":
        facts["momentum"] = settings.momentum
    if settings.percentile is not None:
        facts["percentile"] = settings.percentile
    if known:
        facts["known"] = True
    elif settings.calibrate:
        facts["calibrate"] = settings.calibrate
    return json.dumps(facts)


def tag_scale(tensor: ir.TensorProtocol, settings: Settings, weight: str | None = None) -> ir.TensorProtocol:
    """A scale, with what it is in training."""
    role = "parameter" if settings.ranges == "lsq" else "statistics"
    return with_tags(tensor, role=role, param=weight, slot="scale")


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding:
    """A QuantizeLinear whose scale changes in training."""

    node: ir.Node
    facts: Mapping[str, Any]

    @property
    def x(self) -> ir.Value:
        return self._input(0)

    @property
    def scale(self) -> ir.Value:
        return self._input(1)

    @property
    def zero(self) -> ir.Value:
        return self._input(2)

    @property
    def dtype(self) -> ir.DataType:
        tensor = constant_tensor(self.zero)
        assert tensor is not None
        return tensor.dtype

    @property
    def is_weight(self) -> bool:
        return STORED_KEY in self.node.metadata_props

    @property
    def is_learned(self) -> bool:
        return bool(self.facts["ranges"] == "lsq")

    @property
    def is_known(self) -> bool:
        """Whether the range was in the file from the beginning."""
        return bool(self.facts.get("known"))

    @property
    def limits(self) -> tuple[str, str]:
        """The names of the state that holds the range."""
        return f"{self.x.name}/min", f"{self.x.name}/max"

    def _input(self, index: int) -> ir.Value:
        value = self.node.inputs[index]
        assert value is not None
        return value


def roundings(graph: ir.Graph) -> Iterator[Rounding]:
    for node in graph:
        if is_observed(node):
            yield Rounding(node, json.loads(node.metadata_props[RANGE_KEY]))


def is_observed(node: ir.Node) -> bool:
    return RANGE_KEY in node.metadata_props and node.op_type == "QuantizeLinear"


# ---- scales ----------------------------------------------------------------------------------------------------------


def parameters_of(op: Builder, low: Expr, high: Expr, dtype: ir.DataType) -> tuple[Expr, Expr]:
    """Scale and zero point of a range, which is made to hold 0; as PyTorch's observers have them."""
    first, last = levels(dtype)
    low, high = op.Min(low, 0.0), op.Max(high, 0.0)
    scale = op.Max((high - low) / (last - first), LEAST_SCALE)
    level = op.Min(op.Max(first - op.Round(low / scale), first), last)
    return scale, op.Cast(level, to=dtype)


def parameters_as_numbers(low: float, high: float, dtype: ir.DataType) -> tuple[np.ndarray, np.ndarray]:
    """The same of numbers."""
    first, last = (np.float32(level) for level in levels(dtype))
    below, above = np.float32(min(low, 0.0)), np.float32(max(high, 0.0))
    scale = np.asarray(np.maximum((above - below) / (last - first), np.float32(LEAST_SCALE)))
    level = np.clip(first - np.rint(below / scale), first, last)
    return scale, np.asarray(level, np.int32).astype(dtype.numpy())


def symmetric_scale(array: np.ndarray, dtype: ir.DataType, axis: int, block: int | None) -> np.ndarray:
    """The scale with which the largest number of each channel or block is the largest that the type has."""
    size = np.abs(array)
    if block:
        starts = np.arange(0, array.shape[axis], block)
        largest = np.maximum.reduceat(size, starts, axis)
    else:
        largest = size.max(axis=tuple(i for i in range(array.ndim) if i != axis))
    scale: np.ndarray = np.maximum(largest / np.float32(most_symmetric(dtype)), np.float32(LEAST_SCALE))
    return scale.astype(np.float32)
