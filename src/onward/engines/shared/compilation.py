"""Steps that are compiled as a whole, and products with fewer bits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from onward.engines.framework import Framework, Function, Operators
from onward.errors import UnknownNameError, UnsupportedError

Report = Callable[[str], None]


class Compiled:
    """A step that is compiled when it is first called with a batch of some shapes, or executed as it is if it must."""

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


# ---- products with fewer bits, for frameworks that have no switch for it ---------------------------------------------

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
            after = (lambda results: results) if promotes else lambda results: cast(results, few, full)
            made[name] = _between(operators[name], lambda inputs: cast(inputs, full, few), after)
    if promotes:
        made.update({name: _between(operators[name], lambda inputs: cast(inputs, few, full)) for name in _EXACT})
    return made


def _between(
    function: Function, before: Callable[[Any], Any], after: Callable[[Any], Any] = lambda results: results
) -> Function:
    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        return after(function(*before(inputs), **attributes))

    return run
