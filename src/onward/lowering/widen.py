"""Numbers of 16 bits on a runtime that has no kernels for them: computed in float32, and rounded after each node.

This is what PyTorch does with bfloat16 on a CPU, and ONNX Runtime itself with float16.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.build import Names
from onward.model import Model
from onward.model.walk import graphs_in
from onward.transform.context import Context

_AS_THEY_ARE = {
    *("Cast", "CastLike", "Constant", "ConstantOfShape", "Identity", "Shape", "Size", "If", "Loop", "Scan"),
    *("Concat", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"),
    *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceInsert", "SplitToSequence"),
}
"""Operators that compute nothing with the numbers, and have kernels for all types."""


def widen(model: Model, dtype: ir.DataType) -> None:
    """Put casts around all nodes that compute with numbers of a type, in place. Types must be known."""
    context, narrow = Context(model), ir.TensorType(dtype)
    for graph in graphs_in(model.graph):
        wide: dict[ir.Value, ir.Value] = {}
        for node in list(graph):
            if node.op_type not in _AS_THEY_ARE and any(v is not None and v.type == narrow for v in node.inputs):
                widen_node(node, dtype, context.names, wide)


def widen_node(node: ir.Node, dtype: ir.DataType, names: Names, wide: dict[ir.Value, ir.Value]) -> None:
    """Let a node compute in float32 what it would in `dtype`; `wide` has values of its graph that are cast already."""
    read = {value for value in node.inputs if value is not None and value.type == ir.TensorType(dtype)}
    for value in read - wide.keys():
        cast = _cast(value, ir.DataType.FLOAT, names.fresh(f"{value.name}/float32"))
        node.prepend(cast)
        wide[value] = cast.outputs[0]
    for i, given in enumerate(node.inputs):
        if given in read:
            node.replace_input_with(i, wide[given])
    for output in node.outputs if read else ():
        if output.dtype == dtype:
            _round(node, output, names.fresh(f"{output.name}/float32"))


def _round(node: ir.Node, output: ir.Value, name: str) -> None:
    """Let what a node computes be float32, and everyone else read it rounded, under the name that it had."""
    assert output.dtype is not None
    cast = _cast(output, output.dtype, output.name or "")
    output.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    output.name, output.type = name, ir.TensorType(ir.DataType.FLOAT)
    node.append(cast)


def _cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
    cast = ir.node("Cast", [value], attributes={"to": to.value})
    cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = name, ir.TensorType(to), value.shape
    return cast
