"""Losses of predictions that are compared value by value, or vector by vector, with a target."""

from __future__ import annotations

import math

import numpy as np

from onward.build import Builder, Expr
from onward.recipe.losses import functions as f
from onward.recipe.losses.registry import (
    Numbers,
    check,
    formula,
    like_prediction,
    numbers,
    one_of,
    reduce_loss,
    register_loss,
)

# ---- yes or no -------------------------------------------------------------------------------------------------------


@register_loss("binary_cross_entropy", "bce", targets=like_prediction("target"))
def binary_cross_entropy(
    op: Builder,
    probability: Expr,
    target: Expr,
    *,
    clip: float = 0.0,
    weight: Numbers | None = None,
    reduction: str = "mean",
) -> Expr:
    """Binary cross entropy of probabilities: their logarithms stop at -100, or are clipped first (Keras: clip=1e-7)."""
    check(0 <= clip < 0.5, f"clip is {clip}", "it is at least 0 and less than 0.5")
    if clip:
        probability = op.Clip(probability, clip, 1 - clip)
    return reduce_loss(op, _weigh(op, op.call(f.BinaryCrossEntropy, probability, target), weight), reduction)


@register_loss("bce_with_logits", targets=like_prediction("target"))
def bce_with_logits(
    op: Builder,
    logits: Expr,
    target: Expr,
    *,
    pos_weight: Numbers | None = None,
    weight: Numbers | None = None,
    reduction: str = "mean",
) -> Expr:
    """Binary cross entropy of logits; `pos_weight` lets positive examples weigh more."""
    if pos_weight is None:
        loss = op.call(f.BinaryCrossEntropyWithLogits, logits, target)
    else:
        positive = numbers("pos_weight", pos_weight)
        loss = op.call(f.WeightedBinaryCrossEntropyWithLogits, logits, target, positive)
    return reduce_loss(op, _weigh(op, loss, weight), reduction)


def _weigh(op: Builder, loss: Expr, weight: Numbers | None) -> Expr:
    return loss if weight is None else loss * op.CastLike(numbers("weight", weight), loss)


formula(f.Hinge, "hinge", summary="Hinge, max(1 - y x, 0), for targets y of -1 and 1.")
formula(f.SquaredHinge, "squared_hinge", summary="Squared hinge, max(1 - y x, 0)^2, for targets y of -1 and 1.")


# ---- distances -------------------------------------------------------------------------------------------------------

formula(f.SquaredError, "mse", summary="Squared error, (x - y)^2.")
formula(f.AbsoluteError, "l1", "mae", summary="Absolute error, |x - y|.")
formula(f.Huber, "huber", summary="Huber: half the squared error up to delta, a straight line beyond.", delta=1.0)
formula(f.SmoothL1, "smooth_l1", summary="Smooth absolute error: Huber with delta = beta, divided by beta.", beta=1.0)
formula(
    f.TripletMargin,
    "triplet",
    summary="Triplet: an anchor shall be nearer, in the p-norm, to its positive than to its negative, by a margin.",
    margin=1.0,
    p=2.0,
    eps=1e-6,
)


@register_loss("cosine", targets=like_prediction("target"))
def cosine(
    op: Builder, prediction: Expr, target: Expr, *, axis: int = -1, eps: float = 1e-12, reduction: str = "mean"
) -> Expr:
    """Cosine distance, 1 - cos(x, y), between vectors along `axis`."""
    return reduce_loss(op, op.call(f.CosineDistance, prediction, target, np.float64(eps), axes=[axis]), reduction)


# ---- likelihoods -----------------------------------------------------------------------------------------------------


@register_loss("kl_div", "kl", targets=like_prediction("target"))
def kl_div(
    op: Builder, log_probability: Expr, target: Expr, *, log_target: bool = False, reduction: str = "batchmean"
) -> Expr:
    """Kullback-Leibler divergence of log-probabilities from target probabilities, or (log_target) their logarithms.

    The default, "batchmean", sums over a distribution and divides by the batch size; "mean" divides by all elements.
    """
    one_of("reduction", reduction, "batchmean", "mean", "sum", "none")
    loss = op.call(f.KLDivergenceOfLogs if log_target else f.KLDivergence, log_probability, target)
    if reduction != "batchmean":
        return reduce_loss(op, loss, reduction)
    batch = op.Squeeze(op.Shape(log_probability, end=1))
    return reduce_loss(op, loss, "sum") / op.CastLike(batch, loss)


@register_loss("poisson_nll", "poisson", targets=like_prediction("target"))
def poisson_nll(
    op: Builder,
    rate: Expr,
    target: Expr,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Expr:
    """Poisson negative log-likelihood of counts, given the logarithm of their rate or (log_input=false) the rate.

    `full` adds Stirling's approximation of log y!; `eps` keeps the logarithm of a rate finite, and is 1e-7 in Keras.
    """
    if log_input:
        loss = op.call(f.PoissonNLLOfLog, rate, target)
    else:
        loss = op.call(f.PoissonNLL, rate, target, np.float64(eps))
    return reduce_loss(op, loss + op.call(f.Stirling, target) if full else loss, reduction)


@register_loss("gaussian_nll", targets=like_prediction("target", "variance"))
def gaussian_nll(
    op: Builder,
    mean: Expr,
    target: Expr,
    variance: Expr,
    *,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Expr:
    """Gaussian negative log-likelihood, given the mean and the variance; `full` adds log(2 pi) / 2."""
    loss = op.call(f.GaussianNLL, mean, target, variance, np.float64(eps))
    return reduce_loss(op, loss + math.log(2 * math.pi) / 2 if full else loss, reduction)
