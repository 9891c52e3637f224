"""What is wrong with a single node, by the word of `onnx`, or of ONNX Runtime for the operators of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir
from onnx import ModelProto, defs

from onward.errors import UnsupportedError, first_line
from onward.model.walk import nested_graphs
from onward.runtime.sessions import open_session
from onward.standard import IR_VERSION, domain_of

_MICROSOFT = "com.microsoft"
_LARGEST = 64
"""The number of elements up to which a constant may be one that shapes follow from."""


def fault_of(node: ir.Node, imports: Mapping[str, int]) -> str | None:
    """Why a node is not a valid use of its operator, as far as its inputs are known; None if nobody objects."""
    if node.domain == _MICROSOFT:
        return _refusal_of_onnxruntime(_alone(node, imports))
    if not defs.has(node.op_type, domain_of(node)):
        return None
    proto = _alone(node, imports)
    context: Any = onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = proto.ir_version, dict(imports)
    try:
        onnx.checker.check_node(proto.graph.node[0], context)
        if not any(nested_graphs(node)):  # which read more than is known here
            onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return first_line(error)
    return None


def _refusal_of_onnxruntime(proto: ModelProto) -> str | None:
    declared = {value.name for value in proto.graph.input} | {tensor.name for tensor in proto.graph.initializer}
    if any(name and name not in declared for name in proto.graph.node[0].input):
        return None
    try:
        open_session(proto)
    except UnsupportedError as error:
        return error.message
    return None


def _alone(node: ir.Node, imports: Mapping[str, int]) -> ModelProto:
    """A model of the one node; small constants are constants there, too."""
    read = dict.fromkeys(value for value in node.inputs if value is not None)
    known = [value for value in read if value.type is not None]
    constants = [v for v in known if v.const_value is not None and v.const_value.size <= _LARGEST]
    view: Any = ir.GraphView(
        [value for value in known if value not in constants],
        node.outputs if node.domain == _MICROSOFT else [],
        nodes=[node],
        initializers=constants,
        opset_imports=dict(imports),
        name="node",
    )
    return ir.serde.serialize_model(ir.Model(view, ir_version=IR_VERSION))
