"""Models that only compute a loss, and two evaluators to run them on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onward.build import Builder, Names
from onward.lowering.standard_operators import LOSSES as LOWERINGS
from onward.recipe.losses import loss

Array = np.ndarray


def model(name: str, *arrays: Array, opset: int = 21, rank: int = 0, **options: Any) -> onnx.ModelProto:
    """A model that only computes a loss: no size is known to it, `rank` is that of an unreduced result."""
    inputs = [value(f"input_{i}", array) for i, array in enumerate(arrays)]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset}, name="loss")
    op = Builder(graph, opset=opset, names=Names(v.name for v in inputs))
    result = loss(name).build(op, *map(op, inputs), **options).named("loss").value
    if options.get("reduction") == "none":
        result.shape = ir.Shape([f"out_{i}" for i in range(rank)])
    graph.outputs.append(result)
    proto = ir.to_proto(ir.Model(graph, ir_version=10, functions=op.functions.values()))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def value(name: str, array: Array) -> ir.Value:
    shape = ir.Shape([f"{name}_{axis}" for axis in range(array.ndim)])
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=shape)


def on_onnxruntime(proto: onnx.ModelProto, *arrays: Array) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: array for i, array in zip(proto.graph.input, arrays, strict=True)})


class LogSoftmax(OpRun):
    """In place of the reference evaluator's own, which takes the logarithm of a softmax that may have become 0."""

    op_domain = ""

    def _run(self, x: Array, axis: int = -1) -> tuple[Array]:
        shifted = x - x.max(axis, keepdims=True)
        return (shifted - np.log(np.exp(shifted).sum(axis, keepdims=True)),)


def on_reference(proto: onnx.ModelProto, *arrays: Array) -> list[Array]:
    """With everything lowered to operators: inside functions, and inside its loss operators, it would use its own."""
    evaluator = ReferenceEvaluator(lowered(onnx.inliner.inline_local_functions(proto)), new_ops=[LogSoftmax])
    with np.errstate(all="ignore"):
        return evaluator.run(None, {f"input_{i}": array for i, array in enumerate(arrays)})


def check(expected: Any, name: str, *arrays: Array, rtol: float = 1e-12, **options: Any) -> None:
    """A loss has the expected value, on two independent evaluators, up to the rounding of its largest input."""
    expected = np.asarray(expected)
    largest = max(1.0, *(np.abs(array[np.isfinite(array)]).max(initial=0) for array in arrays))
    proto = model(name, *arrays, rank=expected.ndim, **options)
    for run in (on_onnxruntime, on_reference):
        (actual,) = run(proto, *arrays)
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * largest, err_msg=run.__name__)


def lowered(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with the standard's loss operators in plain operators."""
    model = ir.from_proto(proto)
    graph, opset = model.graph, max(21, model.opset_imports[""])
    graph.opset_imports[""] = opset
    op = Builder(graph, opset=opset, names=Names(v.name for n in graph for v in n.outputs))
    for node in [node for node in graph if (node.domain, node.op_type) in LOWERINGS]:
        defaults = onnx.defs.get_schema(node.op_type, opset).attributes
        attributes = {
            k: onnx.helper.get_attribute_value(a.default_value) for k, a in defaults.items() if not a.required
        }
        attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items() if v is not None}
        attributes |= {k: a.value for k, a in node.attributes.items()}
        inputs = [None if v is None else op(v) for v in node.inputs]
        results = LOWERINGS[node.domain, node.op_type](op, inputs, attributes, len(node.outputs))
        for old, new in zip(node.outputs, results, strict=True):
            ir.convenience.replace_all_uses_with(old, new.like(old).value, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    graph.sort()
    assert not {(node.domain, node.op_type) for node in graph} & LOWERINGS.keys()
    model.ir_version = max(10, model.ir_version)
    return ir.to_proto(model)
