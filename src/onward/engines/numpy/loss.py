"""Losses."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.activation import log_softmax
from onward.engines.numpy.precision import in_float32

operators = Operators()


@operators.define("SoftmaxCrossEntropyLoss")
@in_float32
def softmax_cross_entropy_loss(scores, labels, weights=None, *, ignore_index, reduction):
    log_probabilities = log_softmax(scores, axis=1)
    loss = negative_log_likelihood_loss(
        log_probabilities, labels, weights, ignore_index=ignore_index, reduction=reduction
    )
    return loss, log_probabilities


@operators.define("NegativeLogLikelihoodLoss")
@in_float32
def negative_log_likelihood_loss(scores, labels, weights=None, *, ignore_index, reduction):
    counted = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    chosen = np.where(counted, labels, 0)
    weight = np.where(counted, 1 if weights is None else weights[chosen], 0).astype(scores.dtype)
    losses = np.where(counted, -np.take_along_axis(scores, chosen[:, None], 1)[:, 0] * weight, 0).astype(scores.dtype)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / weight.sum()
