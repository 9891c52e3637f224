"""Reductions, cumulative sums and products, selection by order, and losses of class scores."""

import math

import numpy as np
import onnx_ir as ir

from onward.build import DOMAIN
from onward.rules.common import cast_like, finite, iota
from onward.rules.indexing import filled_like
from onward.rules.registry import gradient, no_gradient
from onward.shapes import dims

no_gradient("the result is made of integers", "ArgMax", "ArgMin")


def _keep_axes(op, reduced, axes, keepdims):
    """Return a result of a reduction with the reduced axes of size 1, so that it broadcasts with the operand.

    Without axes, or with empty ones, either all axes were reduced and a scalar broadcasts anyway, or none
    (`noop_with_empty_axes`) and the shape is already right.
    """
    return reduced if keepdims or axes is None else op.Unsqueeze(reduced, axes)


def _like(op, small, x):
    return op.Expand(small, op.Shape(x))


gradient("ReduceSum")(lambda op, dy, x, axes, *, keepdims: _like(op, _keep_axes(op, dy, axes, keepdims), x))
gradient("ReduceSumSquare")(lambda op, dy, x, axes, *, keepdims: _keep_axes(op, dy * 2, axes, keepdims) * x)
gradient("ReduceL1")(lambda op, dy, x, axes, *, keepdims: _keep_axes(op, dy, axes, keepdims) * op.Sign(x))  # 0 at 0


@gradient("ReduceMean")
def reduce_mean(op, dy, x, axes, *, keepdims):
    """dX = dY / n for each of n elements."""
    return _like(op, _keep_axes(op, dy * _share(op, dy, x), axes, keepdims), x)


def _share(op, reduced, x):
    """Return 1 / n for n elements of `x` per element of `reduced`."""
    small, large = dims(reduced.value), dims(x.value)
    if small is not None and large is not None and all(isinstance(n, int) and n > 0 for n in (*small, *large)):
        return math.prod(small) / math.prod(large)
    double = op.constant(np.float64(1))
    return cast_like(op, cast_like(op, op.Size(reduced), double) / cast_like(op, op.Size(x), double), x)


@gradient("ReduceL2")
def reduce_l2(op, dy, x, axes, *, y, keepdims):
    """dX = X dY / Y; 0 for a vector of zeros."""
    length = op.Where(op.Equal(y, 0), 1, y)
    return _keep_axes(op, dy / length, axes, keepdims) * x


@gradient("ReduceLogSum")
def reduce_log_sum(op, dy, x, axes, *, y, keepdims):
    """dX = dY / sum(X) = dY exp(-Y)."""
    return _like(op, _keep_axes(op, dy * finite(op, op.Exp(-y)), axes, keepdims), x)


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp(op, dy, x, axes, *, y, keepdims):
    """dX = dY exp(X - Y); 0 where all of X is -inf."""
    total = op.Where(op.Equal(y, -math.inf), 0, y)
    return _keep_axes(op, dy, axes, keepdims) * op.Exp(x - _keep_axes(op, total, axes, keepdims))


@gradient("ReduceMax", "ReduceMin")
def reduce_extreme(op, dy, x, axes, *, y, keepdims, noop_with_empty_axes):
    """dX = dY where X is the extreme; elements that tie share it evenly."""
    chosen = op.Equal(x, _keep_axes(op, y, axes, keepdims))
    ties = op.ReduceSum(cast_like(op, chosen, x), axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)
    return op.Where(chosen, _keep_axes(op, dy, axes, keepdims) / ties, 0)


@gradient("ReduceProd")
def reduce_prod(op, dy, x, axes, *, y, keepdims, noop_with_empty_axes):
    """dX = dY times the product of the other elements: Y / X where X is not 0.

    For the first and the last zero, the product is computed again with 1 instead. Between them it is 0, and so is its
    derivative. The second derivative is exact; higher ones are with fewer than three zeros.
    """

    options = {"keepdims": 1, "noop_with_empty_axes": noop_with_empty_axes}

    def without(element):
        return op.ReduceProd(op.Where(element, 1, x), axes, **options)

    zero = op.Equal(x, 0)
    size = op.Size(x)
    position = op.Reshape(iota(op, size), op.Shape(x), allowzero=1)
    first = op.Equal(position, op.ReduceMin(op.Where(zero, position, size), axes, **options))
    last = op.Equal(position, op.ReduceMax(op.Where(zero, position, np.int64(-1)), axes, **options))
    quotient = _keep_axes(op, y, axes, keepdims) / op.Where(zero, 1, x)
    others = op.Where(first, without(first), op.Where(last, without(last), op.Where(zero, 0, quotient)))
    return _keep_axes(op, dy, axes, keepdims) * others


@gradient("CumSum")
def cum_sum(op, dy, x, axis, *, exclusive, reverse):
    """dX = the cumulative sum of dY from the other end."""
    return op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse)


@gradient("CumProd")
def cum_prod(op, dy, x, axis, *, exclusive, reverse):
    """dX_i = the sum of dY_k times the product of all factors of Y_k except X_i, over the k with a factor X_i.

    The rule computes all n^2 products for n elements, since quotients fail at zeros.
    """
    shape = op.Shape(x)
    axis = op.Reshape(cast_like(op, axis, shape), [1])
    axis = op.Where(axis < 0, axis + op.Shape(shape), axis)
    before = op.ReduceProd(op.Slice(shape, [0], axis), keepdims=1)
    after = op.ReduceProd(op.Slice(shape, axis + np.int64(1), op.Shape(shape)), keepdims=1)
    length = op.Gather(shape, axis)
    table = op.Concat(before, [1], length, after, axis=0)
    index = iota(op, op.Squeeze(length, [0]))
    left_out, product = op.Unsqueeze(index, [1, 2]), op.Unsqueeze(index, [1])
    factors = op.Where(op.Equal(left_out, product), 1, op.Reshape(x, table, allowzero=1))
    products = op.CumProd(factors, np.int64(2), exclusive=exclusive, reverse=reverse)
    low, high = (product, left_out) if reverse else (left_out, product)
    among = low < high if exclusive else low <= high
    terms = op.Where(among, op.Reshape(dy, table, allowzero=1) * products, 0)
    return op.Reshape(op.ReduceSum(terms, [2], keepdims=0), shape, allowzero=1)


@gradient("TopK")
def top_k(op, dys, x, k, *, ys, axis):
    """dX = dY at the chosen elements, else 0."""
    zeros = op.Expand(op.scalar(0, x), op.Shape(x))
    return None if dys[0] is None else op.ScatterElements(zeros, ys[1], dys[0], axis=axis)


@gradient("AllReduce", domain=DOMAIN)
def all_reduce(op, dy, x):
    """Y = the sum of X over all processes, so dX is the sum of dY over all processes."""
    return op.node(DOMAIN, "AllReduce", dy, mean=0, common=0).like(dy.value)


# ---- losses of class scores ------------------------------------------------------------------------------------------


@gradient("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(op, dys, scores, labels, weights, *, ys, reduction, ignore_index):
    """dscores = w dY (softmax(scores) - 1 at the label), with the share w of the sample in the loss."""
    log_prob = _wide(op, ys[1] if len(ys) > 1 and ys[1].value.name else op.LogSoftmax(scores, axis=1))
    dloss, dlog_prob = (None if d is None else cast_like(op, d, log_prob) for d in (*dys, None)[:2])
    dscores = dweights = None
    if dloss is not None:
        share, index, dweights = _shares(op, dloss, log_prob, labels, weights, reduction, ignore_index)
        dscores = op.ScatterElements(op.Exp(log_prob) * share, index, -share, axis=1, reduction="add")
    if dlog_prob is not None:
        direct = dlog_prob - op.Exp(log_prob) * op.ReduceSum(dlog_prob, [1], keepdims=1)
        dscores = direct if dscores is None else dscores + direct
    return dscores, None, dweights


@gradient("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(op, dy, log_prob, labels, weights, *, reduction, ignore_index):
    """dlog_prob = -w dY at the label, 0 elsewhere, with the share w of the sample in the loss."""
    log_prob = _wide(op, log_prob)
    dy = cast_like(op, dy, log_prob)
    share, index, dweights = _shares(op, dy, log_prob, labels, weights, reduction, ignore_index)
    return op.ScatterElements(filled_like(op, log_prob, 0), index, -share, axis=1), None, dweights


def _shares(op, dy, log_prob, labels, weights, reduction, ignore_index):
    """Return the derivative of the loss by minus the log-probability of each label, the index of the label, and the
    derivative by the weights.

    The mean divides by the sum of the weights of the labels that are not ignored. Ignored labels have the share 0, even
    if there are no others.
    """
    ignored = None if ignore_index is None else op.Equal(labels, ignore_index)
    labels = labels if ignored is None else op.Where(ignored, 0, labels)
    index = op.Unsqueeze(labels, [1])
    weights = None if weights is None else cast_like(op, weights, dy)
    weight = None if weights is None else op.Gather(weights, labels)
    total = _total(op, dy, labels, weight, ignored) if reduction == "mean" else None
    per_sample = dy if total is None else dy / total
    share = per_sample if weight is None else per_sample * weight
    if weight is None and reduction != "none":
        share = op.Expand(share, op.Shape(labels))
    share = op.Unsqueeze(_without(op, ignored, share), [1])
    if weights is None:
        return share, index, None
    loss = -op.Squeeze(op.GatherElements(log_prob, index, axis=1), [1])
    if total is not None:
        loss = loss - op.ReduceSum(_without(op, ignored, loss * weight), keepdims=0) / total
    by_weight = op.Reshape(_without(op, ignored, per_sample * loss), [-1])
    indices = op.Reshape(labels, [-1])
    return share, index, op.ScatterElements(filled_like(op, weights, 0), indices, by_weight, axis=0, reduction="add")


def _total(op, dy, labels, weight, ignored):
    """Return the sum of the weights of the labels that are not ignored."""
    if weight is not None:
        return op.ReduceSum(_without(op, ignored, weight), keepdims=0)
    if ignored is None:
        return op.CastLike(op.Size(labels), dy)
    return op.CastLike(op.ReduceSum(op.Cast(op.Not(ignored), to=ir.DataType.INT64), keepdims=0), dy)


def _without(op, ignored, values):
    return values if ignored is None else op.Where(ignored, 0, values)


def _wide(op, x):
    """Cast to float32 or more: sums over a batch need it, and ONNX Runtime does not scatter half precision."""
    narrow = x.dtype is not None and x.dtype.itemsize < ir.DataType.FLOAT.itemsize
    return op.Cast(x, to=ir.DataType.FLOAT) if narrow else x
