"""Models for the installed ONNX Runtime, which knows operator sets and IR versions up to a limit."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx import defs

from onward.build import Names
from onward.errors import UnsupportedError
from onward.lowering.standard_operators import replace_unknown
from onward.model import Model
from onward.model.core import values
from onward.model.walk import graphs_in, nodes_of
from onward.runtime.sessions import NO_ATTRIBUTES, NO_KERNEL, onnxruntime_limits
from onward.standard import is_standard
from onward.transform.context import Context
from onward.transform.inline import has_body, inline
from onward.transform.opset import convert_opset, of_one_opset
from onward.transform.types import fill_in_types

_LOADED_BY_ALL = 26
"""Latest operator set that all supported versions of ONNX Runtime load."""

_PREVIEW = "ai.onnx.preview"
"""Domain of the standard with operators that may still change; ONNX Runtime has none."""


def for_onnxruntime(model: Model) -> Model:
    """Return a model that the installed ONNX Runtime loads, with bodies for missing operators."""
    model = of_one_opset(model)
    version = model.opset if model.opset <= _LOADED_BY_ALL else min(model.opset, onnxruntime_limits().opset)
    nodes = list(nodes_of(model))
    version = min([version, *(older for node in nodes if (older := _last_kernel(node, version)))])
    if version < model.opset or any(_has_no_kernel(node, version) for node in nodes):
        model = _at(version, model)
    if (model.ir.ir_version or 0) > (ir_version := onnxruntime_limits().ir):
        model = model.copy()
        model.ir.ir_version = ir_version
    return model


def _at(version: int, model: Model) -> Model:
    """Return the model in an older operator set, without operators that ONNX Runtime lacks."""
    model = model.copy(steps=False)

    def lacks(node: ir.Node) -> bool:
        return _is_newer(node, model.opset, version) or _has_no_kernel(node, version)

    def unknown(model: Model) -> list[ir.Node]:
        fill_in_types(model, values(model.graph))
        return [node for node in model.graph.all_nodes() if lacks(node)]

    functions = [function for function in model.functions.values() if any(map(lacks, function.all_nodes()))]
    if functions:  # the replacement of an operator may depend on types, which functions do not have
        model = inline(model, [f"{function.domain}.{function.name}" for function in functions])
    return convert_opset(replace_unknown(model, unknown, _refusal), version)


def _refusal(nodes: list[ir.Node]) -> UnsupportedError:
    limits = onnxruntime_limits()
    lines = []
    for node in nodes:
        on = next((f" on {value.dtype.name.lower()}" for value in node.inputs if value and value.dtype), "")
        since = defs.get_schema(node.op_type).since_version
        lines.append(f"- `{node.op_type}`{on} of operator set {since} (node `{node.name or node.outputs[0].name}`)")
    return UnsupportedError(
        f"{limits.runtime} loads operator sets up to {limits.opset}, which lack\n" + "\n".join(lines),
        hint='run the model on another engine: `engine="torch"` (`--engine torch`)',
    )


def _has_no_kernel(node: ir.Node, version: int) -> bool:
    """True if ONNX Runtime lacks an operator and could run its body; else other devices may run it."""
    if node.domain == _PREVIEW:
        return has_body(node.op_type, 1, _PREVIEW)
    has_kernel = version < NO_KERNEL.get(node.op_type, version + 1) and not node.attributes.keys() & NO_ATTRIBUTES
    return is_standard(node) and not has_kernel and has_body(node.op_type, version)


def _last_kernel(node: ir.Node, version: int) -> int | None:
    """Return the last operator set in which ONNX Runtime had an operator that has no body."""
    lost = NO_KERNEL.get(node.op_type, version + 1)
    if not is_standard(node) or lost > version or not defs.has(node.op_type, lost - 1):
        return None
    return lost - 1 if node.op_type == "Bernoulli" or not has_body(node.op_type, version) else None


def _is_newer(node: ir.Node, opset: int, version: int) -> bool:
    """True if a version of the standard lacks the operator, an attribute of it, or its types."""
    try:
        if not is_standard(node) or defs.get_schema(node.op_type, opset).since_version <= version:
            return False
    except defs.SchemaError:
        return False  # not of the standard
    try:
        schema = defs.get_schema(node.op_type, version)
    except defs.SchemaError:
        return True
    has_attributes = node.attributes.keys() <= schema.attributes.keys()
    return not has_attributes or not (_fit(node.inputs, schema.inputs) and _fit(node.outputs, schema.outputs))


def _fit(actual: Sequence[ir.Value | None], formals: Sequence[defs.OpSchema.FormalParameter]) -> bool:
    """True if a version of an operator takes the types of the values; unknown types fit."""
    return all(
        value is None
        or not isinstance(value.type, ir.TensorType)
        or f"tensor({value.type.dtype.name.lower()})" in formals[min(i, len(formals) - 1)].types
        for i, value in enumerate(actual)
    )


# ---- 16-bit types ----------------------------------------------------------------------------------------------------
#
# Without kernels for a 16-bit type, nodes compute in float32, and results are rounded after each node. PyTorch
# does so with bfloat16 on a CPU, and ONNX Runtime itself with float16.


_MOVES = {
    *("Cast", "CastLike", "Constant", "ConstantOfShape", "Identity", "Shape", "Size", "If", "Loop", "Scan"),
    *("Concat", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"),
    *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceInsert", "SplitToSequence"),
}
"""Operators that only move numbers, with kernels for all types."""


def widen(model: Model, dtype: ir.DataType) -> None:
    """Cast around all nodes that compute with a 16-bit type, in place. Types must be known."""
    context, narrow = Context(model), ir.TensorType(dtype)
    for graph in graphs_in(model.graph):
        wide: dict[ir.Value, ir.Value] = {}
        for node in list(graph):
            if node.op_type not in _MOVES and any(v is not None and v.type == narrow for v in node.inputs):
                widen_node(node, dtype, context.names, wide)


def widen_node(node: ir.Node, dtype: ir.DataType, names: Names, wide: dict[ir.Value, ir.Value]) -> None:
    """Let a node compute in float32 instead of `dtype`; `wide` has values that are already cast."""
    narrow_inputs = {value for value in node.inputs if value is not None and value.type == ir.TensorType(dtype)}
    for value in narrow_inputs - wide.keys():
        cast = _cast(value, ir.DataType.FLOAT, names.fresh(f"{value.name}/float32"))
        node.prepend(cast)
        wide[value] = cast.outputs[0]
    for i, value_ in enumerate(node.inputs):
        if value_ in narrow_inputs:
            node.replace_input_with(i, wide[value_])
    for output in node.outputs if narrow_inputs else ():
        if output.dtype == dtype:
            _round(node, output, names.fresh(f"{output.name}/float32"))


def _round(node: ir.Node, output: ir.Value, name: str) -> None:
    """Make the output of a node float32; its readers read it rounded, under the old name."""
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
