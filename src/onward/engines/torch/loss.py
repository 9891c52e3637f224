"""Losses of class indices."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators

operators = Operators()


@operators.define("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(x, labels, weights=None, *, ignore_index, reduction, outputs):
    log_prob = torch.log_softmax(x, 1)
    loss = nll_loss(log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return (loss, log_prob) if outputs > 1 else loss


@operators.define("NegativeLogLikelihoodLoss")
def nll_loss(x, labels, weights=None, *, ignore_index, reduction):
    ignored = -100 if ignore_index is None else ignore_index
    return F.nll_loss(x, labels.long(), weights, ignore_index=ignored, reduction=reduction)
