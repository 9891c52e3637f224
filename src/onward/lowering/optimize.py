"""Passes over a lowered graph, made for training steps: they never fold state, which is an input.

Functions serve several types, so their bodies cast numbers at run time; each call computes anew what all calls share.
After they have been inlined both can be told.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.build import become, declare, identity
from onward.constants import tensor_in
from onward.standard import is_standard
from onward.transform.context import Context
from onward.transform.unused import remove_unused


def optimize(context: Context) -> None:
    """Shorten the graph of a lowered model, in place."""
    context.fill_in_types()
    model = context.model
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in graph if graph is not model.graph else ():
            declare(node, model.opset)
        settle_casts(graph)
        turn_products_with_vectors(graph)
        share_equal_nodes(graph)
        remove_unused(graph)


def settle_casts(graph: ir.Graph) -> None:
    """Casts to a type that is known: none where it is the type already, and constants in their final type."""
    for node in list(graph):
        if node.op_type not in ("Cast", "CastLike") or not is_standard(node):
            continue
        source, target = node.inputs[0], _target(node)
        if source is None or target is None:
            continue
        constant = tensor_in(source.producer())
        if source.dtype == target and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(source)
        elif constant is not None and constant.size == 1:
            array = constant.numpy().astype(target.numpy())
            become(node, "Constant", [], ir.AttrTensor("value", ir.Tensor(array, dtype=target)))
        elif node.op_type == "CastLike":
            become(node, "Cast", [source], ir.AttrInt64("to", target.value))
        node.outputs[0].type = ir.TensorType(target)


def _target(node: ir.Node) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    like = node.inputs[1]
    return like.dtype if like is not None else None


def turn_products_with_vectors(graph: ir.Graph) -> None:
    """Aᵀ v is v A, without a Transpose; and what ONNX Runtime 1.31 makes of Aᵀ v is wrong."""
    for node in list(graph):
        if node.op_type != "MatMul" or not is_standard(node):
            continue
        matrix, vector = node.inputs
        turned = matrix.producer() if matrix is not None else None
        is_vector = vector is not None and vector.shape is not None and vector.shape.rank() == 1
        if is_vector and turned is not None and turned.op_type == "Transpose" and _transposes(turned):
            become(node, "MatMul", [vector, turned.inputs[0]])


def _transposes(node: ir.Node) -> bool:
    """Whether it transposes matrices: swaps the last two axes, and no others."""
    source = node.inputs[0]
    rank = source.shape.rank() if source is not None and source.shape is not None else 0
    perm = list(node.attributes.get_ints("perm", range(rank)[::-1]))
    return rank >= 2 and perm == [*range(rank - 2), rank - 1, rank - 2]


def share_equal_nodes(graph: ir.Graph) -> None:
    """One node for all that compute the same."""
    known: dict[tuple[object, ...], ir.Node] = {}
    for node in list(graph):
        key = identity(node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is not node and not any(output.is_graph_output() for output in node.outputs):
            for old, new in zip(node.outputs, first.outputs, strict=True):
                old.replace_all_uses_with(new)
