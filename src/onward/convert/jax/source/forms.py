"""How calls are written that Python, or JAX, has a shorter form for than the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.convert.jax.source.literals import plain_type

Given = Sequence[np.ndarray | None]
"""The inputs that are constants."""
Form = Callable[[Sequence[str], Given, dict[str, Any]], str | None]
"""Of the inputs as text, those that are constants, and the attributes; None where the operator says more."""


def short_form(
    operator: str, inputs: Sequence[str], given: Given, attributes: dict[str, Any], types: Sequence[ir.DataType | None]
) -> str | None:
    """The expression for a call of an operator, if it has a short one."""
    is_float = all(dtype is not None and dtype.is_floating_point() for dtype in types)
    if operator in _FORMS and "None" not in inputs and (is_float or operator not in _FOR_FLOATS):
        return _FORMS[operator](inputs, given, attributes)
    return None


def _infix(sign: str) -> Form:
    return lambda xs, _, __: f"{xs[0]} {sign} {xs[1]}"


def _gemm(xs: Sequence[str], _: Given, attributes: dict[str, Any]) -> str | None:
    if attributes["alpha"] != 1 or attributes["beta"] != 1:
        return None
    a, b = (f"{x}.T" if attributes[flag] else x for x, flag in zip(xs, ("transA", "transB"), strict=False))
    return f"{a} @ {b} + {xs[2]}" if len(xs) > 2 else f"{a} @ {b}"


def _cast(xs: Sequence[str], _: Given, attributes: dict[str, Any]) -> str | None:
    dtype = plain_type(attributes["to"])
    return None if dtype is None else f"{xs[0]}.astype({dtype})"


def _reduction(function: str) -> Form:
    def form(xs: Sequence[str], given: Given, attributes: dict[str, Any]) -> str | None:
        axes = given[1] if len(xs) > 1 else None
        if (len(xs) > 1 and axes is None) or attributes["noop_with_empty_axes"]:
            return None
        over = "" if axes is None or not axes.size else f", {_places(axes)}"
        return f"jnp.{function}({xs[0]}{over}{', keepdims=True' if attributes['keepdims'] else ''})"

    return form


def _by_places(function: str) -> Form:
    def form(xs: Sequence[str], given: Given, _: dict[str, Any]) -> str | None:
        axes = given[1] if len(xs) > 1 else None
        return None if axes is None else f"jnp.{function}({xs[0]}, {_places(axes)})"

    return form


def _reshape(xs: Sequence[str], given: Given, attributes: dict[str, Any]) -> str | None:
    sizes = given[1]
    return (
        f"{xs[0]}.reshape({str(sizes.tolist())[1:-1]})" if sizes is not None and 0 not in sizes and sizes.size else None
    )


def _transpose(xs: Sequence[str], _: Given, attributes: dict[str, Any]) -> str:
    order = attributes.get("perm")
    return f"{xs[0]}.T" if order is None else f"{xs[0]}.transpose({', '.join(map(str, order))})"


def _places(axes: np.ndarray) -> str:
    listed = np.atleast_1d(axes).tolist()
    return str(listed[0]) if len(listed) == 1 else str(tuple(listed))


_FORMS: dict[str, Form] = {
    "Add": _infix("+"),
    "Sub": _infix("-"),
    "Mul": _infix("*"),
    "Div": _infix("/"),
    "MatMul": _infix("@"),
    "Less": _infix("<"),
    "LessOrEqual": _infix("<="),
    "Greater": _infix(">"),
    "GreaterOrEqual": _infix(">="),
    "Equal": _infix("=="),
    "And": _infix("&"),
    "Or": _infix("|"),
    "BitwiseXor": _infix("^"),
    "Neg": lambda xs, _, __: f"-{xs[0]}",
    "Not": lambda xs, _, __: f"~{xs[0]}",
    "Gemm": _gemm,
    "Cast": _cast,
    "ReduceSum": _reduction("sum"),
    "ReduceMean": _reduction("mean"),
    "Squeeze": _by_places("squeeze"),
    "Unsqueeze": _by_places("expand_dims"),
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Concat": lambda xs, _, attributes: f"jnp.concatenate([{', '.join(xs)}], {attributes['axis']})",
    "LogSoftmax": lambda xs, _, attributes: f"jax.nn.log_softmax({xs[0]}, {attributes['axis']})",
}
_FOR_FLOATS = ("Div", "Gemm", "ReduceSum", "ReduceMean")
"""What integers would be rounded by in another way, or become."""
