"""Types that numpy lacks, as inputs and outputs of ONNX Runtime: they are cast to wider types.

ONNX Runtime returns bytes or nothing for them. The wider type has every number of the narrow type,
so the casts are exact.
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
    """Widen narrow inputs and outputs of a model in place. Return the original type of each output, or None."""
    graph, names = model.graph, model.names()
    for i, value in enumerate(graph.inputs):
        if _is_narrow(value) and not value.is_initializer():
            graph.inputs[i] = _wide_input(graph, value, names)
    narrow: list[np.dtype | None] = []
    for i, value in enumerate(graph.outputs):
        narrow.append(value.dtype.numpy() if value.dtype is not None and _is_narrow(value) else None)
        if _is_narrow(value):
            graph.outputs[i] = _wide_output(graph, value, names)
    return narrow


def _is_narrow(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype in _WIDER


def wide(value: Any) -> Any:
    """Return an array in its wider type, for a model whose inputs are widened."""
    wider = _WIDER_ARRAYS.get(value.dtype) if isinstance(value, np.ndarray) else None
    return value if wider is None else value.astype(wider)


def _wide_input(graph: ir.Graph, value: ir.Value, names: Names) -> ir.Value:
    assert value.dtype is not None
    wide = ir.Value(name=value.name, type=ir.TensorType(_WIDER[value.dtype]), shape=value.shape)
    cast = _cast(wide, value.dtype)
    value.name = names.fresh(f"{wide.name}/wide")
    cast.outputs[0].name = names.fresh(f"{wide.name}/narrow")
    value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
    if len(graph):
        graph.insert_before(graph[0], cast)
    else:
        graph.append(cast)
    return wide


def _wide_output(graph: ir.Graph, value: ir.Value, names: Names) -> ir.Value:
    assert value.dtype is not None
    cast = _cast(value, _WIDER[value.dtype])
    cast.outputs[0].name, value.name = value.name, names.fresh(f"{value.name}/narrow")
    graph.append(cast)
    return cast.outputs[0]


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    """Return a cast that keeps infinity if the type has it."""
    saturates = {"saturate": 0} if to.is_floating_point() and to.bitwidth == 8 else {}
    cast = ir.node("Cast", [value], attributes={"to": to.value, **saturates})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(to), value.shape
    return cast
