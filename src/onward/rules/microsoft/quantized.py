"""Operators on quantized tensors: dequantize, compute and quantize again, with straight-through gradients."""

import functools
import operator

import numpy as np

from onward.rules.common import rank, standard_attributes
from onward.rules.microsoft.attention import attention
from onward.rules.microsoft.domain import refuse, rewrite
from onward.rules.microsoft.image import channels_first, channels_last
from onward.rules.quantization import conv_of_quantized

rewrite("QuantizeLinear")(lambda op, x, scale, zero, *, axis=1: op.QuantizeLinear(x, scale, zero, axis=axis))
rewrite("DequantizeLinear")(lambda op, x, scale, zero, *, axis=1: op.DequantizeLinear(x, scale, zero, axis=axis))


def _of_two(function):
    return lambda op, a, a_scale, a_zero, b, b_scale, b_zero, scale, zero: _quantize(
        op, function(op.DequantizeLinear(a, a_scale, a_zero), op.DequantizeLinear(b, b_scale, b_zero)), scale, zero, a
    )


rewrite("QLinearAdd")(_of_two(operator.add))
rewrite("QLinearMul")(_of_two(operator.mul))


@rewrite("QLinearSigmoid")
def sigmoid(op, x, x_scale, x_zero, scale, zero):
    return _quantize(op, op.Sigmoid(op.DequantizeLinear(x, x_scale, x_zero)), scale, zero, x)


@rewrite("QLinearLeakyRelu")
def leaky_relu(op, x, x_scale, x_zero, scale, zero, *, alpha=0.01):
    return _quantize(op, op.LeakyRelu(op.DequantizeLinear(x, x_scale, x_zero), alpha=alpha), scale, zero, x)


@rewrite("QLinearSoftmax")
def softmax(op, x, x_scale, x_zero, scale, zero, *, axis=-1, opset):
    """Return the softmax; below opset 13, over all axes from `axis` on."""
    y = op.DequantizeLinear(x, x_scale, x_zero)
    if opset >= 13:
        y = op.Softmax(y, axis=axis)
    else:
        y = op.Reshape(op.Softmax(op.Flatten(y, axis=axis), axis=-1), op.Shape(x))
    return _quantize(op, y, scale, zero, x)


@rewrite("QLinearAveragePool")
def average_pool(op, x, x_scale, x_zero, scale, zero, *, kernel_shape, channels_last=0, node):
    y = op.DequantizeLinear(x, x_scale, x_zero)
    names = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    pool = functools.partial(op.AveragePool, **standard_attributes(node, *names))
    y = _with_channels_first(op, y, len(kernel_shape) + 2 if channels_last else 0, pool)
    return _quantize(op, y, scale, zero, x)


@rewrite("QLinearGlobalAveragePool")
def global_average_pool(op, x, x_scale, x_zero, scale, zero, *, channels_last=0, node):
    if channels_last and rank(x) is None:
        refuse(node, "channels last in images of unknown rank")
    image = op.DequantizeLinear(x, x_scale, x_zero)
    y = _with_channels_first(op, image, rank(x) if channels_last else 0, op.GlobalAveragePool)
    return _quantize(op, y, scale, zero, x)


@rewrite("QLinearConv")
def conv(op, x, x_scale, x_zero, weights, w_scale, w_zero, scale, zero, bias, *, channels_last=0, node):
    """Return the standard QLinearConv, also with channels last."""
    if channels_last and rank(weights) is None:
        refuse(node, "channels last in images of unknown rank")

    def convolved(image):
        return conv_of_quantized(op, image, x_scale, weights, w_scale, w_zero, bias, node)

    image = op.DequantizeLinear(x, x_scale, x_zero)
    y = _with_channels_first(op, image, rank(weights) if channels_last else 0, convolved)
    return _quantize(op, y, scale, zero, x)


@rewrite("QLinearConcat")
def concat(op, scale, zero, *inputs, axis):
    floats = [op.DequantizeLinear(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return _quantize(op, op.Concat(*floats, axis=axis), scale, zero, inputs[0])


@rewrite("QLinearWhere")
def where(op, condition, a, a_scale, a_zero, b, b_scale, b_zero, scale, zero):
    y = op.Where(condition, op.DequantizeLinear(a, a_scale, a_zero), op.DequantizeLinear(b, b_scale, b_zero))
    return _quantize(op, y, scale, zero, a)


@rewrite("QGemm")
def gemm(op, a, a_scale, a_zero, b, b_scale, b_zero, c, scale, zero, *, alpha=1.0, transA=0, transB=0):
    """Return the Gemm. C has the scale alpha a_scale b_scale; B may have a scale per column."""
    columns = 0 if transB else 1
    y = op.Gemm(
        op.DequantizeLinear(a, a_scale, a_zero),
        op.DequantizeLinear(b, b_scale, b_zero, axis=columns),
        None if c is None else op.CastLike(c, a_scale) * (a_scale * b_scale * alpha),
        alpha=alpha,
        transA=transA,
        transB=transB,
    )
    return y if scale is None else _quantize(op, y, scale, zero, a)


@rewrite("MatMulIntegerToFloat")
def matmul_integer_to_float(op, a, b, a_scale, b_scale, a_zero, b_zero, bias):
    y = op.DequantizeLinear(a, a_scale, a_zero, axis=-1) @ op.DequantizeLinear(b, b_scale, b_zero, axis=-1)
    return y if bias is None else y + bias


@rewrite("DynamicQuantizeMatMul")
def dynamic_quantize_matmul(op, a, b, b_scale, b_zero, bias):
    y = op.DequantizeLinear(*op.DynamicQuantizeLinear(a, outputs=3)) @ op.DequantizeLinear(b, b_scale, b_zero, axis=-1)
    return y if bias is None else y + bias


@rewrite("QAttention")
def quantized_attention(
    op, x, weights, bias, x_scale, weight_scale, mask, x_zero, weight_zero, past, *, num_heads, scale=0.0,
    mask_filter_value=-10000.0, unidirectional=0, do_rotary=0, past_present_share_buffer=0, node,
):  # fmt: skip
    return attention(
        op, op.DequantizeLinear(x, x_scale, x_zero), op.DequantizeLinear(weights, weight_scale, weight_zero, axis=1),
        bias, mask, past, None, None, num_heads=num_heads, scale=scale, mask_filter_value=mask_filter_value,
        unidirectional=unidirectional, do_rotary=do_rotary, past_present_share_buffer=past_present_share_buffer,
        node=node,
    )  # fmt: skip


def _quantize(op, y, scale, zero, like):
    """Quantize `y`; without a zero point, in the type of `like`."""
    if zero is None and like.dtype is not None:
        zero = op.constant(np.zeros((), like.dtype.numpy()))
    return op.QuantizeLinear(y, scale, zero)


def _with_channels_first(op, image, axes, function):
    """Apply a function to an image of rank `axes` with channels last, or with channels first if `axes` is 0."""
    return channels_last(op, function(channels_first(op, image, axes)), axes) if axes else function(image)
