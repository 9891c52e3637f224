"""Losses by class."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from onward.engines.framework import Operators
from onward.engines.shared.indexing import short, wrap_indices

operators = Operators()


@operators.define("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(scores, labels, weights=None, *, ignore_index=None, reduction):
    log_prob = jax.nn.log_softmax(scores, 1)
    return _of_classes(log_prob, labels, weights, ignore_index, reduction), log_prob


@operators.define("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(log_prob, labels, weights=None, *, ignore_index=None, reduction):
    return _of_classes(log_prob, labels, weights, ignore_index, reduction)


def _of_classes(log_prob, labels, weights, ignore_index, reduction):
    counted = None if ignore_index is None else labels != ignore_index
    classes = labels if counted is None else jnp.where(counted, labels, 0)
    losses = -_choose_class(log_prob, short(classes, log_prob.shape[1]))
    share = None if weights is None else jnp.take(weights, wrap_indices(classes, len(weights)), mode="clip")
    if counted is not None:
        share = jnp.where(counted, 1 if share is None else share, 0).astype(losses.dtype)
    losses = losses if share is None else losses * share
    if reduction == "none":
        return losses
    if reduction == "sum":
        return jnp.sum(losses)
    return jnp.mean(losses) if share is None else jnp.sum(losses) / jnp.sum(share)


@jax.custom_jvp
def _choose_class(log_prob, classes):
    """What there is at the right class."""
    return jnp.take_along_axis(log_prob, classes[:, None], 1)[:, 0]


@_choose_class.defjvp
def _choose_class_tangent(inputs, tangents):
    """By a comparison, which fuses with what is around it; the gradient of an index would go through memory."""
    log_prob, classes = inputs
    every = jnp.arange(log_prob.shape[1], dtype=classes.dtype).reshape(-1, *[1] * (log_prob.ndim - 2))
    change = jnp.sum(jnp.where(classes[:, None] == every, tangents[0], 0), 1)
    return _choose_class(log_prob, classes), change
