"""Functions of frameworks under numpy's names, for shared rows.

`xp.where(condition, a, b)` calls the function of the framework whose tensors it gets, or numpy's
for arrays. A row such as `Abs=xp.abs` becomes the framework's function itself in a table.
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
        function = Named(f"{self.name}.{name}" if self.name else name)
        setattr(self, name, function)
        return function

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        namespace = _namespace_of(inputs) or np
        function = self._functions.get(id(namespace))
        if function is None:
            function = self._functions[id(namespace)] = function_of(self, namespace)
        return function(*inputs, **options)


xp: Any = Named("")


def function_of(row: Any, namespace: Any) -> Any:
    """Return a row as a function of a framework."""
    return operator.attrgetter(row.name)(namespace) if isinstance(row, Named) else row


_NAMESPACES: dict[type, Any] = {}


def register(namespace: Any, kinds: Iterable[type]) -> None:
    """Map tensor types to the namespace of their functions."""
    _NAMESPACES.update(dict.fromkeys(kinds, namespace))
    _namespace.cache_clear()


def _namespace_of(inputs: Iterable[Any]) -> Any:
    for x in inputs:
        namespace = _namespace_of(x) if isinstance(x, list | tuple) else _namespace(x.__class__)
        if namespace is not None:
            return namespace
    return None


@functools.cache
def _namespace(cls: type) -> Any:
    """Return the namespace of a tensor type, or None if it is not one."""
    return next((namespace for base, namespace in _NAMESPACES.items() if issubclass(cls, base)), None)


def dtype_of(number: int) -> np.dtype:
    """Return the type of an attribute."""
    return ir.DataType(number).numpy()


def is_float(dtype: np.dtype) -> bool:
    """True for floats, also for the narrow types of ml_dtypes."""
    return "float" in dtype.name


def place_along(vector: Any, axis: int, rank: int) -> Any:
    """Reshape a vector to lie along one of `rank` axes."""
    return vector.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def per_channel(vector: Any, x: Any) -> Any:
    """Reshape one number per channel to broadcast with an image."""
    return vector.reshape(-1, *[1] * (x.ndim - 2))


def add_bias(y: Any, bias: Any) -> Any:
    """Add one number per channel to an image, if there are any."""
    return y if bias is None else y + per_channel(bias, y)
