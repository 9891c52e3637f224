"""Sizes of values, and floating-point operations of nodes."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from onward.model.walk import nested_graphs


def dims_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """The sizes of a tensor; None if one of them is not known."""
    shape = value.shape if value is not None else None
    return tuple(shape.numpy()) if shape is not None and shape.is_static() else None


def elements(value: ir.Value | None) -> int:
    """As many numbers as a tensor has; none if that is not known."""
    dims = dims_of(value)
    return 0 if dims is None else math.prod(dims)


def bytes_of(value: ir.Value) -> int:
    return math.ceil(elements(value) * value.dtype.itemsize) if value.dtype is not None else 0


# ---- floating-point operations ----------------------------------------------------------------------------------

# A multiplication and an addition count as two. What is not a matmul counts one for each element that it makes: next to
# matmuls that is little.


def flops(node: ir.Node) -> int:
    """Those of a node, and of graphs nested in it, each of which runs once but for the body of a Scan."""
    own = _PRODUCTS.get(node.op_type)
    inner = sum(flops(each) for graph in nested_graphs(node) for each in graph)
    return (own(node) if own else sum(elements(output) for output in node.outputs)) + inner * _times(node)


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    return dims_of(value) or ()


def _times(node: ir.Node) -> int:
    read = node.inputs[-1] if node.op_type == "Scan" and node.inputs else None
    return next(iter(_sizes(read)), 1)


def _matmul(node: ir.Node) -> int:
    return 2 * elements(node.outputs[0]) * next(iter(_sizes(node.inputs[0])[-1:]), 0)


def _gemm(node: ir.Node) -> int:
    a = _sizes(node.inputs[0])
    inner = a[0 if node.attributes.get_int("transA", 0) else 1] if len(a) == 2 else 0
    return 2 * elements(node.outputs[0]) * inner


def _conv(node: ir.Node) -> int:
    return 2 * elements(node.outputs[0]) * math.prod(_sizes(node.inputs[1])[1:])


def _conv_transpose(node: ir.Node) -> int:
    return 2 * elements(node.inputs[0]) * math.prod(_sizes(node.inputs[1])[1:])


def _einsum(node: ir.Node) -> int:
    """Each combination of indices once for each factor."""
    terms = node.attributes.get_string("equation", "").replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, value in zip(terms, node.inputs, strict=False):
        sizes |= dict(zip(term, _sizes(value), strict=False))
    return len(terms) * math.prod(sizes.values())


def _recurrent(node: ir.Node) -> int:
    """Each step multiplies the input and the last state by the weights of all gates."""
    length, batch, *_ = (*_sizes(node.inputs[0]), 0, 0)
    return 2 * length * batch * (elements(node.inputs[1]) + elements(node.inputs[2]))


_PRODUCTS: dict[str, Callable[[ir.Node], int]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}
PRODUCTS = frozenset(_PRODUCTS)
"""Operators that are computed in the precision that is chosen for products."""
