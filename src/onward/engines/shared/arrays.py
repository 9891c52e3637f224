"""Functions that frameworks have under numpy's names, for rows that are written once.

`xp.where(condition, a, b)` is the function of the framework whose tensors it is given, or numpy's if there are none. A
row that is nothing else, as `Abs=xp.abs`, becomes that function itself when a table is made of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir


class Named:
    """A function of any framework, by its name."""

    def __init__(self, name: str):
        self.name = name
        self._functions: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Named:
        if name.startswith("__"):
            raise AttributeError(name)
        found = Named(f"{self.name}.{name}" if self.name else name)
        setattr(self, name, found)
        return found

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        namespace = _namespace_of(inputs) or np
        function = self._functions.get(id(namespace))
        if function is None:
            function = self._functions[id(namespace)] = function_of(self, namespace)
        return function(*inputs, **options)


xp: Any = Named("")


def function_of(row: Any, namespace: Any) -> Any:
    """What a row is in a framework."""
    return operator.attrgetter(row.name)(namespace) if isinstance(row, Named) else row


_NAMESPACES: dict[type, Any] = {}


def register(namespace: Any, kinds: Iterable[type]) -> None:
    """Let functions of tensors of these types be those of a namespace."""
    _NAMESPACES.update(dict.fromkeys(kinds, namespace))
    _namespace.cache_clear()


def _namespace_of(inputs: Iterable[Any]) -> Any:
    for x in inputs:
        found = _namespace_of(x) if isinstance(x, list | tuple) else _namespace(x.__class__)
        if found is not None:
            return found
    return None


@functools.cache
def _namespace(kind: type) -> Any:
    """Return the functions for tensors of a type; None if it is no tensor of a framework."""
    return next((namespace for base, namespace in _NAMESPACES.items() if issubclass(kind, base)), None)


def dtype_of(number: int) -> np.dtype:
    """The type that an attribute names."""
    return ir.DataType(number).numpy()


def is_float(dtype: np.dtype) -> bool:
    """Whether a type is one of floats, of numpy's own or of narrower ones."""
    return "float" in dtype.name


def place_along(vector: Any, axis: int, rank: int) -> Any:
    """A vector in a shape that has it along one of `rank` axes."""
    return vector.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def per_channel(vector: Any, x: Any) -> Any:
    """One number for each channel of an image, in a shape that broadcasts with it."""
    return vector.reshape(-1, *[1] * (x.ndim - 2))


def add_bias(y: Any, bias: Any) -> Any:
    """An image, with a number for each channel added if there are such."""
    return y if bias is None else y + per_channel(bias, y)
