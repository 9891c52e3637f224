"""The loss operators of the standard, written in plain operators.

Both have a function body in the standard; these do the same with half the nodes, and never transpose the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onward.build import Builder, Expr

Lowering = Callable[[Builder, list[Expr | None], dict[str, Any], int], tuple[Expr, ...]]
"""`(op, inputs, attributes, outputs) -> results`: omitted inputs are None, attributes have the schema's defaults."""


def softmax_cross_entropy_loss(
    op: Builder, inputs: list[Expr | None], attributes: dict[str, Any], outputs: int
) -> tuple[Expr, ...]:
    """The negative log-likelihood of `labels [N, d...]` under softmax(`scores [N, C, d...]`), and the log-softmax."""
    scores, labels, *weights = inputs
    log_prob = op.LogSoftmax(scores, axis=1)
    loss = negative_log_likelihood_loss(op, [log_prob, labels, *weights], attributes, 1)
    return (*loss, log_prob)[:outputs]


def negative_log_likelihood_loss(
    op: Builder, inputs: list[Expr | None], attributes: dict[str, Any], outputs: int
) -> tuple[Expr, ...]:
    """loss = -weight[target] · input[n, target, d...]; the mean divides by the sum of the weights that took part."""
    log_prob, labels, *rest = inputs
    weights = rest[0] if rest else None
    reduction, ignore_index = attributes["reduction"], attributes.get("ignore_index")

    kept = None
    if ignore_index is not None:
        kept = op.Not(op.Equal(labels, ignore_index))
        labels = op.Where(kept, labels, 0)
    loss = -op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(labels, [1]), axis=1), [1])
    weight = None if weights is None else op.Gather(weights, labels)
    if weight is not None:
        loss = loss * weight
    if kept is not None:
        loss = op.Where(kept, loss, 0)
        weight = op.CastLike(kept, loss) if weight is None else op.Where(kept, weight, 0)

    if reduction == "none":
        return (loss,)
    if reduction == "mean" and weight is None:
        return (op.ReduceMean(loss, keepdims=0),)
    total = op.ReduceSum(loss, keepdims=0)
    return (total / op.ReduceSum(weight, keepdims=0) if reduction == "mean" else total,)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "SoftmaxCrossEntropyLoss"): softmax_cross_entropy_loss,
    ("", "NegativeLogLikelihoodLoss"): negative_log_likelihood_loss,
}
