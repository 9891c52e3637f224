"""Losses of classification."""

from __future__ import annotations

import math

import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.convolution import channels_last
from onward.engines.tensorflow.tensors import scalar

operators = Operators()


@operators.define("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(scores, labels, weights=None, *, ignore_index, reduction, outputs):
    if outputs > 1:
        logarithms = tf.nn.log_softmax(scores, 1)
        return negative_log_likelihood(logarithms, labels, weights, ignore_index, reduction), logarithms
    known, weight = _weigh_labels(labels, weights, ignore_index, scores.dtype)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(known, channels_last(scores))
    return _reduce(losses, weight, reduction)


@operators.define("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(logarithms, labels, weights=None, *, ignore_index, reduction):
    return negative_log_likelihood(logarithms, labels, weights, ignore_index, reduction)


def negative_log_likelihood(logarithms, labels, weights, ignore_index, reduction):
    known, weight = _weigh_labels(labels, weights, ignore_index, logarithms.dtype)
    losses = -tf.gather(channels_last(logarithms), known, batch_dims=labels.shape.rank)
    return _reduce(losses, weight, reduction)


def _weigh_labels(labels, weights, ignore_index, dtype):
    """Labels, 0 for those that are ignored, and the weight of each, which then is 0; None if all are 1."""
    if ignore_index is None:
        return labels, None if weights is None else tf.gather(weights, labels)
    counts = labels != ignore_index
    known = tf.where(counts, labels, 0)
    return known, tf.where(
        counts, tf.ones([], dtype) if weights is None else tf.gather(weights, known), tf.zeros([], dtype)
    )


def _reduce(losses, weight, reduction):
    losses = losses if weight is None else losses * weight
    if reduction == "none":
        return losses
    if reduction == "sum":
        return tf.reduce_sum(losses)
    if weight is None:
        return tf.reduce_mean(losses)
    total = tf.reduce_sum(weight)
    nothing = total == 0  # the mean of it is NaN, and has the derivative 0
    mean = tf.reduce_sum(losses) / tf.where(nothing, scalar(1, total), total)
    return tf.where(nothing, scalar(math.nan, mean), mean)
