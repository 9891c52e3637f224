"""Attention and linear attention in terms of other standard operators."""

import functools
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Expr
from onward.constants import HALVES
from onward.rules.common import cast_like, iota
from onward.rules.indexing import along, fill, join_shape, pad_axes, reshape_to
from onward.rules.registry import rewrite


@rewrite("Attention")
def attention(
    op, q, k, v, mask, past_key, past_value, lengths, *, node,
    q_num_heads, kv_num_heads, scale, softcap, softmax_precision, qk_matmul_output_mode,
    is_causal, left_window_size=-1, right_window_size=-1,
):  # fmt: skip
    """Y = P V, P = softmax(cap(scale Q K') + bias), for each head; P is 0 for a query that attends to no key."""
    flat = q_num_heads is not None if q.value.shape is None else q.value.shape.rank() == 3
    if flat:  # the heads lie side by side in the last axis
        q, k, v = (_split_heads(op, x, n) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads)))
    past, k, v = 0, _append_past(op, past_key, k), _append_past(op, past_value, v)
    if past_key is not None:
        past = _size(op, past_key, 2).shape
    elif lengths is not None:  # keys behind the last valid one do not count
        past = op.Unsqueeze(lengths, [1, 2, 3]) - _size(op, q, 2).shape
    visible = _visible(op, q, k, past, lengths, 0 if is_causal else right_window_size, left_window_size)
    bias = _bias(op, q, k, mask, visible)

    products = _products(op, q, k, scale)
    capped = op.Tanh(products / softcap) * softcap if softcap > 0 else products
    scores = capped if bias is None else capped + bias
    blind = None
    if mask is not None or lengths is not None or left_window_size >= 0:
        blind = op.Equal(op.ReduceMax(bias, [-1], keepdims=1), -np.inf)
    scores_of_visible = scores if blind is None else capped + op.Where(blind, 0, bias)
    if softmax_precision is not None:
        scores_of_visible = op.Cast(scores_of_visible, to=ir.DataType(softmax_precision))
    weights = cast_like(op, op.Softmax(scores_of_visible, axis=-1), q)
    y = _weigh(op, weights, cast_like(op, v, q))
    if blind is not None:
        y = op.Where(blind, 0, y)
    if flat:
        width = _times(op, _size(op, q, 1), _size(op, v, 3))
        y = _reshape(op, op.Transpose(y, perm=[0, 2, 1, 3]), _size(op, q, 0), _size(op, q, 2), width)
    if qk_matmul_output_mode == 3 and blind is not None:
        weights = op.Where(blind, 0, weights)
    results = y, k, v, (products, capped, scores, weights)[qk_matmul_output_mode]
    for output, result in zip(node.outputs, results, strict=False):
        if output.shape is not None and 0 in output.shape:  # the inference of onnx writes 0 for unknown sizes
            output.shape = result.value.shape
    return results


def _split_heads(op, x, heads):
    """Reshape (batch, length, heads * width) to (batch, heads, length, width)."""
    count = _constant_of(heads)
    split = _reshape(op, x, _size(op, x, 0), _size(op, x, 1), count, _over(op, _size(op, x, 2), count))
    return op.Transpose(split, perm=[0, 2, 1, 3])


def _append_past(op, past, x):
    if past is None:
        return x
    whole = op.Concat(past, x, axis=2)
    sizes = [_size(op, x, axis).dim for axis in range(4)]
    lengths = _size(op, past, 2).dim, sizes[2]
    sizes[2] = sum(lengths) if all(isinstance(n, int) for n in lengths) else _symbol(op)
    whole.value.shape = ir.Shape(sizes)
    return whole


# ---- masks -----------------------------------------------------------------------------------------------------------


def _bias(op, q, k, mask, visible):
    """Return the bias of the scores: a float mask, and -inf for masked keys."""
    masked = op.scalar(-np.inf, q)
    bias = None
    if mask is not None:
        bias = op.Where(mask, op.scalar(0, q), masked) if mask.dtype is ir.DataType.BOOL else cast_like(op, mask, q)
        bias = _to_length(op, bias, k, masked)
    if visible is None:
        return bias
    return op.Where(visible, op.scalar(0, q) if bias is None else bias, masked)


def _to_length(op, bias, k, masked):
    """Pad a mask that is shorter than the keys, as from opset 24 on: keys behind its end are masked."""
    shape, total = bias.value.shape, _size(op, k, 2)
    if op.opset < 24 or (shape is not None and isinstance(shape[-1], int) and shape[-1] == total.dim):
        return bias
    missing = op.Sub(total.shape, along(op, bias, -1))
    longer = pad_axes(op, bias, op.Concat([0], missing, axis=0), [-1], masked)
    if shape is not None:
        longer.value.shape = ir.Shape([*shape[:-1], total.dim])
    return longer


def _visible(op, q, k, past, lengths, ahead, behind):
    """Return a mask of the keys within the window and not padding, True for visible; None if all are."""
    keys, queries = _positions(op, k), op.Unsqueeze(_positions(op, q), [1])
    position = queries if isinstance(past, int) else queries + past
    conditions = []
    if ahead >= 0:
        conditions.append(keys <= (position + ahead if ahead else position))
    if behind >= 0:
        conditions.append(keys >= position - behind)
    if lengths is not None:
        conditions.append(keys < op.Unsqueeze(lengths, [1, 2, 3]))
    return functools.reduce(op.And, conditions) if conditions else None


def _positions(op, x):
    """Number queries or keys: 0, 1, 2 ..."""
    size = _size(op, x, 2)
    count = np.int64(size.dim) if isinstance(size.dim, int) else op.Squeeze(size.shape, [0])
    numbers = iota(op, count)
    numbers.value.shape = ir.Shape([size.dim])
    return numbers


# ---- products for each head ------------------------------------------------------------------------------------------


def _products(op, q, k, scale):
    """Return scale Q K'. Both sides get the root of the scale, to avoid overflow."""
    root = _power(op, _size(op, q, 3), -0.25, q) if scale is None else float(np.sqrt(scale))
    grouped = _group_heads(op, q, k)
    products = op.MatMul(grouped * root, op.Transpose(k * root, perm=[0, 1, 3, 2]))
    if grouped is q:
        return products
    return _reshape(op, products, *(_size(op, q, axis) for axis in range(3)), _size(op, k, 2))


def _weigh(op, weights, v):
    """Return P V."""
    grouped = _group_heads(op, weights, v)
    y = op.MatMul(grouped, v)
    if grouped is weights:
        return y
    return _reshape(op, y, *(_size(op, weights, axis) for axis in range(3)), _size(op, v, 3))


def _group_heads(op, x, kv):
    """Stack heads that share keys and values along the length, so that one matmul computes them all."""
    heads, shared = _size(op, x, 1), _size(op, kv, 1)
    if heads.dim == shared.dim:
        return x
    rows = _times(op, _over(op, heads, shared), _size(op, x, 2))
    return _reshape(op, x, _size(op, x, 0), shared, rows, _size(op, x, 3))


# ---- sizes that may be known only at run time ------------------------------------------------------------------------


class _Size(NamedTuple):
    """A size, known or symbolic, with its value as a shape of one axis."""

    dim: int | ir.SymbolicDim
    shape: list[int] | Expr


def _size(op, x, axis):
    dim = None if x.value.shape is None else x.value.shape[axis]
    named = isinstance(dim, int) or (dim is not None and dim.value is not None)
    return _Size(dim if named else _symbol(op), along(op, x, axis))


def _symbol(op):
    return ir.SymbolicDim(op.names.fresh("dim"))


def _times(op, a, b):
    if isinstance(a.dim, int) and isinstance(b.dim, int):
        return _constant_of(a.dim * b.dim)
    return _Size(_symbol(op), op.Mul(a.shape, b.shape))


def _over(op, a, b):
    if isinstance(a.dim, int) and isinstance(b.dim, int):
        return _constant_of(a.dim // b.dim)
    return _Size(_symbol(op), op.Div(a.shape, b.shape))


def _constant_of(number):
    return _Size(number, [number])


def _power(op, size, exponent, like):
    """Return a size to the power of a number, in the type of `like`."""
    if isinstance(size.dim, int):
        return max(size.dim, 1) ** exponent
    return op.Pow(cast_like(op, size.shape, like), exponent)


def _reshape(op, x, *sizes):
    y = reshape_to(op, x, join_shape(op, *(size.shape for size in sizes)))
    y.value.shape = ir.Shape([size.dim for size in sizes])
    return y


@rewrite("LinearAttention")
def linear_attention(op, q, k, v, past, decay, beta, *, q_num_heads, kv_num_heads, scale):
    """Scan over steps: S = exp(decay) S; S = S + K' beta (V - K S), or S + K' V without beta; Y = scale Q S.

    Half precision is computed in float32, as the operator does.
    """
    dtype = ir.DataType.FLOAT if q.dtype in HALVES else q.dtype

    def wide(x):
        return x if x is None or x.dtype == dtype else op.Cast(x, to=dtype)

    queries, keys, values, state, decay, beta = map(wide, (q, k, v, past, decay, beta))
    single, heads, shared = _constant_of(1), _constant_of(kv_num_heads), _constant_of(q_num_heads // kv_num_heads)
    batch, length = _size(op, q, 0), _size(op, q, 1)
    key_width, width = _over(op, _size(op, k, 2), heads), _over(op, _size(op, v, 2), heads)
    sizes = batch, heads, key_width, width
    if state is None:
        state = fill(op, join_shape(op, *(size.shape for size in sizes)), 0, queries)
        state.value.shape = ir.Shape([size.dim for size in sizes])

    def by_step(x, *sizes):
        return op.Transpose(_reshape(op, x, batch, length, *sizes), perm=[1, 0, 2, 3, 4])

    items = [
        by_step(queries * (scale or _power(op, key_width, -0.5, queries)), heads, shared, key_width),
        by_step(keys, heads, single, key_width),
        by_step(values, heads, single, width),
    ]
    if decay is not None:  # per head, or per element of its keys
        items.append(by_step(op.Exp(decay), heads, _over(op, _size(op, decay, 2), heads), single))
    if beta is not None:  # per head, or one for all
        items.append(by_step(beta, _size(op, beta, 2), single, single))

    def step(op, state, query, key, value, *gates):
        gates = list(gates)
        if decay is not None:
            state = state * gates.pop(0)
        if beta is not None:
            value = (value - op.MatMul(key, state)) * gates.pop(0)
        state = state + op.MatMul(op.Transpose(key, perm=[0, 1, 3, 2]), value)
        return state, op.MatMul(query, state)

    shapes = [state.value.shape or [size.dim for size in sizes], *(list(item.value.shape)[1:] for item in items)]
    entries = [ir.Value(name="entry", type=ir.TensorType(dtype), shape=ir.Shape(shape)) for shape in shapes]
    body = op.subgraph(step, entries, name="step")
    state, y = op.Scan(state, *items, outputs=2, body=body, num_scan_inputs=len(items))
    y.value.shape = ir.Shape([length.dim, batch.dim, heads.dim, shared.dim, width.dim])
    y = _reshape(op, op.Transpose(y, perm=[1, 0, 2, 3, 4]), batch, length, _times(op, _constant_of(q_num_heads), width))
    return cast_like(op, y, q), cast_like(op, state, q if past is None else past)
