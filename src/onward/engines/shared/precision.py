"""Products with fewer bits, for frameworks that have no switch for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from onward.engines.framework import Function, Operators
from onward.errors import UnknownNameError

_PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Attention", "onward.Linear")
"""What is computed in the chosen precision: products, where time goes."""
_EXACT = (
    "Exp", "Log", "Pow", "Softmax", "LogSoftmax", "CumSum", "CumProd", "SoftmaxCrossEntropyLoss",
    "NegativeLogLikelihoodLoss", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
"""What needs all bits, of what may be given the result of a product."""

_FULL = "float32"

Cast = Callable[[Any, Any, Any], Any]
"""`(tensors, old, new)`: those that have the type `old`, in any nesting, as `new`."""


def with_products_in(
    precision: str, operators: Operators, types: Mapping[str, Any], cast: Cast, *, promotes: bool
) -> Operators:
    """The table with products in a precision, by the names of types.

    In a framework that promotes, operators take tensors of two types and compute in the wider: there results of
    products stay as they are, until an operator needs more. Elsewhere they are float32 again.
    """
    if precision not in types:
        raise UnknownNameError(f"there is no precision `{precision}`", hint=f"it is {', '.join(types)}")
    if precision == _FULL:
        return operators
    few, full = types[precision], types[_FULL]
    made = Operators(operators)
    for name in _PRODUCTS:
        if name in operators:
            product = _with(operators[name], lambda inputs: cast(inputs, full, few))
            made[name] = product if promotes else _then(product, lambda results: cast(results, few, full))
    if promotes:
        made.update({name: _with(operators[name], lambda inputs: cast(inputs, few, full)) for name in _EXACT})
    return made


def _with(function: Function, prepared: Callable[[Any], Any]) -> Function:
    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        return function(*prepared(inputs), **attributes)

    return run


def _then(function: Function, finished: Callable[[Any], Any]) -> Function:
    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        return finished(function(*inputs, **attributes))

    return run
