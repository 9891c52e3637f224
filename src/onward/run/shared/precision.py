"""Products with fewer bits, for frameworks that have no switch for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from onward.errors import UnknownNameError
from onward.run.framework import Function, Operators

_PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "DeformConv", "Attention")
"""What is computed in the chosen precision: products, where time goes. Sums, norms and losses stay in float32."""

_FULL = "float32"

Cast = Callable[[Any, Any, Any], Any]
"""`(tensors, old, new)`: those that have the type `old`, in any nesting, as `new`."""


def with_products_in(precision: str, operators: Operators, types: Mapping[str, Any], cast: Cast) -> Operators:
    """The table with products in a precision, by the names of types; their results are float32 again."""
    if precision not in types:
        raise UnknownNameError(f"there is no precision `{precision}`", hint=f"it is {', '.join(types)}")
    if precision == _FULL:
        return operators
    products = {name: _in(types[precision], types[_FULL], operators[name], cast) for name in _PRODUCTS}
    return Operators({**operators, **products})


def _in(few: Any, full: Any, function: Function, cast: Cast) -> Function:
    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        return cast(function(*cast(inputs, full, few), **attributes), few, full)

    return run
