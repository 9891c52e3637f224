"""Quantization, and products of quantized tensors. Rounding counts as the identity when it is differentiated.

Integers have no derivative in TensorFlow. So a quantized tensor carries its levels as floating-point numbers, which
`DequantizeLinear` finds there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.quantization import broadcast_parameter
from onward.engines.tensorflow.tensors import dtype_of, on_host, wide

operators = Operators()


@operators.define("QuantizeLinear")
def quantize_linear(x, scale, zero=None, *, axis, block_size, output_dtype, precision, saturate):
    number = output_dtype or (
        ir.DataType.UINT8 if zero is None else ir.DataType.from_numpy(np.dtype(zero.dtype.as_numpy_dtype))
    )
    dtype = dtype_of(number)
    if dtype is None:
        attributes = {"axis": axis, "block_size": block_size, "output_dtype": output_dtype}
        return on_host("QuantizeLinear")(x, scale, zero, precision=precision, saturate=saturate, **attributes)
    kind = dtype_of(precision) if precision else scale.dtype
    divided = wide(tf.cast(x, kind) / tf.cast(broadcast_parameter(scale, x, axis, block_size), kind))
    levels = divided + tf.stop_gradient(tf.round(divided) - divided)
    if zero is not None:
        levels += tf.cast(broadcast_parameter(zero, x, axis, block_size), levels.dtype)
    levels = tf.minimum(tf.maximum(levels, dtype.min), dtype.max)
    quantized = tf.cast(levels, dtype)
    quantized.levels = levels
    return quantized


@operators.define("DequantizeLinear")
def dequantize_linear(x, scale, zero=None, *, axis, block_size, output_dtype):
    dtype = dtype_of(output_dtype) if output_dtype else scale.dtype
    levels = getattr(x, "levels", None)
    levels = tf.cast(x, tf.int32) if levels is None else levels
    if zero is not None:
        levels -= tf.cast(broadcast_parameter(zero, x, axis, block_size), levels.dtype)
    return tf.cast(levels, dtype) * tf.cast(broadcast_parameter(scale, x, axis, block_size), dtype)
