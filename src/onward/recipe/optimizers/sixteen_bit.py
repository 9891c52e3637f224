# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# (as in `updates`: the signature of an update is that of the function in the file)
"""The same updates of parameters in 16 bits, float16 or bfloat16, rounded where PyTorch rounds.

PyTorch computes each operation in float32 and rounds its result: a step of Adam rounds eight times. What is meant is
its implementation for one tensor on a CPU (`foreach=False`), and its fused kernel where the name says so, which rounds
only what it stores. Numbers are in float32, but for those that something is added with (`add_(eps)`, `alpha=-lr`):
these are rounded to 16 bits first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onward.build import Expr, Function
from onward.recipe.optimizers import updates
from onward.recipe.optimizers.parts import Number, bias_correction, double, power, root_correction, typed
from onward.recipe.optimizers.updates import Update

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


# ---- operations of PyTorch -------------------------------------------------------------------------------------------


def single(x: Expr) -> Expr:
    return x.op.Cast(x, to=ir.DataType.FLOAT)


def rounded(x: Expr, like: Expr) -> Expr:
    return x.op.CastLike(x, like)


def fused_multiply_add(a: Expr, b: Expr, c: Expr) -> Expr:
    """a·b + c, rounded to float32 once: in float64 the product of two float32 is exact."""
    return single(double(a) * double(b) + double(c))


def mul(x: Expr, number: Expr) -> Expr:
    return rounded(single(x) * single(number), x)


def div(x: Expr, number: Expr) -> Expr:
    return rounded(single(x) / single(number), x)


def add(x: Expr, number: Number) -> Expr:
    return rounded(single(x) + single(typed(number, x)), x)


def add_scaled(x: Expr, y: Expr, alpha: Number) -> Expr:
    return rounded(single(x) + single(y) * single(typed(alpha, x)), x)


def lerp(old: Expr, new: Expr, weight: Expr) -> Expr:
    return rounded(between(single(old), single(new), single(weight)), old)


def between(old: Expr, new: Expr, weight: Expr) -> Expr:
    """old + weight·(new − old), from whichever of the two is nearer."""
    near = weight < 0.5
    factor, base = old.op.Where(near, weight, weight - 1.0), old.op.Where(near, old, new)
    return fused_multiply_add(factor, new - old, base)


def addcmul(x: Expr, a: Expr, b: Expr, value: Expr) -> Expr:
    return rounded(fused_multiply_add(single(value) * single(a), single(b), single(x)), x)


def addcdiv(x: Expr, a: Expr, b: Expr, value: Expr) -> Expr:
    return rounded(single(x) + single(value) * single(a) / single(b), x)


def sqrt(x: Expr) -> Expr:
    return rounded(x.op.Sqrt(single(x)), x)


# ---- updates ---------------------------------------------------------------------------------------------------------


class Rounded(Update):
    """An update in 16 bits, beside the one whose formula it has."""

    suffix, remark = "Half", "each operation rounds, as PyTorch's does"

    def __init__(self, body: Callable[..., Any], of: Update):
        body.__doc__ = f"{inspect.getdoc(of._body)}\n\nFor 16 bits: {self.remark}."
        super().__init__(body, of.name + self.suffix)

    def coupled_decay(self, x: Expr, g: Expr, weight_decay: Expr) -> Expr:
        return add_scaled(g, x, weight_decay)

    def decoupled_decay(self, x: Expr, lr: Expr, weight_decay: Expr) -> Expr:
        return mul(x, 1.0 - lr * weight_decay)


_HALVES: dict[Update, Update] = {}
_FUSED: dict[Update, Update] = {}


def half(of: Update) -> Callable[[Callable[..., Any]], None]:
    def register(body: Callable[..., Any]) -> None:
        _HALVES[of] = Rounded(body, of)

    return register


@functools.cache
def in_half(function: Function, fused: bool) -> Function | None:
    """What computes the function in 16 bits as PyTorch does; None where that is not known."""
    for exact, narrow in (_FUSED if fused else _HALVES).items():
        for way in ("plain", "coupled", "decoupled"):
            if getattr(exact, way) is function:
                return getattr(narrow, way)
    return None


@half(updates.sgd)
def sgd(op, x, g, lr):
    return add_scaled(x, g, -lr)


@half(updates.sgd_momentum)
def sgd_momentum(op, x, g, momentum_buffer, lr, momentum):
    v = add_scaled(mul(momentum_buffer, momentum), g, 1.0)
    return add_scaled(x, v, -lr), v


@half(updates.sgd_nesterov)
def sgd_nesterov(op, x, g, momentum_buffer, lr, momentum):
    v = add_scaled(mul(momentum_buffer, momentum), g, 1.0)
    return add_scaled(x, add_scaled(g, v, momentum), -lr), v


@half(updates.sgd_momentum_dampened)
def sgd_momentum_dampened(op, x, g, momentum_buffer, lr, t, momentum, dampening):
    v = add_scaled(mul(momentum_buffer, momentum), g, op.Where(t > 1, 1.0 - dampening, 1.0))
    return add_scaled(x, v, -lr), v


def moments(g, exp_avg, exp_avg_sq, beta1, beta2):
    """m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²."""
    return lerp(exp_avg, g, 1.0 - beta1), square_average(exp_avg_sq, g, beta2)


def square_average(old, g, beta):
    return addcmul(mul(old, beta), g, g, 1.0 - beta)


def adam_step(x, m, v, lr, t, beta1, beta2, eps):
    return addcdiv(x, m, add(div(sqrt(v), root_correction(beta2, t)), eps), -lr / bias_correction(beta1, t))


@half(updates.adam)
def adam(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    return adam_step(x, m, v, lr, t, beta1, beta2, eps), m, v


@half(updates.amsgrad)
def amsgrad(op, x, g, exp_avg, exp_avg_sq, max_exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    u = rounded(op.Max(single(max_exp_avg_sq), single(v)), v)
    return adam_step(x, m, u, lr, t, beta1, beta2, eps), m, v, u


@half(updates.adamax)
def adamax(op, x, g, exp_avg, exp_inf, lr, t, beta1, beta2, eps):
    m = lerp(exp_avg, g, 1.0 - beta1)
    u = rounded(op.Max(single(mul(exp_inf, beta2)), single(add(rounded(op.Abs(single(g)), g), eps))), exp_inf)
    return addcdiv(x, m, u, -lr / bias_correction(beta1, t)), m, u


@half(updates.nadam)
def nadam(op, x, g, exp_avg, exp_avg_sq, mu_product, lr, t, beta1, beta2, eps, momentum_decay):
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    step = double(t)
    mu, mu_next = (beta1 * (1.0 - 0.5 * power(0.96, n * momentum_decay)) for n in (step, step + 1.0))
    product = mu_product * mu
    d = add(sqrt(div(v, bias_correction(beta2, t))), eps)
    x = addcdiv(x, g, d, -lr * (1.0 - mu) / (1.0 - product))
    return addcdiv(x, m, d, -lr * mu_next / (1.0 - product * mu_next)), m, v, product


@half(updates.radam)
def radam(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    adaptive, r = updates.rectification(op, t, beta2)
    reciprocal = rounded(1.0 / single(add(sqrt(v), eps)), v)
    along = mul(div(m, bias_correction(beta1, t)), lr)
    by_size = mul(rounded(single(along) * single(mul(reciprocal, root_correction(beta2, t))), x), r)
    return add_scaled(x, op.Where(adaptive, by_size, along), -1.0), m, v


@half(updates.adagrad)
def adagrad(op, x, g, sum, lr, t, lr_decay, eps):
    h = rounded(single(sum) + single(g) * single(g), sum)
    return addcdiv(x, g, add(sqrt(h), eps), -lr / (1.0 + (double(t) - 1.0) * lr_decay)), h


@half(updates.rmsprop)
def rmsprop(op, x, g, square_avg, lr, alpha, eps):
    v = square_average(square_avg, g, alpha)
    return addcdiv(x, g, add(sqrt(v), eps), -lr), v


@half(updates.rmsprop_momentum)
def rmsprop_momentum(op, x, g, square_avg, momentum_buffer, lr, alpha, eps, momentum):
    v = square_average(square_avg, g, alpha)
    b = momentum_by_size(momentum_buffer, g, add(sqrt(v), eps), momentum)
    return add_scaled(x, b, -lr), v, b


@half(updates.rmsprop_centered)
def rmsprop_centered(op, x, g, square_avg, grad_avg, lr, alpha, eps):
    a, v = moments(g, grad_avg, square_avg, alpha, alpha)
    return addcdiv(x, g, add(centered_root(a, v), eps), -lr), v, a


@half(updates.rmsprop_centered_momentum)
def rmsprop_centered_momentum(op, x, g, square_avg, grad_avg, momentum_buffer, lr, alpha, eps, momentum):
    a, v = moments(g, grad_avg, square_avg, alpha, alpha)
    b = momentum_by_size(momentum_buffer, g, add(centered_root(a, v), eps), momentum)
    return add_scaled(x, b, -lr), v, a, b


def centered_root(a, v):
    return sqrt(rounded(single(v) - single(a) * single(a), v))


def momentum_by_size(old, g, size, momentum):
    buffer = mul(old, momentum)
    return rounded(single(buffer) + single(g) / single(size), buffer)


@half(updates.adadelta)
def adadelta(op, x, g, square_avg, acc_delta, lr, rho, eps):
    v = square_average(square_avg, g, rho)
    ratio = rounded(single(sqrt(add(acc_delta, eps))) / single(sqrt(add(v, eps))), g)
    d = rounded(single(ratio) * single(g), g)
    return add_scaled(x, d, -lr), v, square_average(acc_delta, d, rho)


# ---- fused kernels ---------------------------------------------------------------------------------------------------


class Fused(Rounded):
    """An update of tensors in 16 bits that is computed in float32, and rounded where it is stored."""

    suffix, remark = "Fused", "in float32, and what is stored is rounded"

    def coupled_decay(self, x: Expr, g: Expr, weight_decay: Expr) -> Expr:
        return single(g) + single(x) * single(weight_decay)

    def decoupled_decay(self, x: Expr, lr: Expr, weight_decay: Expr) -> Expr:
        return single(x) * single(1.0 - lr * weight_decay)


def fused_moments(g, exp_avg, exp_avg_sq, beta1, beta2):
    m, v, g = single(exp_avg), single(exp_avg_sq), single(g)
    return between(m, g, single(1.0 - beta1)), v * single(beta2) + single(1.0 - beta2) * g * g


def fused_step(x, m, v, lr, t, beta1, beta2, eps):
    d = v.op.Sqrt(v) / single(root_correction(beta2, t)) + single(eps)
    return single(x) - single(lr / bias_correction(beta1, t)) * (m / d)


def fused_adam(op, x, g, exp_avg, exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = fused_moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    stored = fused_step(x, m, v, lr, t, beta1, beta2, eps), m, v
    return tuple(rounded(new, exp_avg) for new in stored)


def fused_amsgrad(op, x, g, exp_avg, exp_avg_sq, max_exp_avg_sq, lr, t, beta1, beta2, eps):
    m, v = fused_moments(g, exp_avg, exp_avg_sq, beta1, beta2)
    u = op.Max(single(max_exp_avg_sq), v)
    stored = fused_step(x, m, u, lr, t, beta1, beta2, eps), m, v, u
    return tuple(rounded(new, exp_avg) for new in stored)


_FUSED |= {updates.adam: Fused(fused_adam, updates.adam), updates.amsgrad: Fused(fused_amsgrad, updates.amsgrad)}
