"""Batch normalization, in training and in inference."""

from __future__ import annotations

from onward.engines.framework import Operators
from onward.frameworks.tensorflow.graph import Refused, Statistics
from onward.frameworks.tensorflow.operators.convolution import channels_first, channels_last

operators = Operators()


@operators.define("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm")
def batch_norm(op, x, scale, bias, mean, variance, *, node, is_training, epsilon, data_format):
    """In training it hands out the statistics of the batch, for running averages: see running.py.

    The model has the form of inference. Statistics that are given, and not averaged, do not follow the data in training
    either: ONNX has an Identity between, which says so.
    """
    images = channels_first(op, x, data_format)
    if not is_training:
        if any(value.value.producer() and node.known(i) is None for i, value in ((3, mean), (4, variance))):
            raise Refused("its statistics are computed, and TensorFlow would not differentiate them")
        y = op.BatchNormalization(images, scale, bias, op.Identity(mean), op.Identity(variance), epsilon=epsilon)
        return channels_last(op, y, data_format), mean, variance
    _check_factor(node)
    _, like_mean, like_variance, *_ = node.operation.outputs
    likes = like_mean, like_variance
    kept = [node.walk.placeholder(op, node, "it keeps no running averages", like) for like in likes]
    batch = [node.walk.placeholder(op, node, "more than averages read its statistics", like) for like in likes]
    y = op.BatchNormalization(images, scale, bias, *kept, epsilon=epsilon)
    node.walk.statistics.append(Statistics(y.value.producer(), (batch[0].value, batch[1].value), sample=True))
    return channels_last(op, y, data_format), *batch


def _check_factor(node):
    if node.operation.type == "FusedBatchNormV3" and node.attribute("exponential_avg_factor") != 1:
        raise Refused("it averages its statistics itself")
