"""Quantization by straight-through estimators: rounding counts as the identity, saturation as Clip.

The true derivative is zero almost everywhere. With the estimator, QuantizeLinear and DequantizeLinear pass on the
gradient of elements in range, and the scale has the gradient of learned step size quantization (LSQ). The gradient of a
quantized tensor is a float tensor of its shape. A zero point has none.
"""

import numpy as np
import onnx_ir as ir

from onward.model import Model
from onward.rules.common import cast_like, iota, rank, standard_attributes
from onward.rules.convolution import conv
from onward.rules.indexing import pad_axes
from onward.rules.matrix import matmul
from onward.rules.registry import body, gradient, rewrite
from onward.standard import STANDARD, is_standard

_SLIDE = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_DEFAULT_TYPE = ir.DataType.UINT8

ROUNDED = frozenset(("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QuantizeLinear"))
"""Operators whose integer results have a gradient, since they stand for floats."""
MOVING = frozenset((
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "Split", "Squeeze",
    "Tile", "Transpose", "Unsqueeze",
))  # fmt: skip
"""Operators that move such integers."""


def makes_rounded(domain: str, operator: str) -> bool:
    """True if an operator, or its rewrite, returns integers that stand for floats."""
    if domain == "com.microsoft":
        return operator.startswith("Q")
    return domain in STANDARD and (operator in ROUNDED or operator.startswith("QLinear"))


def rounds(model: Model) -> bool:
    """True if a model quantizes floats: the derivative of rounding in frameworks is zero."""
    return bool(_rounding(model))


def _rounding(model: Model) -> list[ir.Node]:
    containers: list[ir.Graph | ir.Function] = [model.graph, *(step.algorithm for step in model.steps)]
    containers += model.functions.values()
    nodes = (node for container in containers for node in container.all_nodes())
    return [node for node in nodes if makes_rounded(node.domain, node.op_type)]


def rounds_only_in_pairs(model: Model) -> bool:
    """True if each QuantizeLinear is followed by DequantizeLinear, which frameworks can differentiate."""
    return all(
        node.op_type == "QuantizeLinear"
        and not node.outputs[0].is_graph_output()
        and all(use.node.op_type == "DequantizeLinear" for use in node.outputs[0].uses())
        for node in _rounding(model)
    )


def stands_for_floats(value: ir.Value) -> bool:
    """True if an integer value is quantized floats, perhaps moved since."""
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
    dtype = declared or (ir.DataType(output_dtype) if output_dtype else _DEFAULT_TYPE)
    ratio = cast_like(op, x, scale) / spread
    level = op.Round(ratio) if dtype.is_integer() else ratio
    if zero_point is not None:
        level = level + _broadcast_scale(op, cast_like(op, zero_point, scale), x, axis, block_size)
    in_range = op.And(level >= float(dtype.min), level <= float(dtype.max))
    dx = op.Where(in_range, cast_like(op, dy, scale) / spread, 0)
    return dx, _sum_per_scale(op, -(dx * ratio), scale, axis, block_size)


@gradient("DequantizeLinear", broadcasts=(1,), inputs=(0, 1))
def dequantize_linear(op, dy, x, scale, zero_point, *, axis, block_size):
    """Y = (Q - zero) scale: dQ = dY scale, dscale = sum(dY (Q - zero))."""
    dy = cast_like(op, dy, scale)
    levels = cast_like(op, x, scale)
    if zero_point is not None:
        levels = levels - _broadcast_scale(op, cast_like(op, zero_point, scale), x, axis, block_size)
    return dy * _broadcast_scale(op, scale, x, axis, block_size), _sum_per_scale(
        op, dy * levels, scale, axis, block_size
    )


@gradient("DynamicQuantizeLinear")
def dynamic_quantize_linear(op, dys, x, *, ys):
    """As QuantizeLinear, with scale = (max(X, 0) - min(X, 0)) / 255; ties share its gradient evenly."""
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
    share_high, share_low = (mask / op.Max(op.ReduceSum(mask, keepdims=0), 1) for mask in (high, low))
    extremes = share_high - share_low
    through_extremes = extremes * (dscale / 255)
    return through_extremes if dx is None else dx + through_extremes


@body("MatMulInteger")
def matmul_integer(op, a, b, a_zero, b_zero):
    """Compute in float64, which is exact here and has fast matmuls everywhere."""
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
    """As MatMul of the levels."""
    return matmul(op, dy, _levels(op, a, a_zero, dy, -2), _levels(op, b, b_zero, dy, -1))


@gradient("ConvInteger", inputs=(0, 1))
def conv_integer_gradient(op, dy, x, w, x_zero, w_zero, *, y, auto_pad, dilations, group, kernel_shape, pads, strides):
    """As Conv of the levels."""
    settings = {"auto_pad": auto_pad, "dilations": dilations, "group": group, "pads": pads, "strides": strides}
    x, w = _levels(op, x, x_zero, dy, 0), _levels(op, w, w_zero, dy, 0)
    return conv(op, dy, x, w, None, y=y, kernel_shape=kernel_shape, **settings)[:2]


def _levels(op, x, zero, like, axis):
    """Return integers minus their zero point as floats."""
    levels = cast_like(op, x, like)
    if zero is None:
        return levels
    zero = cast_like(op, zero, like)
    return levels - (_broadcast_scale(op, zero, x, axis, 0) if rank(zero) == 1 else zero)


@rewrite("QLinearConv")
def q_linear_conv(op, x, x_scale, x_zero, weights, w_scale, w_zero, y_scale, y_zero, bias, *, node):
    """Dequantize, compute and quantize again."""
    y = conv_of_quantized(op, op.DequantizeLinear(x, x_scale, x_zero), x_scale, weights, w_scale, w_zero, bias, node)
    return op.QuantizeLinear(y, y_scale, y_zero)


def conv_of_quantized(op, x, x_scale, weights, w_scale, w_zero, bias, node):
    """Return the Conv of a dequantized image and dequantized weights. The bias has the scale of the products."""
    return op.Conv(
        x,
        op.DequantizeLinear(weights, w_scale, w_zero, axis=0),
        None if bias is None else cast_like(op, bias, x_scale) * (x_scale * w_scale),
        **standard_attributes(node, *_SLIDE),
    )


@rewrite("QLinearMatMul")
def q_linear_matmul(op, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero):
    """Dequantize, compute and quantize again. A and Y may have a scale per row, B one per column."""
    product = op.DequantizeLinear(a, a_scale, a_zero, axis=-2) @ op.DequantizeLinear(b, b_scale, b_zero, axis=-1)
    return op.QuantizeLinear(product, y_scale, y_zero, axis=-2)


# ---- scales per tensor, axis or block --------------------------------------------------------------------------------


def _broadcast_scale(op, scale, x, axis, block_size):
    """Reshape a scale to broadcast with x."""
    if block_size:
        length = op.Squeeze(op.Gather(op.Shape(x), [axis]), [0])
        return op.Gather(scale, iota(op, length) / block_size, axis=axis)
    if rank(scale) == 0:
        return scale
    after = _axes_after(op, x, axis)
    if isinstance(after, int):
        return op.Reshape(scale, [-1, *[1] * after])
    ones = op.ConstantOfShape(op.Unsqueeze(after, [0]), value=np.ones(1, np.int64))
    return op.Reshape(scale, op.Concat([-1], ones, axis=0))


def _sum_per_scale(op, values, scale, axis, block_size):
    """Sum the elements of each scale; the driver sums if there is only one."""
    if block_size:
        return _sum_blocks(op, values, scale, axis, block_size)
    if rank(scale) == 0 or rank(values) == 1:
        return values
    after, last = _axes_after(op, values, axis), rank(values)
    if isinstance(after, int) and last is not None:
        return op.ReduceSum(values, [i for i in range(last) if i != last - 1 - after], keepdims=0)
    last = op.Size(op.Shape(values))
    axis = last - 1 - after
    axes = op.Concat(iota(op, axis), op.Range(axis + 1, last, np.int64(1)), axis=0)
    return op.ReduceSum(values, axes, keepdims=0, noop_with_empty_axes=1)


def _sum_blocks(op, values, scale, axis, block_size):
    """Sum over blocks of an axis; the last one may be shorter."""
    blocks = op.Gather(op.Shape(scale), [axis])
    missing = blocks * block_size - op.Gather(op.Shape(values), [axis])
    whole = pad_axes(op, values, op.Concat([0], missing, axis=0), [axis])
    after = [] if axis == -1 or axis + 1 == rank(values) else [op.Shape(values, start=axis + 1)]
    before = [] if axis == 0 else [op.Shape(values, end=axis)]
    shape = op.Concat(*before, blocks, [block_size], *after, axis=0)
    return op.ReduceSum(op.Reshape(whole, shape), [axis + 1 if axis >= 0 else axis], keepdims=0)


def _axes_after(op, x, axis):
    """Return the number of axes behind `axis`, a number or a tensor; 0 for a vector."""
    axes = rank(x)
    if axes is not None:
        return 0 if axes < 2 else axes - 1 - axis % axes
    return -1 - axis if axis < 0 else op.Size(op.Shape(x)) - (1 + axis)
