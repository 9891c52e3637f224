# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# (the signature of an update is that of the function in the file; annotations would only repeat "a tensor")
"""What each optimizer does with one parameter: functions of the domain `onward`, one formula each.

A signature reads `x` (the parameter), `g` (its gradient), the slots, and then the numbers: `lr`, `t` (which counts
this update from 1) where it matters, and the hyper-parameters. All are float64 scalars, but for `t`, which is int64.
Results are the new `x` and the new slots. Slots have PyTorch's names. Where frameworks disagree, a suffix names the one
that computes it so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr, Function
from onward.recipe.optimizers.parts import (
    adam_rate,
    bias_correction,
    coupled_decay,
    declared_scalar,
    decoupled_decay,
    descend,
    double,
    ema,
    newton_schulz,
    over_root,
    over_root_of_sum,
    power,
    rms,
    root_correction,
    scaled,
    trace,
    trust_ratio,
    typed,
)

SCALAR_SLOTS = {"mu_product"}
"""Slots that are one float64 number, whatever the parameter."""


class Update:
    """An optimizer's update as functions that differ in what is done about weight decay."""

    def __init__(self, body: Callable[..., Any], name: str | None = None):
        self._body = body
        self.name = name or "".join(part.capitalize() for part in body.__name__.split("_"))

    @functools.cached_property
    def plain(self) -> Function:
        """No weight decay beside what the signature names."""
        return self._function("", "", lambda x, g, lr, weight_decay: (x, g))

    @functools.cached_property
    def coupled(self) -> Function:
        """An L2 penalty: the decay is part of the gradient."""
        doc = "\n\nBefore that, weight decay as an L2 penalty: g ← g + λ·x."
        return self._function("L2", doc, lambda x, g, lr, weight_decay: (x, self.coupled_decay(x, g, weight_decay)))

    @functools.cached_property
    def decoupled(self) -> Function:
        """The decay acts on the weights alone."""
        doc = "\n\nBefore that, decoupled weight decay: x ← x·(1 − lr·λ)."
        return self._function("W", doc, lambda x, g, lr, weight_decay: (self.decoupled_decay(x, lr, weight_decay), g))

    def coupled_decay(self, x: Expr, g: Expr, weight_decay: Expr) -> Expr:
        return coupled_decay(x, g, weight_decay)

    def decoupled_decay(self, x: Expr, lr: Expr, weight_decay: Expr) -> Expr:
        return decoupled_decay(x, lr, weight_decay)

    def _function(self, suffix: str, doc: str, decay: Callable[..., tuple[Expr, Expr]]) -> Function:
        signature = inspect.signature(self._body, eval_str=True)
        parameters = list(signature.parameters.values())
        if suffix:
            last = 1 + max(i for i, p in enumerate(parameters) if p.kind is not p.KEYWORD_ONLY)
            parameters.insert(last, inspect.Parameter("weight_decay", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        names = [p.name for p in parameters[1:] if p.kind is not p.KEYWORD_ONLY]
        slots = names[2 : names.index("lr")]

        def body(op: Builder, *inputs: Expr, **attributes: Any) -> Any:
            values = dict(zip(names, inputs, strict=True))
            for name in (*SCALAR_SLOTS.intersection(slots), *names[names.index("lr") :]):
                declared_scalar(values[name], ir.DataType.INT64 if name == "t" else ir.DataType.DOUBLE)
            if suffix:
                values["x"], values["g"] = decay(values["x"], values["g"], values["lr"], values.pop("weight_decay"))
            return self._body(op, **values, **attributes)

        body.__doc__ = inspect.cleandoc(self._body.__doc__ or "") + doc
        body.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return Function(body, ["x_new", *(f"{slot}_new" for slot in slots)], self.name + suffix)


# ---- gradient descent ------------------------------------------------------------------------------------------------


@Update
def sgd(op, x, g, lr):
    """x ← x − lr·g."""
    return descend(x, lr, g)


@Update
def sgd_momentum(op, x, g, momentum_buffer, lr, momentum):
    """v ← μ·v + g;  x ← x − lr·v."""
    v = trace(momentum_buffer, g, momentum)
    return descend(x, lr, v), v


@Update
def sgd_nesterov(op, x, g, momentum_buffer, lr, momentum):
    """v ← μ·v + g;  x ← x − lr·(g + μ·v)."""
    v = trace(momentum_buffer, g, momentum)
    return descend(x, lr, trace(v, g, momentum)), v


@Update
def sgd_momentum_dampened(op, x, g, momentum_buffer, lr, t, momentum, dampening):
    """v ← μ·v + (1−τ)·g, but v ← g in the first update;  x ← x − lr·v."""
    v = trace(momentum_buffer, scaled(op.Where(t > 1, 1.0 - dampening, 1.0), g), momentum)
    return descend(x, lr, v), v


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


# ---- the Adam family -------------------------------------------------------------------------------------------------


def moments(g, exp_avg, exp_avg_sq, beta1, beta2):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²."""
    return ema(exp_avg, g, beta1), ema(exp_avg_sq, g * g, beta2)


@Update
def adam(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  x ← x − lr / (1−β1ᵗ) · m / (√(v / (1−β2ᵗ)) + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    root = root_correction(beta2, t)
    return descend(x, lr * root / bias_correction(beta1, t), over_root(m, v, eps * root)), m, v


@Update
def adam_keras(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  x ← x − lr·√(1−β2ᵗ) / (1−β1ᵗ) · m / (√v + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    return descend(x, adam_rate(lr, t, beta1, beta2), over_root(m, v, eps)), m, v


@Update
def adamw_transformers(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps, weight_decay):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  x ← (x − lr·√(1−β2ᵗ) / (1−β1ᵗ) · m / (√v + ε))·(1 − lr·λ)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    moved = descend(x, adam_rate(lr, t, beta1, beta2), over_root(m, v, eps))
    return decoupled_decay(moved, lr, weight_decay), m, v


@Update
def amsgrad(op, x, g, exp_avg, exp_avg_sq, max_exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with the largest v so far: u ← max(u, v);  x ← x − lr / (1−β1ᵗ) · m / (√(u / (1−β2ᵗ)) + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    u = op.Max(max_exp_avg_sq, v)
    root = root_correction(beta2, t)
    return descend(x, lr * root / bias_correction(beta1, t), over_root(m, u, eps * root)), m, v, u


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


@Update
def adamax(op, x, g, exp_avg, exp_inf, lr, t, beta1, beta2, eps):
    """m ← β1·m + (1−β1)·g;  u ← max(β2·u, |g| + ε);  x ← x − lr / (1−β1ᵗ) · m / u."""
    m = ema(exp_avg, g, beta1)
    u = op.Max(scaled(beta2, exp_inf), op.Abs(g) + typed(eps, g))
    return descend(x, lr / bias_correction(beta1, t), m / u), m, u


@Update
def adamax_keras(op, x, g, exp_avg, exp_inf, lr, t, beta1, beta2, eps):
    """m ← β1·m + (1−β1)·g;  u ← max(β2·u, |g|);  x ← x − lr / (1−β1ᵗ) · m / (u + ε)."""
    m = ema(exp_avg, g, beta1)
    u = op.Max(scaled(beta2, exp_inf), op.Abs(g))
    return descend(x, lr / bias_correction(beta1, t), m / (u + typed(eps, u))), m, u


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


@Update
def nadam_optax(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with Nesterov momentum: x ← x − lr·(β1/(1−β1ᵗ⁺¹)·m + (1−β1)/(1−β1ᵗ)·g) / (√(v / (1−β2ᵗ)) + ε)."""
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    past, new = beta1 / bias_correction(beta1, t + 1), (1.0 - beta1) / bias_correction(beta1, t)
    root = root_correction(beta2, t)
    return descend(x, lr * root, over_root(scaled(past, m) + scaled(new, g), v, eps * root)), m, v


def rectification(op, t, beta2):
    """Whether ρ, the length of the average behind v, is above 5; and r, which makes up for its shortness."""
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


@Update
def radam_optax(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    """Adam with its variance rectified, and momentum until that is known: ρ∞ = 2/(1−β2) − 1, ρ = ρ∞ − 2t·β2ᵗ/(1−β2ᵗ);

    x ← x − lr/(1−β1ᵗ) · (ρ > 5 ? r·m / (√(v / (1−β2ᵗ)) + ε) : m) with r² = (ρ−4)(ρ−2)ρ∞ / ((ρ∞−4)(ρ∞−2)ρ).
    """
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    return rectified(op, x, m, v, lr, t, beta1, beta2, eps * root_correction(beta2, t)), m, v


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


@Update
def lion(op, x, g, exp_avg, lr, beta1, beta2, weight_decay):
    """u = sign(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g;  x ← x − lr·(u + λ·x)."""
    u = op.Sign(ema(exp_avg, g, beta1))
    return descend(decoupled_decay(x, lr, weight_decay), lr, u), ema(exp_avg, g, beta2)


# ---- averages of squared gradients -----------------------------------------------------------------------------------


@Update
def adagrad(op, x, g, sum, lr, t, lr_decay, eps):
    """h ← h + g²;  x ← x − lr / (1 + (t−1)·η) · g / (√h + ε)."""
    h = sum + g * g
    return descend(x, lr / (1.0 + (double(t) - 1.0) * lr_decay), over_root(g, h, eps)), h


@Update
def adagrad_keras(op, x, g, sum, lr, eps):
    """h ← h + g²;  x ← x − lr·g / √(h + ε)."""
    h = sum + g * g
    return descend(x, lr, over_root_of_sum(g, h, eps)), h


@Update
def rmsprop(op, x, g, square_avg, lr, alpha, eps):
    """v ← α·v + (1−α)·g²;  x ← x − lr·g / (√v + ε)."""
    v = ema(square_avg, g * g, alpha)
    return descend(x, lr, over_root(g, v, eps)), v


@Update
def rmsprop_momentum(op, x, g, square_avg, momentum_buffer, lr, alpha, eps, momentum):
    """v ← α·v + (1−α)·g²;  b ← μ·b + g / (√v + ε);  x ← x − lr·b."""
    v = ema(square_avg, g * g, alpha)
    b = trace(momentum_buffer, over_root(g, v, eps), momentum)
    return descend(x, lr, b), v, b


@Update
def rmsprop_centered(op, x, g, square_avg, grad_avg, lr, alpha, eps):
    """v ← α·v + (1−α)·g²;  a ← α·a + (1−α)·g;  x ← x − lr·g / (√(v − a²) + ε)."""
    a, v = moments(g, grad_avg, square_avg, alpha, alpha)
    return descend(x, lr, over_root(g, v - a * a, eps)), v, a


@Update
def rmsprop_centered_momentum(op, x, g, square_avg, grad_avg, momentum_buffer, lr, alpha, eps, momentum):
    """v ← α·v + (1−α)·g²;  a ← α·a + (1−α)·g;  b ← μ·b + g / (√(v − a²) + ε);  x ← x − lr·b."""
    a, v = moments(g, grad_avg, square_avg, alpha, alpha)
    b = trace(momentum_buffer, over_root(g, v - a * a, eps), momentum)
    return descend(x, lr, b), v, a, b


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


@Update
def adadelta(op, x, g, square_avg, acc_delta, lr, rho, eps):
    """v ← ρ·v + (1−ρ)·g²;  d = g·√(u + ε) / √(v + ε);  u ← ρ·u + (1−ρ)·d²;  x ← x − lr·d."""
    v = ema(square_avg, g * g, rho)
    d = over_root_of_sum(g * op.Sqrt(acc_delta + typed(eps, acc_delta)), v, eps)
    return descend(x, lr, d), v, ema(acc_delta, d * d, rho)


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
