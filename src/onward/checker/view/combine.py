"""A graph, or an inference graph and the algorithm on it, as a model of its own for onnx.checker and shape inference.

Weights stay behind: a large initializer becomes an input of the same name, type and shape, which is all that those two
look at. So the size of a model costs nothing here, and data that lies in other files is not opened.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from onward.checker.view.graphs import Graph
from onward.checker.view.scope import Scope, versions
from onward.checker.view.shapes import count
from onward.model import TRAINING_DOMAIN
from onward.model.protos import bodies

_SMALL = 256  # elements; shapes, axes and other values that shape inference computes with are smaller


def model_of(scope: Scope) -> ModelProto:
    source = scope.subject.proto
    model = ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, functions=source.functions)
    model.graph.name = scope.own.proto.name or "graph"
    for part in scope.parts:
        _append(model, part)
    if TRAINING_DOMAIN in versions(model.opset_import):
        _type_gradients(model.graph.node)
    return model


def _append(model: ModelProto, part: Graph) -> None:
    graph = model.graph
    graph.node.extend(part.proto.node)
    graph.input.extend(part.proto.input)
    graph.output.extend(part.proto.output)
    graph.value_info.extend(part.proto.value_info)
    for sparse in part.proto.sparse_initializer:  # nodes read it as any tensor; shape inference would not have that
        name = sparse.values.name
        graph.sparse_initializer.add().CopyFrom(sparse)
        graph.sparse_initializer[-1].values.name = f"onward:sparse:{name}"
        if name not in part.inputs:
            graph.input.append(_value(name, sparse.values.data_type, sparse.dims))
    for tensor in part.proto.initializer:
        if _is_small(tensor):
            graph.initializer.append(tensor)
        elif tensor.name not in part.inputs:
            graph.input.append(_value(tensor.name, tensor.data_type, tensor.dims))


def _is_small(tensor: TensorProto) -> bool:
    return tensor.data_location != TensorProto.EXTERNAL and count(tensor.dims) <= _SMALL


def _value(name: str, elem: int, dims: Iterable[int | None] | None) -> ValueInfoProto:
    value = ValueInfoProto(name=name)
    tensor = value.type.tensor_type
    tensor.elem_type = elem
    if dims is not None:
        tensor.shape.SetInParent()
        for dim in dims:
            added = tensor.shape.dim.add()
            if dim is not None:
                added.dim_value = dim
    return value


def _type_gradients(nodes: MutableSequence[NodeProto]) -> None:
    """A gradient has the type of what it is taken of; shape inference does not know that and would stop there.

    So others read copies of the inputs in its place, also in nested graphs.
    """
    given = list(nodes)
    del nodes[:]
    for node in given:
        for body in bodies(node):
            _type_gradients(body.node)
        copies = []
        if (node.domain, node.op_type) == (TRAINING_DOMAIN, "Gradient"):
            for i, (x, result) in enumerate(zip(node.input, node.output, strict=False)):
                if x and result:
                    copies.append(NodeProto(op_type="Identity", input=[x], output=[result]))
                    node.output[i] = f"onward:gradient:{result}"
        nodes.extend([node, *copies])
