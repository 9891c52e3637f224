"""The optimizers of the standard (domain `ai.onnx.preview.training`), written in plain operators.

Inputs are `R` (learning rate), `T` (updates so far), then all parameters, all gradients, and all tensors of each kind
of state; outputs are all new parameters, then the new states. A float32 attribute means exactly the number it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onward.build import Builder, Expr
from onward.errors import InvalidModelError
from onward.lowering.losses import Lowering
from onward.model import TRAINING_DOMAIN
from onward.recipe.optimizers.parts import (
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


LOWERINGS: dict[tuple[str, str], Lowering] = {
    (TRAINING_DOMAIN, "Momentum"): _for_each_tensor(momentum, kinds=3),
    (TRAINING_DOMAIN, "Adagrad"): _for_each_tensor(adagrad, kinds=3),
    (TRAINING_DOMAIN, "Adam"): _for_each_tensor(adam, kinds=4),
}
