"""Reading single values: their type, their current number, and what computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor
from onward.inspect.summary_fields import Port, Setting, Shape
from onward.model.walk import nested_graphs, source_of

_TYPE_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}
_LONGEST_LIST = 64


def port(value: ir.Value) -> Port:
    return Port(value.name or "", type_name(value.type), shape_of(value))


def type_name(kind: ir.TypeProtocol | None) -> str:
    """`float32`, `sequence(int64)`, or `?`."""
    if kind is None:
        return "?"
    if isinstance(kind, ir.TensorType):
        return dtype_name(kind.dtype)
    inner = getattr(kind, "elem_type", None)
    words = {ir.SequenceType: "sequence", ir.OptionalType: "optional", ir.SparseTensorType: "sparse"}
    word = next((word for cls, word in words.items() if isinstance(kind, cls)), type(kind).__name__)
    return f"{word}({dtype_name(inner) if isinstance(inner, ir.DataType) else type_name(inner)})"


def dtype_name(dtype: ir.DataType | None) -> str:
    if dtype is None or dtype == ir.DataType.UNDEFINED:
        return "?"
    return _TYPE_NAMES.get(dtype.name, dtype.name.lower())


def shape_of(value: ir.Value) -> Shape | None:
    if value.shape is None:
        return None
    return tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape)


def number(value: ir.Value | None) -> Setting:
    """The current number of a small initializer or constant; None for anything else. Large tensors are not touched."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size > _LONGEST_LIST or not _is_numeric(tensor.dtype):
        return None
    array = np.asarray(tensor.numpy())
    return plain(array.reshape(-1)[0].item() if array.size == 1 else array.tolist())


def _is_numeric(dtype: ir.DataType) -> bool:
    return dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)


def plain(item: Any) -> Any:
    """The same for JSON, which has no infinity, and no number that is not one."""
    if isinstance(item, list | tuple):
        return [plain(one) for one in item]
    if isinstance(item, Mapping):
        return {str(key): plain(one) for key, one in item.items()}
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return item if isinstance(item, str | int | float | bool) or item is None else str(item)


def setting(value: ir.Value | None) -> Setting:
    """A number that steers an operator, as far as it can be told without running anything."""
    origin = source_of(value)
    if origin is None:
        return None
    if origin.is_graph_input() and not origin.is_initializer():
        return f"input `{origin.name}`"
    found = number(origin)
    return "computed" if found is None else found


def computing_node(value: ir.Value | None) -> tuple[ir.Node, int] | None:
    """The operator that computes a new state, and which of its outputs it is; also in the branch of an `If`."""
    seen: set[ir.Value] = set()
    while value is not None and value not in seen:
        seen.add(value)
        node = value.producer()
        if node is None:
            return None
        following = _behind(node, value.index() or 0)
        if following is None:
            return node, value.index() or 0
        value = following
    return None


def _behind(node: ir.Node, index: int) -> ir.Value | None:
    """The value that an operator hands on or chooses, if that is all it does."""
    if node.op_type == "If":
        outputs = [graph.outputs[index] for graph in nested_graphs(node) if index < len(graph.outputs)]
        changing = [value for value in outputs if (origin := source_of(value)) and origin.producer()]
        return changing[0] if changing else None
    if node.op_type == "Where":
        changing = [value for value in node.inputs[1:] if value is not None and value.producer()]
        return changing[0] if len(changing) == 1 else None
    return node.inputs[0] if node.op_type in ("Identity", "Cast") and node.inputs else None


def text_attribute(node: ir.Node, name: str) -> str | None:
    attribute = node.attributes.get(name)
    return attribute.value if attribute is not None and isinstance(attribute.value, str) else None


def records(fact: Any) -> list[dict[str, Any]]:
    """A JSON fact that should be a list of objects; what is not one is left out."""
    return [item for item in (fact if isinstance(fact, list) else [fact]) if isinstance(item, dict)]


def texts(fact: Any) -> tuple[str, ...]:
    """A JSON fact that should be a list of names."""
    return tuple(item for item in fact if isinstance(item, str)) if isinstance(fact, list) else ()
