"""Simplification of nodes that rules write independently of one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onward.build import replace_operator
from onward.constants import constant_ints
from onward.model.walk import read_by
from onward.standard import is_standard
from onward.transform.training import remove_unused


def simplify(nodes: Iterable[ir.Node]) -> None:
    """Shorten nodes, given in order, in place; some may be unused afterwards."""
    for node in nodes:
        if node.op_type == "Transpose":
            _transpose_of_transpose(node)
            _transpose_of_matmul(node)
        elif node.op_type == "Reshape":
            _reshape_of_reshape(node)


def _transpose_of_transpose(node: ir.Node) -> None:
    inner, order = _producer(node, "Transpose"), _order(node)
    before = _order(inner) if inner is not None else None
    if inner is None or order is None or before is None:
        return
    combined = [before[axis] for axis in order]
    if combined == sorted(combined) and not node.outputs[0].is_graph_output():
        node.outputs[0].replace_all_uses_with(_input(inner, 0))
    elif len(inner.outputs[0].uses()) == 1 and not inner.outputs[0].is_graph_output():
        node.replace_input_with(0, inner.inputs[0])
        node.attributes["perm"] = ir.AttrInt64s("perm", combined)


def _transpose_of_matmul(node: ir.Node) -> None:
    """Replace (A' B)' by B' A: transposing a result costs a copy, an operand often nothing."""
    matmul = _producer(node, "MatMul")
    if matmul is None or not swaps_last(node) or len(matmul.outputs[0].uses()) > 1:
        return
    a, b = (_transpose_source(value) for value in matmul.inputs)
    other = matmul.inputs[1] if a is not None else matmul.inputs[0]
    if (a is None) == (b is None) or other is None or other.shape is None or matmul.outputs[0].is_graph_output():
        return  # with neither transposed, nothing would be gained
    # The nodes swap roles: the matmul becomes the transpose, and the transpose the matmul.
    transposed = matmul.outputs[0]
    order = [*range(len(other.shape) - 2), len(other.shape) - 1, len(other.shape) - 2]
    transposed.shape = ir.Shape([other.shape[axis] for axis in order])
    replace_operator(matmul, "Transpose", [other], ir.AttrInt64s("perm", order))
    replace_operator(node, "MatMul", [transposed, a] if a is not None else [b, transposed])
    node.name, matmul.name = matmul.name, node.name


def _reshape_of_reshape(node: ir.Node) -> None:
    inner, target = _producer(node, "Reshape"), constant_ints(node.inputs[1])
    if inner is not None and target is not None and 0 not in target:
        node.replace_input_with(0, inner.inputs[0])


def _producer(node: ir.Node, op_type: str) -> ir.Node | None:
    """Return the producer of the first input, if it is in the same graph and has this type."""
    producer = _input(node, 0).producer()
    if producer is None or producer.graph is not node.graph or producer.domain != "" or producer.op_type != op_type:
        return None
    return producer


def _transpose_source(value: ir.Value | None) -> ir.Value | None:
    """Return the value that `value` is the transpose of, in its last two axes."""
    producer = value.producer() if value is not None else None
    return producer.inputs[0] if producer is not None and swaps_last(producer) else None


def swaps_last(node: ir.Node) -> bool:
    """True if a node transposes matrices: swaps the last two axes, and no others."""
    order = _order(node) if node.op_type == "Transpose" and is_standard(node) else None
    return order is not None and len(order) > 1 and [*order] == [*range(len(order) - 2), len(order) - 1, len(order) - 2]


def _order(node: ir.Node) -> Sequence[int] | None:
    shape = _input(node, 0).shape
    return node.attributes.get_ints("perm", None if shape is None else tuple(reversed(range(len(shape)))))


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, node.name
    return value


def tidy(graph: ir.Graph, added: Sequence[ir.Node]) -> None:
    """Drop unused nodes, such as gradients that nothing reads, and simplify the nodes in `added`."""
    remove_unused(graph)
    simplify(node for node in added if node.graph is graph)
    remove_unused(graph)
    put_results_last(graph)


def put_results_last(graph: ir.Graph) -> None:
    """Move the nodes that nothing reads to the end, those that are ready first to the very end.

    ONNX Runtime orders nodes from the end of the file: first those that the last node needs, then those of the node
    before it, and so on. If the gradient at the first layer came last, it would go back through all layers before it
    computed the gradients of their parameters, with all their inputs in memory.
    """
    depth: dict[ir.Value, int] = {}
    ends: list[tuple[int, ir.Node]] = []
    for node in graph:
        length = 1 + max((depth.get(value, 0) for value in read_by(node)), default=0)
        depth.update(dict.fromkeys(node.outputs, length))
        if not any(output.uses() for output in node.outputs):
            ends.append((length, node))
    last = [node for _, node in sorted(ends, key=lambda end: -end[0])]
    graph.remove(last)
    graph.extend(last)
