"""Sizes that are known only when a graph runs: what becomes of shapes while it is recorded.

A vector of sizes is an array on the host, with whole numbers where they are known and a `Size` where they are not. So
what depends on known sizes stays known, and only the rest is computed when the graph runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Function, keywords
from onward.engines.host import HOST_INPUTS
from onward.engines.numpy import Numpy


class Size:
    """A whole number, taken to be more than 1."""

    def __init__(self, value: Any):
        self.value = value

    def __add__(self, other: Any) -> Size:
        return Size(self.value + _value(other))

    def __sub__(self, other: Any) -> Size:
        return Size(self.value - _value(other))

    def __rsub__(self, other: Any) -> Size:
        return Size(_value(other) - self.value)

    def __mul__(self, other: Any) -> Any:
        return 0 if other == 0 else self if other == 1 else Size(self.value * _value(other))

    def __floordiv__(self, other: Any) -> Size:
        return self if other == 1 else Size(self.value // _value(other))

    __truediv__ = __floordiv__
    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.value is other.value

    def __ge__(self, other: Any) -> bool:
        return True

    def __gt__(self, other: Any) -> bool:
        return True

    def __lt__(self, other: Any) -> bool:
        return False

    def __le__(self, other: Any) -> bool:
        return False

    __hash__ = object.__hash__


def _value(number: Any) -> Any:
    return number.value if isinstance(number, Size) else number


def is_open(value: Any) -> bool:
    """Whether something is an array of sizes, some of which are not known."""
    return isinstance(value, np.ndarray) and value.dtype == object


def vector(sizes: Any) -> np.ndarray:
    """Sizes as an array: numbers, or anything else that is only known when the graph runs."""
    known = all(isinstance(size, int) for size in sizes)
    if known:
        return np.array(sizes, np.int64)
    made = np.empty(len(sizes), object)
    made[:] = [size if isinstance(size, int) else Size(size) for size in sizes]
    return made


def listed(given: Any) -> Any:
    """An array as numbers of Python, in lists; anything else as it is."""
    if not isinstance(given, np.ndarray):
        return given
    return _number(given) if given.ndim == 0 else [listed(np.asarray(item, given.dtype)) for item in given]


def _number(array: np.ndarray) -> Any:
    value = array.item()
    return float(str(array)) if isinstance(value, float) else _value(value)  # 0.1, not 0.10000000149011612


# ---- operators on the host -------------------------------------------------------------------------------------------

_AS_THEY_ARE = frozenset(
    {
        "Add", "Sub", "Mul", "Gather", "Concat", "Slice", "Unsqueeze", "Squeeze", "Identity", "Split", "Where",
        "Shape", "Size",
    }
)  # fmt: skip
_OWN: Mapping[str, Callable[..., Any]] = {
    "Cast": lambda x: x,
    "Div": lambda a, b: a // b,
    "Equal": lambda a, b: np.asarray(a == b, bool),
    "ReduceProd": lambda x, axes=None, *, keepdims: np.prod(x, keepdims=bool(keepdims)),
    "Reshape": lambda x, shape: x.reshape(shape.tolist()),
}


def on_host(rows: Mapping[str, Function], place: Callable[[np.ndarray], Any]) -> dict[str, Function]:
    """Numpy's operators; what they cannot do with sizes that are not known is left to the rows of a table."""
    return {name: _either(name, function, rows.get(name), place) for name, function in Numpy.operators.items()}


def _either(name: str, function: Function, row: Function | None, place: Callable[[np.ndarray], Any]) -> Function:
    asked = {key for part in (function, row) if part is not None for key in keywords(part)}

    @functools.wraps(function)
    def call(*inputs: Any, **attributes: Any) -> Any:
        if not any(map(is_open, inputs)) or name in _AS_THEY_ARE:
            result = function(*inputs, **_asked(function, attributes))
            return np.array(result, object) if isinstance(result, Size) else result
        if name in _OWN and not ir.DataType(attributes.get("to", ir.DataType.INT64)).is_floating_point():
            result = _OWN[name](*inputs, **_asked(_OWN[name], attributes))
            return result if isinstance(result, np.ndarray) else np.array(result, object)
        if row is None:
            raise NotImplementedError("a size is not known")
        hosted = HOST_INPUTS.get(name, ())
        placed = (x if x is None or i in hosted else place(x) for i, x in enumerate(inputs))
        return row(*placed, **_asked(row, attributes))

    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("inputs", kinds[0]), *(inspect.Parameter(key, kinds[1]) for key in sorted(asked))]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _asked(function: Function, attributes: Mapping[str, Any]) -> dict[str, Any]:
    wanted = keywords(function)
    return {key: value for key, value in attributes.items() if key in wanted}
