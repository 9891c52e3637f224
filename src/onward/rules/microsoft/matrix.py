"""Matmuls fused with other operators, and with weights of a few bits."""

import numpy as np
import onnx_ir as ir

from onward.rules.common import rank
from onward.rules.microsoft.activation import apply_activation, tanh_gelu
from onward.rules.microsoft.domain import DOMAIN, refuse, rewrite
from onward.rules.registry import gradient


@rewrite("FusedMatMul", "TransposeMatMul")
def fused_matmul(op, a, b, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0, node):
    a, b = _move_batch_axis(op, a, transA, transBatchA, node), _move_batch_axis(op, b, transB, transBatchB, node)
    x = op.MatMul(a, b)
    return x if alpha == 1 else x * alpha


@rewrite("FusedMatMulActivation")
def fused_matmul_activation(
    op, a, b, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0, activation, activation_alpha,
    activation_beta, activation_gamma, activation_axis, node,
):  # fmt: skip
    y = fused_matmul(
        op, a, b, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB, node=node
    )
    if activation == "Softmax":
        return op.Softmax(y, axis=-1 if activation_axis is None else activation_axis)
    return apply_activation(op, y, activation, activation_alpha, activation_beta, activation_gamma)


@rewrite("FusedGemm")
def fused_gemm(
    op, a, b, c, *, alpha=1.0, beta=1.0, transA=0, transB=0, activation=None, activation_alpha, activation_beta,
    activation_gamma,
):  # fmt: skip
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return apply_activation(op, y, activation, activation_alpha, activation_beta, activation_gamma)


@rewrite("GemmFastGelu")
def gemm_fast_gelu(op, x, weights, bias):
    y = op.MatMul(x, weights)
    return tanh_gelu(op, y if bias is None else y + bias)


@rewrite("MatMulNBits")
def matmul_n_bits(
    op, a, b, scales, zero_points, group, bias, *, K, N, block_size, bits=4, weight_prepacked=0, node,
):  # fmt: skip
    """Multiply A by the transpose of weights with a scale and a zero point per block of a row."""
    if weight_prepacked:
        refuse(node, "weights that are packed for one device")
    if group is not None:
        refuse(node, "an order of groups")
    blocks = -(-K // block_size)
    levels = _unpack_bits(op, b, bits, node)
    levels = op.CastLike(op.Reshape(levels, [N, blocks, block_size]), scales)
    if zero_points is None:
        zeros = 2.0 ** (bits - 1)
    else:
        if zero_points.dtype is not None and zero_points.dtype.is_integer():
            zero_points = _unpack_bits(op, op.Reshape(zero_points, [N, -1]), bits, node)
            zero_points = op.CastLike(op.Slice(zero_points, [0], [blocks], [1]), scales)
        zeros = op.Reshape(zero_points, [N, blocks, 1])
    weights = (levels - zeros) * op.Reshape(scales, [N, blocks, 1])
    weights = op.Slice(op.Reshape(weights, [N, blocks * block_size]), [0], [K], [1])
    y = op.MatMul(a, op.Transpose(weights, perm=[1, 0]))
    return y if bias is None else y + bias


@rewrite("MatMulBnb4")
def matmul_bnb4(op, a, b, scales, *, K, N, block_size, quant_type, transB=1):
    """Multiply A by 4-bit weights, indices of 16 numbers, times the scale of their block; the high bits come first."""
    first, second = op.BitShift(b, np.uint8(4), direction="RIGHT"), op.BitwiseAnd(b, np.uint8(15))
    indices = op.Concat(op.Unsqueeze(first, [-1]), op.Unsqueeze(second, [-1]), axis=-1)
    blocks = -(-N * K // block_size)
    indices = op.Pad(op.Reshape(indices, [-1]), [0, blocks * block_size - 2 * (-(-N * K // 2))])
    numbers = op.CastLike(
        op.Gather(_FLOAT4 if quant_type == 0 else _NORMAL_FLOAT4, op.Cast(indices, to=ir.DataType.INT32)), scales
    )
    weights = op.Reshape(numbers, [blocks, block_size]) * op.Reshape(scales, [blocks, 1])
    weights = op.Reshape(op.Slice(op.Reshape(weights, [-1]), [0], [N * K], [0]), [N, K])
    return op.MatMul(a, op.Transpose(weights, perm=[1, 0]) if transB else weights)


_MAGNITUDES = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
_FLOAT4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES]).astype(np.float32)
_NORMAL_FLOAT4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""Numbers of the 4-bit types of QLoRA: a float with three exponent bits, and quantiles of the normal distribution."""


@rewrite("CDist")
def cdist(op, a, b, *, metric="sqeuclidean", node):
    """Return the distance of each row of A from each row of B."""
    difference = op.Unsqueeze(a, [1]) - op.Unsqueeze(b, [0])
    if metric == "sqeuclidean":
        return op.ReduceSumSquare(difference, [2], keepdims=0)
    if metric == "euclidean":
        return op.ReduceL2(difference, [2], keepdims=0)
    return refuse(node, f"the metric {metric}")


@gradient("Inverse", domain=DOMAIN)
def inverse(op, dy, x, *, y):
    """dX = -Y' dY Y'."""
    transposed = _swap_last(op, y if rank(y) is not None else y.like(x.value))
    return -(transposed @ dy @ transposed)


def _move_batch_axis(op, x, transposed, batch_last, node):
    """Move the first axis before the last if `batch_last`, then swap the last two if `transposed`."""
    if rank(x) == 1:
        return x
    if batch_last:
        if rank(x) is None:
            refuse(node, "transposed batches of unknown rank")
        last = rank(x) - 1
        x = op.Transpose(x, perm=[*range(1, last), 0, last])
    return _swap_last(op, x) if transposed else x


def _swap_last(op, x):
    if rank(x) is None:
        return op.Einsum(x, equation="...ij->...ji")
    return op.Transpose(x, perm=[*range(rank(x) - 2), rank(x) - 1, rank(x) - 2])


def _unpack_bits(op, packed, bits, node):
    """Unpack numbers of a few bits from bytes along the last axis, the lowest bits first."""
    if bits == 8:
        return packed
    if 8 % bits:
        refuse(node, f"weights of {bits} bits")
    shifts = np.arange(0, 8, bits).astype(np.uint8)
    numbers = op.BitShift(op.Unsqueeze(packed, [-1]), shifts, direction="RIGHT")
    numbers = op.BitwiseAnd(numbers, np.uint8(2**bits - 1))
    return op.Reshape(numbers, op.Concat(op.Shape(packed, end=-1), [-1], axis=0))
