"""Types that numpy lacks, for ONNX Runtime, which would hand over bytes or nothing: they cross the edge as wider ones.

Every number of a narrow type is one of the wider type, so that casts there and back change nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Names
from onward.model import Model

_WIDER = {
    **{dtype: ir.DataType.FLOAT for dtype in ir.DataType if dtype.is_floating_point() and dtype.bitwidth <= 8},
    **dict.fromkeys((ir.DataType.INT2, ir.DataType.INT4), ir.DataType.INT8),
    **dict.fromkeys((ir.DataType.UINT2, ir.DataType.UINT4), ir.DataType.UINT8),
    ir.DataType.BFLOAT16: ir.DataType.FLOAT,
}
_WIDER_ARRAYS = {dtype.numpy(): wider.numpy() for dtype, wider in _WIDER.items()}


def widen_edges(model: Model) -> list[np.dtype | None]:
    """Let the inputs and outputs of a model be of types that numpy has, in place; what each output was, if narrow."""
    graph, names = model.graph, model.names()
    for i, value in enumerate(graph.inputs):
        if _is_narrow(value) and not value.is_initializer():
            graph.inputs[i] = _taken_wide(graph, value, names)
    narrow: list[np.dtype | None] = []
    for i, value in enumerate(graph.outputs):
        narrow.append(value.dtype.numpy() if value.dtype is not None and _is_narrow(value) else None)
        if _is_narrow(value):
            graph.outputs[i] = _given_wide(graph, value, names)
    return narrow


def _is_narrow(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype in _WIDER


def wide(value: Any) -> Any:
    """An input of a model whose edges are wide."""
    wider = _WIDER_ARRAYS.get(value.dtype) if isinstance(value, np.ndarray) else None
    return value if wider is None else value.astype(wider)


def _taken_wide(graph: ir.Graph, value: ir.Value, names: Names) -> ir.Value:
    assert value.dtype is not None
    given = ir.Value(name=value.name, type=ir.TensorType(_WIDER[value.dtype]), shape=value.shape)
    cast = _cast(given, value.dtype)
    value.name = names.fresh(f"{given.name}/wide")
    cast.outputs[0].name = names.fresh(f"{given.name}/narrow")
    value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
    if len(graph):
        graph.insert_before(graph[0], cast)
    else:
        graph.append(cast)
    return given


def _given_wide(graph: ir.Graph, value: ir.Value, names: Names) -> ir.Value:
    assert value.dtype is not None
    cast = _cast(value, _WIDER[value.dtype])
    cast.outputs[0].name, value.name = value.name, names.fresh(f"{value.name}/narrow")
    graph.append(cast)
    return cast.outputs[0]


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    """A cast that keeps infinity, where a type has it."""
    saturates = {"saturate": 0} if to.is_floating_point() and to.bitwidth == 8 else {}
    cast = ir.node("Cast", [value], attributes={"to": to.value, **saturates})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(to), value.shape
    return cast
