"""Quantisation, by straight-through estimators: rounding counts as the identity, saturation as Clip.

A true derivative would be zero almost everywhere. Taken this way, QuantizeLinear followed by DequantizeLinear passes
the gradient of what is in range, and gives the scale that of learned step size quantisation (LSQ). The gradient of a
quantised tensor is a floating-point tensor of its shape. A zero point has none.
"""

import numpy as np
import onnx_ir as ir

from onward.model import Model
from onward.rules.common import cast_like, standard_attributes
from onward.rules.convolution import conv
from onward.rules.indexing import pad_axes
from onward.rules.matrix import matmul
from onward.rules.registry import body, gradient, rewrite
from onward.standard import STANDARD, is_standard

_SLIDE = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_QUANTISED_BY_DEFAULT = ir.DataType.UINT8

ROUNDED = frozenset(("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QuantizeLinear"))
"""Operators whose results, although integers, have a gradient: they stand for what was rounded."""
MOVING = frozenset((
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "Split", "Squeeze",
    "Tile", "Transpose", "Unsqueeze",
))  # fmt: skip
"""Operators that hand such integers on."""


def makes_rounded(domain: str, operator: str) -> bool:
    """Whether the results of an operator are such integers, at once or after it was rewritten."""
    if domain == "com.microsoft":
        return operator.startswith("Q")
    return domain in STANDARD and (operator in ROUNDED or operator.startswith("QLinear"))


def rounds(model: Model) -> bool:
    """Whether there are such operators in a model: frameworks' own derivatives of rounding are zero."""
    return bool(_rounding(model))


def _rounding(model: Model) -> list[ir.Node]:
    containers: list[ir.Graph | ir.Function] = [model.graph, *(step.algorithm for step in model.steps)]
    containers += model.functions.values()
    nodes = (node for container in containers for node in container.all_nodes())
    return [node for node in nodes if makes_rounded(node.domain, node.op_type)]


def rounds_only_in_pairs(model: Model) -> bool:
    """Whether all that is rounded is made floating-point numbers again at once, as frameworks can be taught to see."""
    return all(
        node.op_type == "QuantizeLinear"
        and not node.outputs[0].is_graph_output()
        and all(use.node.op_type == "DequantizeLinear" for use in node.outputs[0].uses())
        for node in _rounding(model)
    )


def stands_for_floats(value: ir.Value) -> bool:
    """Whether a value, if it is one of integers, is such: what rounding made, perhaps moved since."""
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None or value in seen:
            continue
        seen.add(value)
        if makes_rounded(node.domain, node.op_type):
            return True
        if node.op_type in MOVING and is_standard(node):
            pending += [v for v in node.inputs if v is not None and not (v.dtype and v.dtype.is_floating_point())]
    return False


@gradient("QuantizeLinear", broadcasts=(1,), inputs=(0, 1))
def quantize_linear(op, dy, x, scale, zero_point, *, node, axis, block_size, output_dtype):
    """Q = clip(round(X / scale) + zero): dX = dQ / scale, dscale = -sum(dQ X / scale^2), both 0 out of range."""
    spread = _broadcast_scale(op, scale, x, axis, block_size)
    declared = node.outputs[0].dtype or (zero_point.dtype if zero_point is not None else None)
    dtype = declared or (ir.DataType(output_dtype) if output_dtype else _QUANTISED_BY_DEFAULT)
    ratio = cast_like(op, x, scale) / spread
    level = op.Round(ratio) if dtype.is_integer() else ratio
    if zero_point is not None:
        level = level + _broadcast_scale(op, cast_like(op, zero_point, scale), x, axis, block_size)
    in_range = op.And(level >= float(dtype.min), level <= float(dtype.max))
    dx = op.Where(in_range, cast_like(op, dy, scale) / spread, 0)
    return dx, _gather_up(op, -(dx * ratio), scale, axis, block_size)


@gradient("DequantizeLinear", broadcasts=(1,), inputs=(0, 1))
def dequantize_linear(op, dy, x, scale, zero_point, *, axis, block_size):
    """Y = (Q - zero) scale: dQ = dY scale, dscale = sum(dY (Q - zero))."""
    dy = cast_like(op, dy, scale)
    levels = cast_like(op, x, scale)
    if zero_point is not None:
        levels = levels - _broadcast_scale(op, cast_like(op, zero_point, scale), x, axis, block_size)
    return dy * _broadcast_scale(op, scale, x, axis, block_size), _gather_up(op, dy * levels, scale, axis, block_size)


@gradient("DynamicQuantizeLinear")
def dynamic_quantize_linear(op, dys, x, *, ys):
    """As QuantizeLinear, with scale = (max(X, 0) - min(X, 0)) / 255; extremes that tie have equal parts in it."""
    dy, dscale = (*dys, None)[:2]
    scale = ys[1]
    dx = None
    if dy is not None:
        dx = cast_like(op, dy, scale) / scale
        through_scale = op.ReduceSum(dx * x, keepdims=0) / -scale
        dscale = through_scale if dscale is None else dscale + through_scale
    if dscale is None:
        return None
    highest, lowest = op.ReduceMax(x, keepdims=0), op.ReduceMin(x, keepdims=0)
    high = cast_like(op, op.And(op.Equal(x, highest), x > 0), x)
    low = cast_like(op, op.And(op.Equal(x, lowest), x < 0), x)
    extremes = high / _at_least_one(op, high) - low / _at_least_one(op, low)
    through_extremes = extremes * (dscale / 255)
    return through_extremes if dx is None else dx + through_extremes


@body("MatMulInteger")
def matmul_integer(op, a, b, a_zero, b_zero):
    """In float64, which is exact here, and has fast products everywhere."""
    exact = op.constant(np.float64(0))
    product = _levels(op, a, a_zero, exact, -2) @ _levels(op, b, b_zero, exact, -1)
    return op.Cast(product, to=ir.DataType.INT32)


@body("ConvInteger")
def conv_integer(op, x, w, x_zero, w_zero, *, node):
    exact = op.constant(np.float64(0))
    x, w = _levels(op, x, x_zero, exact, 0), _levels(op, w, w_zero, exact, 0)
    return op.Cast(op.Conv(x, w, **standard_attributes(node, *_SLIDE)), to=ir.DataType.INT32)


@gradient("MatMulInteger", broadcasts=(0, 1), inputs=(0, 1))
def matmul_integer_gradient(op, dy, a, b, a_zero, b_zero):
    """As MatMul of the levels, which are counted from the zero points."""
    return matmul(op, dy, _levels(op, a, a_zero, dy, -2), _levels(op, b, b_zero, dy, -1))


@gradient("ConvInteger", inputs=(0, 1))
def conv_integer_gradient(op, dy, x, w, x_zero, w_zero, *, y, auto_pad, dilations, group, kernel_shape, pads, strides):
    """As Conv of the levels."""
    settings = {"auto_pad": auto_pad, "dilations": dilations, "group": group, "pads": pads, "strides": strides}
    x, w = _levels(op, x, x_zero, dy, 0), _levels(op, w, w_zero, dy, 0)
    return conv(op, dy, x, w, None, y=y, kernel_shape=kernel_shape, **settings)[:2]


def _levels(op, x, zero, like, axis):
    """Integers as floating-point numbers, counted from their zero point."""
    levels = cast_like(op, x, like)
    if zero is None:
        return levels
    zero = cast_like(op, zero, like)
    return levels - (_broadcast_scale(op, zero, x, axis, 0) if _rank(zero) == 1 else zero)


@rewrite("QLinearConv")
def q_linear_conv(op, x, x_scale, x_zero, weights, w_scale, w_zero, y_scale, y_zero, bias, *, node):
    """Dequantised, computed, and quantised again."""
    y = conv_of_quantised(op, op.DequantizeLinear(x, x_scale, x_zero), x_scale, weights, w_scale, w_zero, bias, node)
    return op.QuantizeLinear(y, y_scale, y_zero)


def conv_of_quantised(op, x, x_scale, weights, w_scale, w_zero, bias, node):
    """The Conv in it. The bias has the scale of the products."""
    return op.Conv(
        x,
        op.DequantizeLinear(weights, w_scale, w_zero, axis=0),
        None if bias is None else cast_like(op, bias, x_scale) * (x_scale * w_scale),
        **standard_attributes(node, *_SLIDE),
    )


@rewrite("QLinearMatMul")
def q_linear_matmul(op, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero):
    """The same; there may be a scale for each row of A and Y, and for each column of B."""
    product = op.DequantizeLinear(a, a_scale, a_zero, axis=-2) @ op.DequantizeLinear(b, b_scale, b_zero, axis=-1)
    return op.QuantizeLinear(product, y_scale, y_zero, axis=-2)


def _at_least_one(op, mask):
    """How many there are, or 1."""
    return op.Max(op.ReduceSum(mask, keepdims=0), 1)


# ---- one scale for a tensor, for each index of an axis, or for each block along an axis ------------------------------


def _broadcast_scale(op, scale, x, axis, block_size):
    """The scale in a shape that broadcasts with x."""
    if block_size:
        length = op.Squeeze(op.Gather(op.Shape(x), [axis]), [0])
        positions = op.Range(np.int64(0), length, np.int64(1))
        return op.Gather(scale, positions / block_size, axis=axis)
    if _rank(scale) == 0:
        return scale
    after = _axes_after(op, x, axis)
    if isinstance(after, int):
        return op.Reshape(scale, [-1, *[1] * after])
    ones = op.ConstantOfShape(op.Unsqueeze(after, [0]), value=np.ones(1, np.int64))
    return op.Reshape(scale, op.Concat([-1], ones, axis=0))


def _gather_up(op, values, scale, axis, block_size):
    """Sum over what shares a scale; where that is all, the driver sums up."""
    if block_size:
        return _sum_blocks(op, values, scale, axis, block_size)
    if _rank(scale) == 0 or _rank(values) == 1:
        return values
    after, rank = _axes_after(op, values, axis), _rank(values)
    if isinstance(after, int) and rank is not None:
        return op.ReduceSum(values, [i for i in range(rank) if i != rank - 1 - after], keepdims=0)
    rank = op.Size(op.Shape(values))
    kept = rank - 1 - after
    one = np.int64(1)
    axes = op.Concat(op.Range(np.int64(0), kept, one), op.Range(kept + 1, rank, one), axis=0)
    return op.ReduceSum(values, axes, keepdims=0, noop_with_empty_axes=1)


def _sum_blocks(op, values, scale, axis, block_size):
    """Sum over blocks of an axis, of which the last may be short."""
    blocks = op.Gather(op.Shape(scale), [axis])
    missing = blocks * block_size - op.Gather(op.Shape(values), [axis])
    whole = pad_axes(op, values, op.Concat([0], missing, axis=0), [axis])
    rank = _rank(values)
    after = [] if axis == -1 or axis + 1 == rank else [op.Shape(values, start=axis + 1)]
    before = [] if axis == 0 else [op.Shape(values, end=axis)]
    shape = op.Concat(*before, blocks, [block_size], *after, axis=0)
    return op.ReduceSum(op.Reshape(whole, shape), [axis + 1 if axis >= 0 else axis], keepdims=0)


def _axes_after(op, x, axis):
    """How many axes come after `axis`: a number, or known only at run time. A vector has but one."""
    rank = _rank(x)
    if rank is not None:
        return 0 if rank < 2 else rank - 1 - axis % rank
    return -1 - axis if axis < 0 else op.Size(op.Shape(x)) - (1 + axis)


def _rank(x):
    return None if x.value.shape is None else x.value.shape.rank()
