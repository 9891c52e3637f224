"""Losses by class."""

from __future__ import annotations

import numpy as np
from keras import ops

from onward.convert.keras.ops.types import dtype_of
from onward.engines.framework import Operators

operators = Operators()


@operators.define("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(scores, labels, weights=None, *, ignore_index=None, reduction="mean"):
    log_prob = ops.log_softmax(scores, 1)
    return loss_of_classes(log_prob, labels, weights, ignore_index, reduction), log_prob


@operators.define("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(log_prob, labels, weights=None, *, ignore_index=None, reduction="mean"):
    return loss_of_classes(log_prob, labels, weights, ignore_index, reduction)


def loss_of_classes(log_prob, labels, weights, ignore_index, reduction):
    counted = None if ignore_index is None else labels != ignore_index
    classes = labels if counted is None else ops.where(counted, labels, ops.zeros_like(labels))
    every = np.arange(log_prob.shape[1]).reshape(-1, *[1] * (len(log_prob.shape) - 2))
    hit = ops.expand_dims(classes, 1) == ops.convert_to_tensor(every, dtype_of(classes))
    losses = -ops.sum(ops.where(hit, log_prob, ops.zeros_like(log_prob)), 1)
    share = None if weights is None else ops.take(weights, classes)
    if counted is not None:
        share = ops.where(counted, ops.ones_like(losses) if share is None else share, ops.zeros_like(losses))
    losses = losses if share is None else losses * share
    if reduction == "none":
        return losses
    total = ops.sum(losses)
    if reduction == "sum":
        return total
    return ops.mean(losses) if share is None else total / ops.sum(share)
