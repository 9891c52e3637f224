"""Compiled steps, and matmuls in fewer bits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from onward.engines.framework import Framework, Function, Operators
from onward.errors import UnknownNameError, UnsupportedError

Report = Callable[[str], None]


class Compiled:
    """A step that is compiled at the first call per set of batch shapes, if possible."""

    def __init__(self, framework: Framework, step: Function, compiled: Function, report: Report | None):
        self._framework = framework
        self._step = step
        self._compiled = compiled
        self._report = report or (lambda text: None)
        self._seen: set[Any] = set()
        self._refused: set[Any] = set()

    def __call__(self, state: Any, constants: Any, batch: Mapping[str, Any]) -> Any:
        shapes = tuple(tuple(tensor.shape) for tensor in batch.values())
        if shapes not in self._seen:
            self._seen.add(shapes)
            return self._first(shapes, state, constants, batch)
        if shapes in self._refused:
            return self._step(state, constants, {name: self._framework.adopt(x) for name, x in batch.items()})
        return self._compiled(state, constants, batch)

    def _first(self, shapes: Any, state: Any, constants: Any, batch: Mapping[str, Any]) -> Any:
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        name = self._framework.name
        self._report(f"{name} compiles the step for {shown}" if shown else f"{name} compiles the step")
        try:
            return self._compiled(state, constants, batch)
        except UnsupportedError as error:
            if self._framework.only_compiled:
                raise
            warnings.warn(f"the step is not compiled: {error.message}", stacklevel=4)
            self._refused.add(shapes)
            return self(state, constants, batch)


# ---- matmuls in fewer bits, for frameworks without autocast ----------------------------------------------------------

_PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Attention", "onward.Linear")
"""Operators in the chosen precision: they take most of the time."""
_EXACT = (
    "Exp", "Log", "Pow", "Softmax", "LogSoftmax", "CumSum", "CumProd", "SoftmaxCrossEntropyLoss",
    "NegativeLogLikelihoodLoss", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
"""Operators that compute in float32, even on results of `_PRODUCTS`."""

_FULL = "float32"

Cast = Callable[[Any, Any, Any], Any]
"""`(tensors, old, new)`: cast nested tensors of the type `old` to `new`."""


def with_products_in(
    precision: str, operators: Operators, types: Mapping[str, Any], cast: Cast, *, promotes: bool
) -> Operators:
    """Return the table with matmuls in a precision.

    If the framework `promotes` operands of two types to the wider one, results keep the narrow type
    until an operator needs float32. Else they are cast back to float32 at once.
    """
    if precision not in types:
        raise UnknownNameError(f"unknown precision `{precision}`", hint=f"use {', '.join(types)}")
    if precision == _FULL:
        return operators
    few, full = types[precision], types[_FULL]
    result = Operators(operators)
    for name in _PRODUCTS:
        if name in operators:
            after = (lambda results: results) if promotes else lambda results: cast(results, few, full)
            result[name] = _between(operators[name], lambda inputs: cast(inputs, full, few), after)
    if promotes:
        result.update({name: _between(operators[name], lambda inputs: cast(inputs, few, full)) for name in _EXACT})
    return result


def _between(
    function: Function, before: Callable[[Any], Any], after: Callable[[Any], Any] = lambda results: results
) -> Function:
    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        return after(function(*before(inputs), **attributes))

    return run
