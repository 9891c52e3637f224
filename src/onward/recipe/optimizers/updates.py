# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# The signature of an update is that of the function in the file; annotations would only repeat it.
"""The optimizers by name: updates, 16-bit forms, and rows of the table.

    adamw = optimizer("adamw").configure(lr=3e-4, weight_decay=0.1)
    adamw.slots(parameter)                                              # exp_avg, exp_avg_sq
    x, slots = adamw.update(op, x, g, slots, lr=lr, t=t, hyper=hyper)   # one node: onward.AdamW

An update is a function of the domain `onward`, one formula each, or the standard's own operator
where that is exact. A signature reads `x` (the parameter), `g` (its gradient), the slots, and then
the numbers: `lr`, `t` (which counts this update from 1) where it matters, and the hyper-parameters.
All are float64 scalars, but for `t`, which is int64. Results are the new `x` and the new slots.
Slots have PyTorch's names. Where frameworks disagree, a suffix names the one that computes it so;
the choice `variant` names the framework whose arithmetic and defaults are meant (default: the first
in the row).

`half` gives an update in float16 or bfloat16 as PyTorch's implementation for one tensor on a CPU
(`foreach=False`) rounds it: each operation is computed in float32 and its result rounded, so a step
of Adam rounds eight times. `fused` gives PyTorch's fused kernel, which rounds only what it stores.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from onward.errors import RecipeError
from onward.recipe.optimizers.arithmetic import (
    adam_rate,
    add,
    add_scaled,
    addcdiv,
    addcmul,
    between,
    bias_correction,
    coupled_decay,
    decoupled_decay,
    descend,
    div,
    double,
    ema,
    lerp,
    mul,
    newton_schulz,
    over_root,
    over_root_of_sum,
    power,
    rms,
    root_correction,
    rounded,
    scaled,
    single,
    sqrt,
    trace,
    trust_ratio,
    typed,
)
from onward.recipe.optimizers.definition import (
    ConfiguredOptimizer,
    Optimizer,
    Settings,
    Shape,
    Standard,
    Update,
    UpdateCall,
)
from onward.recipe.spec import Spec, lookup

OPTIMIZERS: dict[str, Optimizer] = {}
_FLAG = (False, True)


def optimizer(name: str) -> Optimizer:
    """Return the optimizer named `name`."""
    return lookup("optimizer", name, OPTIMIZERS)


def configure(spec: Spec) -> ConfiguredOptimizer:
    """Return the optimizer of a spec, with its options."""
    return optimizer(spec.name).configure(**spec.options)


def _define(*row: Any, **fields: Any) -> Optimizer:
    definition = Optimizer(*row, **fields)
    OPTIMIZERS[definition.name] = definition
    return definition


def _derive(original: Optimizer, name: str, summary: str, **changes: Any) -> None:
    OPTIMIZERS[name] = replace(original, name=name, summary=summary, **changes)


# ---- gradient descent ------------------------------------------------------------------------------------------------


@Update
def sgd(op, x, g, lr):
    """x ← x − lr·g."""
    return descend(x, lr, g)


@sgd.half
def sgd_half(op, x, g, lr):
    return add_scaled(x, g, -lr)


@Update
def sgd_momentum(op, x, g, momentum_buffer, lr, momentum):
    """v ← μ·v + g;  x ← x − lr·v."""
    v = trace(momentum_buffer, g, momentum)
    return descend(x, lr, v), v


@sgd_momentum.half
def sgd_momentum_half(op, x, g, momentum_buffer, lr, momentum):
    v = add_scaled(mul(momentum_buffer, momentum), g, 1.0)
    return add_scaled(x, v, -lr), v


@Update
def sgd_nesterov(op, x, g, momentum_buffer, lr, momentum):
    """v ← μ·v + g;  x ← x − lr·(g + μ·v)."""
    v = trace(momentum_buffer, g, momentum)
    return descend(x, lr, trace(v, g, momentum)), v


@sgd_nesterov.half
def sgd_nesterov_half(op, x, g, momentum_buffer, lr, momentum):
    v = add_scaled(mul(momentum_buffer, momentum), g, 1.0)
    return add_scaled(x, add_scaled(g, v, momentum), -lr), v


@Update
def sgd_momentum_dampened(op, x, g, momentum_buffer, lr, t, momentum, dampening):
    """v ← μ·v + (1−τ)·g, but v ← g in the first update;  x ← x − lr·v."""
    v = trace(momentum_buffer, scaled(op.Where(t > 1, 1.0 - dampening, 1.0), g), momentum)
    return descend(x, lr, v), v


@sgd_momentum_dampened.half
def sgd_momentum_dampened_half(op, x, g, momentum_buffer, lr, t, momentum, dampening):
    v = add_scaled(mul(momentum_buffer, momentum), g, op.Where(t > 1, 1.0 - dampening, 1.0))
    return add_scaled(x, v, -lr), v


@Update
def sgd_momentum_keras(op, x, g, momentum_buffer, lr, momentum):
    """m ← μ·m − lr·g;  x ← x + m: the learning rate of each step stays in the buffer."""
    m = descend(scaled(momentum, momentum_buffer), lr, g)
    return x + m, m


@Update
def sgd_nesterov_keras(op, x, g, momentum_buffer, lr, momentum):
    """m ← μ·m − lr·g;  x ← x + μ·m − lr·g."""
    m = descend(scaled(momentum, momentum_buffer), lr, g)
    return descend(x + scaled(momentum, m), lr, g), m


def _descent(s: Settings) -> Update:
    if s.nesterov and (not s.momentum or s.dampening):
        raise RecipeError("Nesterov momentum needs a momentum, and no dampening", hint="for example momentum=0.9")
    if not s.momentum:
        return sgd
    if s.variant == "keras":
        return sgd_nesterov_keras if s.nesterov else sgd_momentum_keras
    if s.dampening:
        return sgd_momentum_dampened
    return sgd_nesterov if s.nesterov else sgd_momentum


def _standard_momentum(s: Settings) -> Standard | None:
    if not s.momentum or s.variant == "keras":
        return None
    mode = "nesterov" if s.nesterov else "standard"
    attributes = {"alpha": s.momentum, "beta": 1 - s.dampening, "norm_coefficient": s.weight_decay, "mode": mode}
    return Standard("Momentum", attributes, behind=1)


_SGD = _define(
    "sgd",
    "gradient descent, with momentum if that is not 0; as torch.optim.SGD",
    {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    lambda s, shape: _descent(s),
    variants={"torch": {}, "optax": {}, "keras": {"lr": 1e-2}},
    options={"nesterov": _FLAG},
    standard=_standard_momentum,
    is_scale_free=False,
)
_derive(
    _SGD,
    "momentum",
    "gradient descent with momentum; as torch.optim.SGD(momentum=0.9)",
    hyper={**_SGD.hyper, "momentum": 0.9},
)
_derive(
    _SGD,
    "nesterov",
    "gradient descent with Nesterov momentum; as torch.optim.SGD(momentum=0.9, nesterov=True)",
    hyper={**_SGD.hyper, "momentum": 0.9},
    options={"nesterov": (True, False)},
)
_derive(
    _SGD,
    "sgdw",
    "gradient descent with decoupled weight decay (Loshchilov and Hutter 2019)",
    hyper={**_SGD.hyper, "weight_decay": 1e-2},
    update=lambda s, shape: UpdateCall(_descent(s), "decoupled"),
    standard=None,
)


@Update
def adagrad(op, x, g, sum, lr, t, lr_decay, eps):
    """h ← h + g²;  x ← x − lr / (1 + (t−1)·η) · g / (√h + ε)."""
    h = sum + g * g
    return descend(x, lr / (1.0 + (double(t) - 1.0) * lr_decay), over_root(g, h, eps)), h


@adagrad.half
def adagrad_half(op, x, g, sum, lr, t, lr_decay, eps):
    h = rounded(single(sum) + single(g) * single(g), sum)
    return addcdiv(x, g, add(sqrt(h), eps), -lr / (1.0 + (double(t) - 1.0) * lr_decay)), h


@Update
def adagrad_keras(op, x, g, sum, lr, eps):
    """h ← h + g²;  x ← x − lr·g / √(h + ε)."""
    h = sum + g * g
    return descend(x, lr, over_root_of_sum(g, h, eps)), h


def _standard_adagrad(s: Settings) -> Standard | None:
    if s.variant != "torch":
        return None
    attributes = {"epsilon": s.eps, "decay_factor": s.lr_decay, "norm_coefficient": s.weight_decay}
    return Standard("Adagrad", attributes, behind=1)


_define(
    "adagrad",
    "Adagrad (Duchi et al. 2011); as torch.optim.Adagrad",
    {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    lambda s, shape: adagrad if s.variant == "torch" else adagrad_keras,
    variants={
        "torch": {},
        "optax": {"initial_accumulator_value": 0.1, "eps": 1e-7},
        "keras": {"lr": 1e-3, "initial_accumulator_value": 0.1, "eps": 1e-7},
    },
    standard=_standard_adagrad,
    initial={"sum": "initial_accumulator_value"},
)


# ---- the Adam family -------------------------------------------------------------------------------------------------


def moments(g, exp_avg, exp_avg_sq, beta1, beta2):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²."""
    return ema(exp_avg, g, beta1), ema(exp_avg_sq, g * g, beta2)


def moments_half(g, exp_avg, exp_avg_sq, beta1, beta2):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²."""
    return lerp(exp_avg, g, 1.0 - beta1), square_average(exp_avg_sq, g, beta2)


def square_average(old, g, beta):
    return addcmul(mul(old, beta), g, g, 1.0 - beta)


def adam_step_half(x, m, v, lr, t, beta1, beta2, eps):
    return addcdiv(x, m, add(div(sqrt(v), root_correction(beta2, t)), eps), -lr / bias_correction(beta1, t))


def moments_fused(g, exp_avg, exp_avg_sq, beta1, beta2):
    m, v, g = single(exp_avg), single(exp_avg_sq), single(g)
    return between(m, g, single(1.0 - beta1)), v * single(beta2) + single(1.0 - beta2) * g * g


def adam_step_fused(x, m, v, lr, t, beta1, beta2, eps):
    d = v.op.Sqrt(v) / single(root_correction(beta2, t)) + single(eps)
    return single(x) - single(lr / bias_correction(beta1, t)) * (m / d)


@Update
def adam(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  x ← x − lr / (1−β1ᵗ) · m / (√(v / (1−β2ᵗ)) + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    root = root_correction(beta2, t)
    return descend(x, lr * root / bias_correction(beta1, t), over_root(m, v, eps * root)), m, v


@adam.half
def adam_half(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = moments_half(g, exp_avg, exp_avg_sq, beta1, beta2)
    return adam_step_half(x, m, v, lr, t, beta1, beta2, eps), m, v


@adam.fused
def adam_fused(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = moments_fused(g, exp_avg, exp_avg_sq, beta1, beta2)
    stored = adam_step_fused(x, m, v, lr, t, beta1, beta2, eps), m, v
    return tuple(rounded(new, exp_avg) for new in stored)


@Update
def adam_keras(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  x ← x − lr·√(1−β2ᵗ) / (1−β1ᵗ) · m / (√v + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    return descend(x, adam_rate(lr, t, beta1, beta2), over_root(m, v, eps)), m, v


def _standard_adam(s: Settings) -> Standard | None:
    if s.variant != "keras" or s.amsgrad or s.weight_decay:
        return None
    return Standard("Adam", {"alpha": s.beta1, "beta": s.beta2, "epsilon": s.eps}, behind=0)


@Update
def amsgrad(op, x, g, exp_avg, exp_avg_sq, max_exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with the largest v so far: u ← max(u, v);  x ← x − lr / (1−β1ᵗ) · m / (√(u / (1−β2ᵗ)) + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    u = op.Max(max_exp_avg_sq, v)
    root = root_correction(beta2, t)
    return descend(x, lr * root / bias_correction(beta1, t), over_root(m, u, eps * root)), m, v, u


@amsgrad.half
def amsgrad_half(op, x, g, exp_avg, exp_avg_sq, max_exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = moments_half(g, exp_avg, exp_avg_sq, beta1, beta2)
    u = rounded(op.Max(single(max_exp_avg_sq), single(v)), v)
    return adam_step_half(x, m, u, lr, t, beta1, beta2, eps), m, v, u


@amsgrad.fused
def amsgrad_fused(op, x, g, exp_avg, exp_avg_sq, max_exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = moments_fused(g, exp_avg, exp_avg_sq, beta1, beta2)
    u = op.Max(single(max_exp_avg_sq), v)
    stored = adam_step_fused(x, m, u, lr, t, beta1, beta2, eps), m, v, u
    return tuple(rounded(new, exp_avg) for new in stored)


@Update
def amsgrad_keras(op, x, g, exp_avg, exp_avg_sq, max_exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with the largest v so far: u ← max(u, v);  x ← x − lr·√(1−β2ᵗ) / (1−β1ᵗ) · m / (√u + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    u = op.Max(max_exp_avg_sq, v)
    return descend(x, adam_rate(lr, t, beta1, beta2), over_root(m, u, eps)), m, v, u


@Update
def amsgrad_optax(op, x, g, exp_avg, exp_avg_sq, max_exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with the largest corrected v so far: u ← max(u, v / (1−β2ᵗ));  x ← x − lr / (1−β1ᵗ) · m / (√u + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    u = op.Max(max_exp_avg_sq, v / typed(bias_correction(beta2, t), v))
    return descend(x, lr / bias_correction(beta1, t), over_root(m, u, eps)), m, v, u


def _adam(s: Settings) -> Update:
    if s.amsgrad:
        by_variant = {"torch": amsgrad, "optax": amsgrad_optax, "keras": amsgrad_keras}
        return by_variant[s.variant]
    return adam_keras if s.variant == "keras" else adam


_ADAM = _define(
    "adam",
    "Adam (Kingma and Ba 2015); as torch.optim.Adam",
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    lambda s, shape: _adam(s),
    variants={"torch": {}, "optax": {}, "keras": {"eps": 1e-7}},
    options={"amsgrad": _FLAG, "decoupled_weight_decay": _FLAG, "fused": _FLAG},
    standard=_standard_adam,
)


@Update
def adamw_transformers(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps, weight_decay):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  x ← (x − lr·√(1−β2ᵗ) / (1−β1ᵗ) · m / (√v + ε))·(1 − lr·λ)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    moved = descend(x, adam_rate(lr, t, beta1, beta2), over_root(m, v, eps))
    return decoupled_decay(moved, lr, weight_decay), m, v


def _adamw(s: Settings) -> UpdateCall:
    """Select AdamW; the classes of transformers and onnxruntime-training decay the weights last."""
    if s.variant != "transformers":
        return UpdateCall(_adam(s), "decoupled")
    if s.amsgrad or s.fused:
        what = "amsgrad" if s.amsgrad else "fused"
        raise RecipeError(f"AdamW of transformers has no `{what}`", hint="leave it out, or choose `variant=torch`")
    return UpdateCall(adamw_transformers)


_derive(
    _ADAM,
    "adamw",
    "Adam with decoupled weight decay (Loshchilov and Hutter 2019); as torch.optim.AdamW",
    hyper={**_ADAM.hyper, "weight_decay": 1e-2},
    update=lambda s, shape: _adamw(s),
    variants={
        "torch": {},
        "optax": {"weight_decay": 1e-4},
        "transformers": {"eps": 1e-6, "weight_decay": 0.0},
        "keras": {"eps": 1e-7, "weight_decay": 4e-3},
    },
    options={"amsgrad": _FLAG, "fused": _FLAG},
    standard=None,
)
_derive(
    _ADAM,
    "amsgrad",
    "Adam that never forgets a large gradient (Reddi et al. 2018); as torch.optim.Adam(amsgrad=True)",
    options={"amsgrad": (True, False), "decoupled_weight_decay": _FLAG, "fused": _FLAG},
)


@Update
def adamax(op, x, g, exp_avg, exp_inf, lr, t, beta1, beta2, eps):
    """m ← β1·m + (1−β1)·g;  u ← max(β2·u, |g| + ε);  x ← x − lr / (1−β1ᵗ) · m / u."""
    m = ema(exp_avg, g, beta1)
    u = op.Max(scaled(beta2, exp_inf), op.Abs(g) + typed(eps, g))
    return descend(x, lr / bias_correction(beta1, t), m / u), m, u


@adamax.half
def adamax_half(op, x, g, exp_avg, exp_inf, lr, t, beta1, beta2, eps):
    m = lerp(exp_avg, g, 1.0 - beta1)
    u = rounded(op.Max(single(mul(exp_inf, beta2)), single(add(rounded(op.Abs(single(g)), g), eps))), exp_inf)
    return addcdiv(x, m, u, -lr / bias_correction(beta1, t)), m, u


@Update
def adamax_keras(op, x, g, exp_avg, exp_inf, lr, t, beta1, beta2, eps):
    """m ← β1·m + (1−β1)·g;  u ← max(β2·u, |g|);  x ← x − lr / (1−β1ᵗ) · m / (u + ε)."""
    m = ema(exp_avg, g, beta1)
    u = op.Max(scaled(beta2, exp_inf), op.Abs(g))
    return descend(x, lr / bias_correction(beta1, t), m / (u + typed(eps, u))), m, u


_define(
    "adamax",
    "Adam with the infinity norm (Kingma and Ba 2015); as torch.optim.Adamax",
    {"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    lambda s, shape: adamax_keras if s.variant == "keras" else adamax,
    variants={"torch": {}, "optax": {}, "keras": {"lr": 1e-3, "eps": 1e-7}},
)


@Update
def nadam(op, x, g, exp_avg, exp_avg_sq, mu_product, lr, t, beta1, beta2, eps, momentum_decay):
    """Adam with Nesterov momentum μₜ = β1·(1 − 0.96^(t·ψ)/2), whose product so far is π ← π·μₜ.

    x ← x − lr·((1−μₜ)/(1−π)·g + μₜ₊₁/(1−π·μₜ₊₁)·m) / (√(v / (1−β2ᵗ)) + ε).
    """
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    step = double(t)
    mu, mu_next = (beta1 * (1.0 - 0.5 * power(0.96, n * momentum_decay)) for n in (step, step + 1.0))
    product = mu_product * mu
    look_ahead = scaled((1.0 - mu) / (1.0 - product), g) + scaled(mu_next / (1.0 - product * mu_next), m)
    root = root_correction(beta2, t)
    return descend(x, lr * root, over_root(look_ahead, v, eps * root)), m, v, product


@nadam.half
def nadam_half(op, x, g, exp_avg, exp_avg_sq, mu_product, lr, t, beta1, beta2, eps, momentum_decay):
    m, v = moments_half(g, exp_avg, exp_avg_sq, beta1, beta2)
    step = double(t)
    mu, mu_next = (beta1 * (1.0 - 0.5 * power(0.96, n * momentum_decay)) for n in (step, step + 1.0))
    product = mu_product * mu
    d = add(sqrt(div(v, bias_correction(beta2, t))), eps)
    x = addcdiv(x, g, d, -lr * (1.0 - mu) / (1.0 - product))
    return addcdiv(x, m, d, -lr * mu_next / (1.0 - product * mu_next)), m, v, product


@Update
def nadam_optax(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with Nesterov momentum: x ← x − lr·(β1/(1−β1ᵗ⁺¹)·m + (1−β1)/(1−β1ᵗ)·g) / (√(v / (1−β2ᵗ)) + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    past, new = beta1 / bias_correction(beta1, t + 1), (1.0 - beta1) / bias_correction(beta1, t)
    root = root_correction(beta2, t)
    return descend(x, lr * root, over_root(scaled(past, m) + scaled(new, g), v, eps * root)), m, v


_define(
    "nadam",
    "Adam with Nesterov momentum (Dozat 2016); as torch.optim.NAdam",
    {"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "momentum_decay": 4e-3, "weight_decay": 0.0},
    lambda s, shape: nadam_optax if s.variant == "optax" else nadam,
    variants={"torch": {}, "optax": {}, "keras": {"lr": 1e-3, "eps": 1e-7, "momentum_decay": 1.0}},
    options={"decoupled_weight_decay": _FLAG},
    initial={"mu_product": 1.0},
)


def rectification(op, t, beta2):
    """Return ρ > 5 for the length ρ of the average behind v; and r, which corrects a short one."""
    limit = 2.0 / (1.0 - beta2) - 1.0
    length = limit - 2.0 * double(t) * power(beta2, t) / bias_correction(beta2, t)
    rho = op.Max(length, 5.0)  # keeps the root of what is not used real
    return length > 5.0, op.Sqrt((rho - 4.0) * (rho - 2.0) * limit / ((limit - 4.0) * (limit - 2.0) * rho))


def rectified(op, x, m, v, lr, t, beta1, beta2, eps):
    """x − lr/(1−β1ᵗ) · (ρ > 5 ? r·√(1−β2ᵗ)·m / (√v + ε) : m), where ρ is the length of the average behind v."""
    adaptive, r = rectification(op, t, beta2)
    rate = lr / bias_correction(beta1, t) * op.Where(adaptive, r * root_correction(beta2, t), 1.0)
    return descend(x, rate, op.Where(adaptive, over_root(m, v, eps), m))


@Update
def radam(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with its variance rectified, and momentum until that is known: ρ∞ = 2/(1−β2) − 1, ρ = ρ∞ − 2t·β2ᵗ/(1−β2ᵗ);

    x ← x − lr/(1−β1ᵗ) · (ρ > 5 ? r·√(1−β2ᵗ)·m / (√v + ε) : m) with r² = (ρ−4)(ρ−2)ρ∞ / ((ρ∞−4)(ρ∞−2)ρ).
    """
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    return rectified(op, x, m, v, lr, t, beta1, beta2, eps), m, v


@radam.half
def radam_half(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = moments_half(g, exp_avg, exp_avg_sq, beta1, beta2)
    adaptive, r = rectification(op, t, beta2)
    reciprocal = rounded(1.0 / single(add(sqrt(v), eps)), v)
    along = mul(div(m, bias_correction(beta1, t)), lr)
    by_size = mul(rounded(single(along) * single(mul(reciprocal, root_correction(beta2, t))), x), r)
    return add_scaled(x, op.Where(adaptive, by_size, along), -1.0), m, v


@Update
def radam_optax(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with its variance rectified, and momentum until that is known: ρ∞ = 2/(1−β2) − 1, ρ = ρ∞ − 2t·β2ᵗ/(1−β2ᵗ);

    x ← x − lr/(1−β1ᵗ) · (ρ > 5 ? r·m / (√(v / (1−β2ᵗ)) + ε) : m) with r² = (ρ−4)(ρ−2)ρ∞ / ((ρ∞−4)(ρ∞−2)ρ).
    """
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    return rectified(op, x, m, v, lr, t, beta1, beta2, eps * root_correction(beta2, t)), m, v


_define(
    "radam",
    "Adam that begins as momentum until its variance is known (Liu et al. 2020); as torch.optim.RAdam",
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    lambda s, shape: radam_optax if s.variant == "optax" else radam,
    variants={"torch": {}, "optax": {}},
    options={"decoupled_weight_decay": _FLAG},
)


# ---- averages of squared gradients -----------------------------------------------------------------------------------


@Update
def rmsprop(op, x, g, square_avg, lr, alpha, eps):
    """v ← α·v + (1−α)·g²;  x ← x − lr·g / (√v + ε)."""
    v = ema(square_avg, g * g, alpha)
    return descend(x, lr, over_root(g, v, eps)), v


@rmsprop.half
def rmsprop_half(op, x, g, square_avg, lr, alpha, eps):
    v = square_average(square_avg, g, alpha)
    return addcdiv(x, g, add(sqrt(v), eps), -lr), v


@Update
def rmsprop_momentum(op, x, g, square_avg, momentum_buffer, lr, alpha, eps, momentum):
    """v ← α·v + (1−α)·g²;  b ← μ·b + g / (√v + ε);  x ← x − lr·b."""
    v = ema(square_avg, g * g, alpha)
    b = trace(momentum_buffer, over_root(g, v, eps), momentum)
    return descend(x, lr, b), v, b


@rmsprop_momentum.half
def rmsprop_momentum_half(op, x, g, square_avg, momentum_buffer, lr, alpha, eps, momentum):
    v = square_average(square_avg, g, alpha)
    b = momentum_by_size(momentum_buffer, g, add(sqrt(v), eps), momentum)
    return add_scaled(x, b, -lr), v, b


@Update
def rmsprop_centered(op, x, g, square_avg, grad_avg, lr, alpha, eps):
    """v ← α·v + (1−α)·g²;  a ← α·a + (1−α)·g;  x ← x − lr·g / (√(v − a²) + ε)."""
    a, v = moments(g, grad_avg, square_avg, alpha, alpha)
    return descend(x, lr, over_root(g, v - a * a, eps)), v, a


@rmsprop_centered.half
def rmsprop_centered_half(op, x, g, square_avg, grad_avg, lr, alpha, eps):
    a, v = moments_half(g, grad_avg, square_avg, alpha, alpha)
    return addcdiv(x, g, add(centered_root(a, v), eps), -lr), v, a


@Update
def rmsprop_centered_momentum(op, x, g, square_avg, grad_avg, momentum_buffer, lr, alpha, eps, momentum):
    """v ← α·v + (1−α)·g²;  a ← α·a + (1−α)·g;  b ← μ·b + g / (√(v − a²) + ε);  x ← x − lr·b."""
    a, v = moments(g, grad_avg, square_avg, alpha, alpha)
    b = trace(momentum_buffer, over_root(g, v - a * a, eps), momentum)
    return descend(x, lr, b), v, a, b


@rmsprop_centered_momentum.half
def rmsprop_centered_momentum_half(op, x, g, square_avg, grad_avg, momentum_buffer, lr, alpha, eps, momentum):
    a, v = moments_half(g, grad_avg, square_avg, alpha, alpha)
    b = momentum_by_size(momentum_buffer, g, add(centered_root(a, v), eps), momentum)
    return add_scaled(x, b, -lr), v, a, b


def centered_root(a, v):
    return sqrt(rounded(single(v) - single(a) * single(a), v))


def momentum_by_size(old, g, size, momentum):
    buffer = mul(old, momentum)
    return rounded(single(buffer) + single(g) / single(size), buffer)


@Update
def rmsprop_keras(op, x, g, square_avg, lr, alpha, eps):
    """v ← α·v + (1−α)·g²;  x ← x − lr·g / √(v + ε)."""
    v = ema(square_avg, g * g, alpha)
    return descend(x, lr, over_root_of_sum(g, v, eps)), v


@Update
def rmsprop_momentum_keras(op, x, g, square_avg, momentum_buffer, lr, alpha, eps, momentum):
    """v ← α·v + (1−α)·g²;  b ← μ·b + lr·g / √(v + ε);  x ← x − b."""
    v = ema(square_avg, g * g, alpha)
    b = trace(momentum_buffer, scaled(lr, over_root_of_sum(g, v, eps)), momentum)
    return x - b, v, b


@Update
def rmsprop_centered_keras(op, x, g, square_avg, grad_avg, lr, alpha, eps):
    """v ← α·v + (1−α)·g²;  a ← α·a + (1−α)·g;  x ← x − lr·g / √(v − a² + ε)."""
    a, v = moments(g, grad_avg, square_avg, alpha, alpha)
    return descend(x, lr, over_root_of_sum(g, v - a * a, eps)), v, a


@Update
def rmsprop_centered_momentum_keras(op, x, g, square_avg, grad_avg, momentum_buffer, lr, alpha, eps, momentum):
    """v ← α·v + (1−α)·g²;  a ← α·a + (1−α)·g;  b ← μ·b + lr·g / √(v − a² + ε);  x ← x − b."""
    a, v = moments(g, grad_avg, square_avg, alpha, alpha)
    b = trace(momentum_buffer, scaled(lr, over_root_of_sum(g, v - a * a, eps)), momentum)
    return x - b, v, a, b


def _rmsprop(s: Settings) -> Update:
    torch, keras = {
        (False, False): (rmsprop, rmsprop_keras),
        (False, True): (rmsprop_momentum, rmsprop_momentum_keras),
        (True, False): (rmsprop_centered, rmsprop_centered_keras),
        (True, True): (rmsprop_centered_momentum, rmsprop_centered_momentum_keras),
    }[s.centered, s.momentum > 0]
    return torch if s.variant == "torch" else keras


_define(
    "rmsprop",
    "RMSprop (Tieleman and Hinton 2012); as torch.optim.RMSprop",
    {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
    lambda s, shape: _rmsprop(s),
    variants={"torch": {}, "optax": {"alpha": 0.9}, "keras": {"lr": 1e-3, "alpha": 0.9, "eps": 1e-7}},
    options={"centered": _FLAG},
)


@Update
def adadelta(op, x, g, square_avg, acc_delta, lr, rho, eps):
    """v ← ρ·v + (1−ρ)·g²;  d = g·√(u + ε) / √(v + ε);  u ← ρ·u + (1−ρ)·d²;  x ← x − lr·d."""
    v = ema(square_avg, g * g, rho)
    d = over_root_of_sum(g * op.Sqrt(acc_delta + typed(eps, acc_delta)), v, eps)
    return descend(x, lr, d), v, ema(acc_delta, d * d, rho)


@adadelta.half
def adadelta_half(op, x, g, square_avg, acc_delta, lr, rho, eps):
    v = square_average(square_avg, g, rho)
    ratio = rounded(single(sqrt(add(acc_delta, eps))) / single(sqrt(add(v, eps))), g)
    d = rounded(single(ratio) * single(g), g)
    return add_scaled(x, d, -lr), v, square_average(acc_delta, d, rho)


_define(
    "adadelta",
    "Adadelta (Zeiler 2012); as torch.optim.Adadelta",
    {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    lambda s, shape: adadelta,
    variants={"torch": {}, "optax": {}, "keras": {"lr": 1e-3, "rho": 0.95, "eps": 1e-7}},
)


# ---- matrices --------------------------------------------------------------------------------------------------------


def adafactor_step(op, x, g, estimate, lr, t, eps1, eps2, d, weight_decay):
    """u = g / √max(estimate, ε1²);  x·(1 − lr·λ) − min(lr, 1/√t)·max(ε2, rms(x)) · u / max(1, rms(u)/d)."""
    u = g / op.Sqrt(op.Max(estimate, typed(eps1 * eps1, estimate)))
    rate = op.Min(lr, 1.0 / op.Sqrt(double(t))) * op.Max(eps2, rms(x)) / op.Max(rms(u) / d, 1.0)
    return descend(decoupled_decay(x, lr, weight_decay), rate, u)


@Update
def adafactor(op, x, g, row_var, col_var, lr, t, beta2_decay, eps1, eps2, d, weight_decay):
    """With β = 1 − t^decay: r ← β·r + (1−β)·mean(g², last axis);  c ← β·c + (1−β)·mean(g², axis before it);

    u = g / max(√(r·c / max(mean(r), ε1)), ε1);
    x ← x·(1 − lr·λ) − min(lr, 1/√t)·max(ε2, rms(x)) · u / max(1, rms(u)/d).
    """
    beta, square = 1.0 - power(double(t), beta2_decay), g * g
    r = ema(row_var, op.ReduceMean(square, [-1], keepdims=1), beta)
    c = ema(col_var, op.ReduceMean(square, [-2], keepdims=1), beta)
    estimate = r * c / op.Max(op.ReduceMean(r, [-2], keepdims=1), typed(eps1, r))
    return adafactor_step(op, x, g, estimate, lr, t, eps1, eps2, d, weight_decay), r, c


@Update
def adafactor_vector(op, x, g, variance, lr, t, beta2_decay, eps1, eps2, d, weight_decay):
    """Adafactor where there are no rows and columns: with β = 1 − t^decay, v ← β·v + (1−β)·g²;  u = g / max(√v, ε1);

    x ← x·(1 − lr·λ) − min(lr, 1/√t)·max(ε2, rms(x)) · u / max(1, rms(u)/d).
    """
    v = ema(variance, g * g, 1.0 - power(double(t), beta2_decay))
    return adafactor_step(op, x, g, v, lr, t, eps1, eps2, d, weight_decay), v


def adafactor_step_optax(op, x, u, lr, eps2, d, weight_decay):
    """x·(1 − λ) − lr·max(ε2, rms(x)) · u / max(1, rms(u)/d)."""
    rate = lr * op.Max(eps2, rms(x)) / op.Max(rms(u) / d, 1.0)
    return descend(scaled(1.0 - weight_decay, x), rate, u)


@Update
def adafactor_optax(
    op, x, g, row_var, col_var, lr, t, beta2_decay, eps1, eps2, d, weight_decay, *, large: list[int], small: list[int]
):
    """Factored over the two largest axes. With β = 1 − t^decay and s = g² + ε1:

    r ← β·r + (1−β)·mean(s, `large`);  c ← β·c + (1−β)·mean(s, `small`);  u = g / √(r / mean(r, `small`)) / √c;
    x ← x·(1 − λ) − lr·max(ε2, rms(x)) · u / max(1, rms(u)/d).
    """
    beta, square = 1.0 - power(double(t), beta2_decay), g * g + typed(eps1, g)
    large_axis, small_axis = op.Constant(value_ints=large), op.Constant(value_ints=small)
    r = ema(row_var, op.ReduceMean(square, large_axis, keepdims=1), beta)
    c = ema(col_var, op.ReduceMean(square, small_axis, keepdims=1), beta)
    u = g / op.Sqrt(r / op.ReduceMean(r, small_axis, keepdims=1)) / op.Sqrt(c)
    return adafactor_step_optax(op, x, u, lr, eps2, d, weight_decay), r, c


@Update
def adafactor_vector_optax(op, x, g, variance, lr, t, beta2_decay, eps1, eps2, d, weight_decay):
    """Adafactor without factors: with β = 1 − t^decay, v ← β·v + (1−β)·(g² + ε1);  u = g / √v;

    x ← x·(1 − λ) − lr·max(ε2, rms(x)) · u / max(1, rms(u)/d).
    """
    v = ema(variance, g * g + typed(eps1, g), 1.0 - power(double(t), beta2_decay))
    return adafactor_step_optax(op, x, g / op.Sqrt(v), lr, eps2, d, weight_decay), v


def adafactor_transformers(*, scaled: bool) -> tuple[Update, Update]:
    """Adafactor of transformers, factored and for vectors; its rate is multiplied by rms(x) if `scaled`."""

    def step(op, x, u, lr, eps2, d, weight_decay):
        rate = lr * op.Max(eps2, rms(x)) if scaled else lr
        return descend(decoupled_decay(x, rate, weight_decay), rate / op.Max(rms(u) / d, 1.0), u)

    def factored(op, x, g, row_var, col_var, lr, t, beta2_decay, eps1, eps2, d, weight_decay):
        beta, square = 1.0 - power(double(t), beta2_decay), g * g + typed(eps1, g)
        r = ema(row_var, op.ReduceMean(square, [-1], keepdims=1), beta)
        c = ema(col_var, op.ReduceMean(square, [-2], keepdims=1), beta)
        u = g / op.Sqrt(r / op.ReduceMean(r, [-2], keepdims=1)) / op.Sqrt(c)
        return step(op, x, u, lr, eps2, d, weight_decay), r, c

    def vector(op, x, g, variance, lr, t, beta2_decay, eps1, eps2, d, weight_decay):
        v = ema(variance, g * g + typed(eps1, g), 1.0 - power(double(t), beta2_decay))
        return step(op, x, g / op.Sqrt(v), lr, eps2, d, weight_decay), v

    rate = "lr·max(ε2, rms(x))" if scaled else "lr"
    end = f"with α = {rate}: x ← x·(1 − α·λ) − α·u / max(1, rms(u)/d)."
    start = "With β = 1 − t^decay and s = g² + ε1:"
    factored.__doc__ = f"""{start} r ← β·r + (1−β)·mean(s, last axis);  c ← β·c + (1−β)·mean(s, axis before it);

    u = g / √(r / mean(r)) / √c;  {end}
    """
    vector.__doc__ = f"""{start} v ← β·v + (1−β)·s;  u = g / √v;  {end}"""
    name = "AdafactorTransformers" if scaled else "AdafactorTransformersUnscaled"
    return Update(factored, name), Update(vector, f"{name}Vector")


_OF_TRANSFORMERS = {scaled: adafactor_transformers(scaled=scaled) for scaled in _FLAG}


def _adafactor(s: Settings, shape: Shape | None) -> UpdateCall:
    """Select Adafactor: factored over the last two axes, in optax over the two largest."""
    shape = shape or ()
    last = {"large": len(shape) - 1, "small": len(shape) - 2}
    if s.variant == "transformers":
        factored, vector = _OF_TRANSFORMERS[s.scale_parameter]
        return UpdateCall(vector) if len(shape) < 2 else UpdateCall(factored, shapes=_factors(shape, **last))
    if not s.scale_parameter:
        raise RecipeError("Adafactor without `scale_parameter` is that of transformers", hint="`variant=transformers`")
    if s.variant == "torch":
        if len(shape) < 2:
            return UpdateCall(adafactor_vector)
        return UpdateCall(adafactor, shapes=_factors(shape, **last))
    if len(shape) < 2 or sorted(shape)[-2] < s.min_dim_size_to_factor:
        return UpdateCall(adafactor_vector_optax)
    small, large = (int(axis) for axis in np.argsort(shape)[-2:])
    axes = {"large": [large], "small": [small]}
    return UpdateCall(adafactor_optax, attributes=axes, shapes=_factors(shape, large=large, small=small))


def _factors(shape: Shape, *, large: int, small: int) -> dict[str, Shape]:
    return {"row_var": _without_axis(shape, large), "col_var": _without_axis(shape, small)}


def _without_axis(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])


_define(
    "adafactor",
    "Adafactor (Shazeer and Stern 2018), whose slots are rows and columns; as torch.optim.Adafactor in float32",
    {"lr": 1e-2, "beta2_decay": -0.8, "eps1": 2.0**-23, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0},
    _adafactor,
    variants={"torch": {}, "optax": {"eps1": 1e-30}, "transformers": {"lr": 1e-3, "eps1": 1e-30}},
    options={"min_dim_size_to_factor": 128, "scale_parameter": (True, False)},
)


# ---- signs, and steps as long as the parameter is large --------------------------------------------------------------


@Update
def lion(op, x, g, exp_avg, lr, beta1, beta2, weight_decay):
    """u = sign(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g;  x ← x − lr·(u + λ·x)."""
    u = op.Sign(ema(exp_avg, g, beta1))
    return descend(decoupled_decay(x, lr, weight_decay), lr, u), ema(exp_avg, g, beta2)


_define(
    "lion",
    "Lion (Chen et al. 2023), which follows the sign; as optax.lion, with the learning rate of its authors",
    {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 1e-3},
    lambda s, shape: UpdateCall(lion),
    variants={"optax": {}, "keras": {"lr": 1e-3, "weight_decay": 0.0}},
    follows_signs=True,
)


def lamb_step(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps, weight_decay=None):
    """Adam's step (with a decay in it), made as long as the parameter is large."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    root = root_correction(beta2, t)
    update = scaled(root / bias_correction(beta1, t), over_root(m, v, eps * root))
    if weight_decay is not None:
        update = coupled_decay(x, update, weight_decay)
    return descend(x, lr * trust_ratio(x, update), update), m, v


@Update
def lamb(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps, weight_decay):
    """u = m/(1−β1ᵗ) / (√(v / (1−β2ᵗ)) + ε) + λ·x;  x ← x − lr·‖x‖/‖u‖·u (the ratio is 1 where a norm is zero)."""
    return lamb_step(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps, weight_decay)


@Update
def lamb_keras(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """u = m/(1−β1ᵗ) / (√(v / (1−β2ᵗ)) + ε);  x ← x − lr·‖x‖/‖u‖·u (the ratio is 1 where a norm is zero)."""
    return lamb_step(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps)


_define(
    "lamb",
    "LAMB (You et al. 2020): Adam in steps as long as the parameter is large; as optax.lamb, with lr of Keras",
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0},
    lambda s, shape: lamb_keras if s.variant == "keras" else UpdateCall(lamb),
    variants={"optax": {}, "keras": {"eps": 1e-7}},
)


@functools.cache
def muon(*, nesterov: bool, adjust: str, steps: int, tall: bool) -> Update:
    """Muon for wide or tall matrices; the loop over `steps` is unrolled."""

    def body(op, x, g, momentum_buffer, lr, momentum, eps, weight_decay, ns_a, ns_b, ns_c):
        b = ema(momentum_buffer, g, momentum)
        u = newton_schulz(ema(b, g, momentum) if nesterov else b, ns_a, ns_b, ns_c, eps, steps=steps, tall=tall)
        rows, columns = op.Split(double(op.Shape(x)), outputs=2, num_outputs=2)
        if adjust == "original":
            factor = op.Sqrt(op.Max(rows / columns, 1.0))
        else:
            factor = 0.2 * op.Sqrt(op.Max(rows, columns))
        return descend(decoupled_decay(x, lr, weight_decay), lr * op.Squeeze(factor), u), b

    look = "μ·b + (1−μ)·g" if nesterov else "b"
    factor = "√max(1, rows/columns)" if adjust == "original" else "0.2·√max(rows, columns)"
    body.__doc__ = f"""b ← μ·b + (1−μ)·g;  u = {look}, made nearly orthogonal by {steps} Newton-Schulz steps;

    x ← x·(1 − lr·λ) − lr·{factor}·u. For matrices with {"more" if tall else "no more"} rows than columns.
    """
    parts = ["" if nesterov else "Plain", "" if adjust == "original" else "MatchRms", "Tall" if tall else ""]
    return Update(body, "".join(["Muon", *parts, "" if steps == 5 else f"Steps{steps}"]))


def _muon(s: Settings, shape: Shape | None) -> UpdateCall:
    if shape is not None and len(shape) != 2:
        raise RecipeError(
            f"optimizer `muon` is for matrices, but a parameter has the shape {list(shape)}",
            hint='write `groups=[{"match": "*.bias", "optimizer": "adamw"}]` for other parameters',
        )
    rows, columns = shape or (1, 1)
    return UpdateCall(muon(nesterov=s.nesterov, adjust=s.adjust_lr_fn, steps=s.ns_steps, tall=rows > columns))


_define(
    "muon",
    "Muon (Jordan et al. 2024): orthogonal steps, for matrices; as torch.optim.Muon, in the parameter's own type",
    {"lr": 1e-3, "momentum": 0.95, "eps": 1e-7, "weight_decay": 0.1, "ns_a": 3.4445, "ns_b": -4.775, "ns_c": 2.0315},
    _muon,
    variants={"torch": {}},
    options={"nesterov": (True, False), "adjust_lr_fn": ("original", "match_rms_adamw"), "ns_steps": 5},
)
