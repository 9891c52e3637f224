"""Adapters that a model has, and the layers that can have some."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onward.model import Model
from onward.model.state import PARAMETER_KEY, SLOT_KEY
from onward.recipe.layers import Layer, layers
from onward.recipe.trainable import ADAPTERS

A, B = ADAPTERS
SCALE = "lora_scale"
MODULE_KEY = "train.module"


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """What is added to one weight, as tensors of the file."""

    weight: str
    module: str
    """What owns the weight, as the framework called it."""
    a: ir.Value
    b: ir.Value
    scale: ir.Value

    @property
    def rank(self) -> int:
        shape = _shape(self.b)
        return shape[1] if self.is_convolution else shape[0]

    @property
    def alpha(self) -> float:
        return float(array(self.scale)) * self.rank

    @property
    def is_convolution(self) -> bool:
        return len(_shape(self.b)) > 2


def by_weight(model: Model) -> dict[str, list[Layer]]:
    """The layers that can be adapted, by the name of their weight; adapters themselves do not count."""
    found: dict[str, list[Layer]] = {}
    for layer in layers(model.graph):
        if layer.weight.name and _tag(layer.weight, SLOT_KEY) not in ADAPTERS:
            found.setdefault(layer.weight.name, []).append(layer)
    return found


def adapters(model: Model) -> list[Adapter]:
    """The adapters of a model, by the tags of its tensors."""
    parts: dict[str, dict[str, ir.Value]] = {}
    for value in model.graph.initializers.values():
        if (slot := _tag(value, SLOT_KEY)) in (*ADAPTERS, SCALE):
            parts.setdefault(_tag(value, PARAMETER_KEY), {})[slot] = value
    whole = {weight: slots for weight, slots in parts.items() if len(slots) == 3}
    return [Adapter(weight, _tag(p[A], MODULE_KEY) or weight, p[A], p[B], p[SCALE]) for weight, p in whole.items()]


def _tag(value: ir.Value, key: str) -> str:
    return value.const_value.metadata_props.get(key, "") if value.const_value is not None else ""


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())


def array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def delta(adapter: Adapter, layer: Layer, dtype: type = np.float64) -> np.ndarray:
    """(alpha / rank) A B, in the layout of the weight."""
    a: np.ndarray = array(adapter.a).astype(dtype)
    b: np.ndarray = array(adapter.b).astype(dtype)
    scale: np.ndarray = array(adapter.scale).astype(dtype)
    if not layer.is_convolution:
        product = a @ b * scale
        return product.T if layer.units_first else product
    groups, rank = layer.node.attributes.get_int("group", 1), adapter.rank
    inner = a.reshape(groups, rank, math.prod(a.shape[1:]))
    outer = b.reshape(groups, b.shape[0] // groups, rank)
    return (outer @ inner * scale).reshape(layer.shape)
