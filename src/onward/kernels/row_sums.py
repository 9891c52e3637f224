"""Sums over the rows of a batch, as gradients of weights and biases are: kernels where they beat ONNX Runtime's own.

Measured against it (AVX-512, one and two threads): a transposed matrix times a matrix takes 10 to 20 % less where both
have many rows, and as long or longer with few; all other products are as fast as here. Sums of rows take half as long
or less, and are ten times as exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from onward.build import become
from onward.constants import constant_ints
from onward.kernels.library import DOMAIN
from onward.model import Model
from onward.model.walk import attributes
from onward.shapes import dims
from onward.standard import is_standard

_MANY_ROWS = 512
_LARGE_MATRIX = 1 << 14
_LARGE_SUM = 1 << 13


def use_row_sums(model: Model) -> None:
    """Let kernels compute them, in place."""
    replaced = False
    for node in list(model.graph):
        replace = _REPLACEMENTS.get(node.op_type) if is_standard(node) else None
        is_float = len(node.outputs) == 1 and node.outputs[0].dtype == ir.DataType.FLOAT
        replaced |= replace is not None and is_float and replace(node, model.opset)
    if replaced:
        model.graph.opset_imports[DOMAIN] = 1


def _gemm(node: ir.Node, opset: int) -> bool:
    given = attributes(node, opset)
    is_plain = given["alpha"] == 1 and given["transA"] and not given["transB"] and len(node.inputs) == 2
    return is_plain and _product(node, node.inputs[0], node.inputs[1])


def _matmul(node: ir.Node, opset: int) -> bool:
    a, b = node.inputs
    turned = a.producer() if a is not None else None
    is_turned = turned is not None and _turns(turned)
    return is_turned and turned is not None and _product(node, turned.inputs[0], b)


def _turns(node: ir.Node) -> bool:
    return (
        node.op_type == "Transpose"
        and is_standard(node)
        and len(dims(node.inputs[0]) or ()) == 2
        and (list(node.attributes.get_ints("perm", (1, 0))) == [1, 0])
    )


def _product(node: ir.Node, a: ir.Value | None, b: ir.Value | None) -> bool:
    """AᵀB; where only its transpose is read, BᵀA."""
    if not (_has_many_rows(a) and _has_many_rows(b)):
        return False
    rows, columns = (dims(a) or ())[-1], (dims(b) or ())[-1]
    if not (isinstance(rows, int) and isinstance(columns, int) and rows * columns >= _LARGE_MATRIX):
        return False
    output = node.outputs[0]
    readers = [use.node for use in output.uses()]
    if len(readers) == 1 and _turns(readers[0]) and not output.is_graph_output():
        node, a, b = readers[0], b, a
    _become_kernel(node, "TransposedProduct", [a, b])
    return True


def _has_many_rows(value: ir.Value | None) -> bool:
    """Where their number is not known: whether a matrix is made of a tensor with more axes, such as a sequence."""
    sizes = dims(value)
    if value is None or sizes is None or len(sizes) != 2:
        return False
    if isinstance(sizes[0], int):
        return sizes[0] >= _MANY_ROWS
    made = value.producer()
    return made is not None and made.op_type == "Reshape" and len(dims(made.inputs[0]) or ()) > 2


def _reduce_sum(node: ir.Node, opset: int) -> bool:
    x, given = node.inputs[0], attributes(node, opset)
    sizes, axes = dims(x), constant_ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or sizes is None or not axes or given["keepdims"]:
        return False
    is_leading = sorted(axis % len(sizes) for axis in axes) == list(range(len(axes)))
    known = [n for n in sizes if isinstance(n, int)]
    if not is_leading or len(axes) == len(sizes) or (len(known) == len(sizes) and math.prod(known) < _LARGE_SUM):
        return False
    _become_kernel(node, "LeadingSum", [x], ir.AttrInt64("axes", len(axes)))
    return True


def _become_kernel(node: ir.Node, name: str, inputs: list[ir.Value | None], *given: ir.Attr) -> None:
    become(node, name, inputs, *given)
    node.domain = DOMAIN


_REPLACEMENTS: dict[str, Callable[[ir.Node, int], bool]] = {
    "Gemm": _gemm,
    "MatMul": _matmul,
    "ReduceSum": _reduce_sum,
}
