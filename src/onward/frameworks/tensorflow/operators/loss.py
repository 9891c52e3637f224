"""Losses of classification: one number for each row."""

from __future__ import annotations

from onward.engines.framework import Operators
from onward.frameworks.tensorflow.graph import as_int64

operators = Operators()


@operators.define("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(op, logits, labels):
    return op.SoftmaxCrossEntropyLoss(logits, as_int64(op, labels), reduction="none")


@operators.define("SoftmaxCrossEntropyWithLogits")
def cross_entropy(op, logits, targets):
    return -op.ReduceSum(targets * op.LogSoftmax(logits, axis=-1), [-1], keepdims=0)
