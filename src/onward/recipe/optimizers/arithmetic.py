"""Arithmetic of optimizers as expressions: exact, or rounded to 16 bits as in PyTorch.

Numbers (learning rate, decay rates, bias corrections) are float64 scalars, rounded once to a
tensor's type where they meet it, as Python floats are in the frameworks.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.build import Expr

Number = Expr | float
"""A float64 scalar of the graph, or a number known at build time."""


def typed(number: Number, like: Expr) -> Expr:
    """Return the number in the type of a tensor."""
    if isinstance(number, Expr):
        return like.op.CastLike(number, like)
    return like.op.scalar(number, like)


def declared_scalar(expr: Expr, dtype: ir.DataType = ir.DataType.DOUBLE) -> Expr:
    """Return the value declared as a scalar of this type."""
    expr.value.type = ir.TensorType(dtype)
    expr.value.shape = ir.Shape(())
    return expr


def double(x: Expr) -> Expr:
    """Return a scalar in float64."""
    return x.op.Cast(x, to=ir.DataType.DOUBLE)


def scaled(number: Number, x: Expr) -> Expr:
    """Return number · x."""
    return x * typed(number, x)


def descend(x: Expr, rate: Number, direction: Expr) -> Expr:
    """Return x − rate · direction."""
    return x - scaled(rate, direction)


def ema(old: Expr, new: Expr, beta: Number) -> Expr:
    """Return the exponential moving average β·old + (1−β)·new."""
    return scaled(beta, old) + scaled(1 - beta, new)


def trace(old: Expr, new: Expr, momentum: Number) -> Expr:
    """Return the decayed past plus the new: μ·old + new."""
    return scaled(momentum, old) + new


def power(base: Number, exponent: Expr) -> Expr:
    """Return baseᵉ in float64, for integer exponents, too."""
    op = exponent.op
    return op.Pow(base if isinstance(base, Expr) else op.constant(np.float64(base)), exponent)


def bias_correction(beta: Number, t: Expr) -> Expr:
    """Return 1 − βᵗ: the share of data in an average that began at zero, after t updates."""
    return 1.0 - power(beta, t)


def coupled_decay(x: Expr, g: Expr, weight_decay: Number) -> Expr:
    """Return g + λ·x: the gradient with an L2 penalty."""
    return g + scaled(weight_decay, x)


def decoupled_decay(x: Expr, lr: Expr, weight_decay: Expr) -> Expr:
    """Return x · (1 − lr·λ): decayed weights; the gradient is not changed."""
    return scaled(1.0 - lr * weight_decay, x)


def root_correction(beta: Number, t: Expr) -> Expr:
    """Return √(1 − βᵗ), for the root of an average."""
    return t.op.Sqrt(bias_correction(beta, t))


def adam_rate(lr: Expr, t: Expr, beta1: Number, beta2: Number) -> Expr:
    """Return lr · √(1−β2ᵗ) / (1−β1ᵗ): the step along m / √v of averages that began at zero."""
    return lr * root_correction(beta2, t) / bias_correction(beta1, t)


def over_root(m: Expr, v: Expr, eps: Number) -> Expr:
    """Return m / (√v + ε)."""
    return m / (v.op.Sqrt(v) + typed(eps, v))


def over_root_of_sum(m: Expr, v: Expr, eps: Number) -> Expr:
    """Return m / √(v + ε)."""
    return m / v.op.Sqrt(v + typed(eps, v))


def norm(x: Expr) -> Expr:
    """Return the Euclidean norm of a whole tensor, a float64 scalar."""
    return x.op.Sqrt(double(x.op.ReduceSumSquare(x, keepdims=0)))


def rms(x: Expr) -> Expr:
    """Return the root mean square of a whole tensor, a float64 scalar."""
    return x.op.Sqrt(double(x.op.ReduceMean(x * x, keepdims=0)))


def trust_ratio(x: Expr, update: Expr) -> Expr:
    """Return ‖x‖ / ‖update‖, or 1 if either is zero."""
    op, weight, step = x.op, norm(x), norm(update)
    return op.Where(op.And(weight > 0.0, step > 0.0), weight / step, 1.0)


def newton_schulz(x: Expr, a: Expr, b: Expr, c: Expr, eps: Expr, *, steps: int, tall: bool) -> Expr:
    """Return a nearly orthogonal matrix: `steps` times X ← a·X + (b·A + c·A²)·X, A = X·Xᵀ, from x /
    ‖x‖.

    A tall matrix is transposed, so that A is the smaller of the two matmuls.
    """
    op = x.op
    y = op.Transpose(x, perm=[1, 0]) if tall else x
    y = y / typed(op.Max(norm(x), eps), x)
    for _ in range(steps):
        gram = y @ op.Transpose(y, perm=[1, 0])
        # A·(b + c·A): a factor right beside a product would become a float32 attribute in ONNX
        # Runtime.
        polynomial = gram @ (scaled(b, op.EyeLike(gram)) + scaled(c, gram))
        y = scaled(a, y) + polynomial @ y
    return op.Transpose(y, perm=[1, 0]) if tall else y


# ---- 16 bits, rounded as PyTorch rounds ------------------------------------------------------------------------------


def single(x: Expr) -> Expr:
    return x.op.Cast(x, to=ir.DataType.FLOAT)


def rounded(x: Expr, like: Expr) -> Expr:
    return x.op.CastLike(x, like)


def fused_multiply_add(a: Expr, b: Expr, c: Expr) -> Expr:
    """Return a·b + c, rounded to float32 once: in float64 the product of two float32 is exact."""
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
    """Return old + weight·(new − old), computed from the nearer of the two."""
    near = weight < 0.5
    factor, base = old.op.Where(near, weight, weight - 1.0), old.op.Where(near, old, new)
    return fused_multiply_add(factor, new - old, base)


def addcmul(x: Expr, a: Expr, b: Expr, value: Expr) -> Expr:
    return rounded(fused_multiply_add(single(value) * single(a), single(b), single(x)), x)


def addcdiv(x: Expr, a: Expr, b: Expr, value: Expr) -> Expr:
    return rounded(single(x) + single(value) * single(a) / single(b), x)


def sqrt(x: Expr) -> Expr:
    return rounded(x.op.Sqrt(single(x)), x)
