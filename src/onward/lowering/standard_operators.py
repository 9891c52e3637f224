"""The losses and optimizers of the standard, written in plain operators.

The losses have a function body in the standard; these do the same with half the nodes, and never transpose the scores.

Of optimizers (domain `ai.onnx.preview.training`), inputs are `R` (learning rate), `T` (updates so far), then all
parameters, all gradients, and all tensors of each kind of state; outputs are all new parameters, then the new states. A
float32 attribute means exactly the number it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onward.build import Builder, Expr
from onward.errors import InvalidModelError
from onward.model import TRAINING_DOMAIN
from onward.recipe.optimizers.arithmetic import (
    adam_rate,
    coupled_decay,
    descend,
    double,
    ema,
    over_root,
    scaled,
    trace,
    typed,
)

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


LOSSES: dict[tuple[str, str], Lowering] = {
    ("", "SoftmaxCrossEntropyLoss"): softmax_cross_entropy_loss,
    ("", "NegativeLogLikelihoodLoss"): negative_log_likelihood_loss,
}


Attributes = dict[str, Any]


def momentum(op: Builder, a: Attributes, r: Expr, t: Expr, x: Expr, g: Expr, v: Expr) -> tuple[Expr, ...]:
    """G += norm·X;  V' = α·V + (T > 0 ? β : 1)·G;  X' = X − R·V', or by Nesterov X − R·(G + α·V')."""
    g = _regularize(a, x, g)
    new = g if a["beta"] == 1 else g * op.Where(t > 0, typed(a["beta"], g), 1.0)
    v = trace(v, new, a["alpha"])
    return descend(x, r, trace(v, g, a["alpha"]) if _is_nesterov(a) else v), v


def adagrad(op: Builder, a: Attributes, r: Expr, t: Expr, x: Expr, g: Expr, h: Expr) -> tuple[Expr, ...]:
    """G += norm·X;  H' = H + G²;  X' = X − R / (1 + T·decay) · G / (√H' + ε)."""
    g = _regularize(a, x, g)
    h = h + g * g
    rate = r / (1.0 + double(t) * a["decay_factor"]) if a["decay_factor"] else r
    return descend(x, rate, over_root(g, h, a["epsilon"])), h


def adam(op: Builder, a: Attributes, r: Expr, t: Expr, x: Expr, g: Expr, v: Expr, h: Expr) -> tuple[Expr, ...]:
    """G += norm·X;  V' = α·V + (1−α)·G;  H' = β·H + (1−β)·G²;  R' = T > 0 ? R·√(1−βᵀ) / (1−αᵀ) : R;

    X' = (1 − norm_post)·(X − R'·V' / (√H' + ε)).
    """
    g = _regularize(a, x, g)
    v, h = ema(v, g, a["alpha"]), ema(h, g * g, a["beta"])
    rate = op.Where(t > 0, adam_rate(r, t, a["alpha"], a["beta"]), r)
    x = descend(x, rate, over_root(v, h, a["epsilon"]))
    return scaled(1 - a["norm_coefficient_post"], x) if a["norm_coefficient_post"] else x, v, h


def _regularize(a: Attributes, x: Expr, g: Expr) -> Expr:
    return coupled_decay(x, g, a["norm_coefficient"]) if a["norm_coefficient"] else g


def _is_nesterov(a: Attributes) -> bool:
    if a["mode"] not in ("standard", "nesterov"):
        raise InvalidModelError(f"Momentum has no mode `{a['mode']}`", hint="it has `standard` and `nesterov`")
    return a["mode"] == "nesterov"


def _for_each_tensor(step: Callable[..., tuple[Expr, ...]], *, kinds: int) -> Lowering:
    """Lower an operator whose inputs after R and T are `kinds` lists of the same length, one after the other."""

    def lower(op: Builder, inputs: list[Expr | None], attributes: Attributes, outputs: int) -> tuple[Expr, ...]:
        r, t, *tensors = inputs
        count = len(tensors) // kinds
        if r is None or t is None or None in tensors or not count or len(tensors) != count * kinds:
            raise InvalidModelError(
                f"an optimizer has {len(tensors)} inputs after R and T, which are not {kinds} for each parameter"
            )
        rate = double(r)
        lists = [tensors[i * count : (i + 1) * count] for i in range(kinds)]
        results = [step(op, attributes, rate, t, *one) for one in zip(*lists, strict=True)]
        return tuple(result for kind in zip(*results, strict=True) for result in kind)[:outputs]

    return lower


OPTIMIZERS: dict[tuple[str, str], Lowering] = {
    (TRAINING_DOMAIN, "Momentum"): _for_each_tensor(momentum, kinds=3),
    (TRAINING_DOMAIN, "Adagrad"): _for_each_tensor(adagrad, kinds=3),
    (TRAINING_DOMAIN, "Adam"): _for_each_tensor(adam, kinds=4),
}

LOWERINGS = {**LOSSES, **OPTIMIZERS}
