"""Losses of class scores [N, C, d...] given labels [N, d...]."""

import numpy as np
import onnx_ir as ir

from onward.rules.common import cast_like
from onward.rules.registry import gradient


@gradient("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(op, dys, scores, labels, weights, *, ys, reduction, ignore_index):
    """dscores = w dY (softmax(scores) - 1 at the label), w being the share of the sample in the loss."""
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
    """dlog_prob = -w dY at the label, 0 elsewhere, w being the share of the sample in the loss."""
    log_prob = _wide(op, log_prob)
    dy = cast_like(op, dy, log_prob)
    share, index, dweights = _shares(op, dy, log_prob, labels, weights, reduction, ignore_index)
    return op.ScatterElements(_zeros_like(op, log_prob), index, -share, axis=1), None, dweights


def _shares(op, dy, log_prob, labels, weights, reduction, ignore_index):
    """The derivative of the loss by minus the log-probability of each label; where it is; the derivative by weights.

    The mean divides by the sum of the weights of the labels that are not ignored. What is ignored has the share 0, also
    if there is nothing else.
    """
    ignored = None if ignore_index is None else op.Equal(labels, ignore_index)
    labels = labels if ignored is None else op.Where(ignored, 0, labels)
    index = op.Unsqueeze(labels, [1])
    weights = None if weights is None else cast_like(op, weights, dy)
    weight = None if weights is None else op.Gather(weights, labels)
    total = _total(op, dy, labels, weight, ignored) if reduction == "mean" else None
    each = dy if total is None else dy / total
    share = each if weight is None else each * weight
    if weight is None and reduction != "none":
        share = op.Expand(share, op.Shape(labels))
    share = op.Unsqueeze(_where_kept(op, ignored, share), [1])
    if weights is None:
        return share, index, None
    loss = -op.Squeeze(op.GatherElements(log_prob, index, axis=1), [1])
    if total is not None:
        kept = _where_kept(op, ignored, loss * weight)
        loss = loss - op.ReduceSum(kept, keepdims=0) / total
    by_weight = op.Reshape(_where_kept(op, ignored, each * loss), [-1])
    indices = op.Reshape(labels, [-1])
    return share, index, op.ScatterElements(_zeros_like(op, weights), indices, by_weight, axis=0, reduction="add")


def _total(op, dy, labels, weight, ignored):
    """The sum of the weights that take part."""
    if weight is not None:
        return op.ReduceSum(_where_kept(op, ignored, weight), keepdims=0)
    if ignored is None:
        return op.CastLike(op.Size(labels), dy)
    return op.CastLike(op.ReduceSum(op.Cast(op.Not(ignored), to=ir.DataType.INT64), keepdims=0), dy)


def _where_kept(op, ignored, values):
    return values if ignored is None else op.Where(ignored, 0, values)


def _wide(op, x):
    """In float32 or more: sums over a batch need it, and ONNX Runtime scatters nothing less."""
    narrow = x.dtype is not None and x.dtype.itemsize < ir.DataType.FLOAT.itemsize
    return op.Cast(x, to=ir.DataType.FLOAT) if narrow else x


def _zeros_like(op, x):
    if x.dtype is None:
        return op.CastLike(op.ConstantOfShape(op.Shape(x)), x)
    return op.ConstantOfShape(op.Shape(x), value=ir.Tensor(np.zeros(1, x.dtype.numpy()), dtype=x.dtype))
