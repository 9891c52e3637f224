"""Gradient clipping: by global norm, by the norm of each tensor, or by value.

Norms are float32 at least and compared in float64, unless all gradients have 16 bits: then they are
rounded as in PyTorch. As in the frameworks, non-finite values are never hidden: they make the
gradients that they scale zero or undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.build import Builder, Expr, Function, function
from onward.constants import HALVES
from onward.errors import RecipeError
from onward.recipe.optimizers.arithmetic import add, declared_scalar, double, mul, rounded, scaled, single, typed


@function("squared_norm")
def squared_norm(op: Builder, g: Expr) -> Expr:
    """Σ g², as float64."""
    return double(op.ReduceSumSquare(g, keepdims=0))


@function("clipped")
def scale_to_norm(op: Builder, g: Expr, norm: Expr, max_norm: Expr) -> Expr:
    """g · min(1, max_norm / (norm + 10⁻⁶)), as torch.nn.utils.clip_grad_norm_."""
    factor = declared_scalar(max_norm) / (declared_scalar(norm) + 1e-6)
    return scaled(op.Where(factor > 1.0, 1.0, factor), g)


@function("clipped")
def scale_to_norm_half(op: Builder, g: Expr, norm: Expr, max_norm: Expr) -> Expr:
    """g · min(1, max_norm / (norm + 10⁻⁶)) in 16 bits, each operation rounded as in torch.nn.utils.clip_grad_norm_."""
    total = add(typed(declared_scalar(norm), g), 1e-6)
    factor = mul(rounded(1.0 / single(total), g), declared_scalar(max_norm))
    return rounded(single(g) * op.Min(single(factor), 1.0), g)


@function("clipped")
def scale_to_norm_optax(op: Builder, g: Expr, norm: Expr, max_norm: Expr) -> Expr:
    """g · (norm < max_norm ? 1 : max_norm / norm), as optax.clip_by_global_norm and Keras's global_clipnorm."""
    factor = declared_scalar(max_norm) / declared_scalar(norm)
    return scaled(op.Where(norm < max_norm, 1.0, factor), g)


@function("clipped")
def clip_to_value(op: Builder, g: Expr, limit: Expr) -> Expr:
    """Each element of g brought into [−limit, limit]."""
    bound = typed(declared_scalar(limit), g)
    return op.Clip(g, -bound, bound)


_BY_VARIANT: dict[str, Function] = {"torch": scale_to_norm, "optax": scale_to_norm_optax, "keras": scale_to_norm_optax}


def clip_by_global_norm(
    op: Builder, grads: Sequence[Expr], max_norm: Expr, variant: str = "torch"
) -> tuple[list[Expr], Expr]:
    """Scale gradients to a common norm of at most `max_norm`; return them and the norm, in float64."""
    if variant not in _BY_VARIANT:
        raise RecipeError(f"clipping has no variant `{variant}`", hint=f"there are {', '.join(_BY_VARIANT)}")
    squares = [declared_scalar(op.call(squared_norm, _at_least_float32(op, g))) for g in grads]
    scale = _BY_VARIANT[variant]
    dtypes = {g.dtype for g in grads}
    if variant == "torch" and dtypes <= set(HALVES) and len(dtypes) == 1:
        norms = [_as_stored(op, op.Sqrt(square), grads[0]) for square in squares]
        norm = _as_stored(op, op.Sqrt(op.Sum(*(own * own for own in norms))), grads[0])
        scale = scale_to_norm_half
    else:
        norm = op.Sqrt(op.Sum(*squares))
    norm = declared_scalar(norm)
    return [op.call(scale, g, norm, max_norm).like(g.value) for g in grads], norm


def _as_stored(op: Builder, number: Expr, like: Expr) -> Expr:
    return declared_scalar(double(op.Cast(number, to=like.dtype)))


def clip_by_norm(op: Builder, grads: Sequence[Expr], max_norm: Expr, variant: str = "torch") -> list[Expr]:
    """Scale each gradient down to a norm of `max_norm`; the variant `keras` is Keras's clipnorm."""
    return [clip_by_global_norm(op, [g], max_norm, variant)[0][0] for g in grads]


def clip_by_value(op: Builder, grads: Sequence[Expr], limit: Expr) -> list[Expr]:
    """Clip each element to [−limit, limit]; `limit` is a float64 scalar."""
    return [op.call(clip_to_value, g, limit).like(g.value) for g in grads]


def _at_least_float32(op: Builder, g: Expr) -> Expr:
    """Cast to float32 at least: squares of float16 overflow at 256, and long sums stop growing."""
    return op.Cast(g, to=ir.DataType.FLOAT) if g.dtype in HALVES else g
