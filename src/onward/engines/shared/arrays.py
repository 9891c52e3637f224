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

    def __getattr__(self, name: str) -> Named:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(f"{self.name}.{name}")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return function_of(self, _namespace_of(inputs) or np)(*inputs, **options)


class _Names:
    def __getattr__(self, name: str) -> Named:
        return Named(name)


xp: Any = _Names()


def function_of(row: Any, namespace: Any) -> Any:
    """What a row is in a framework."""
    return operator.attrgetter(row.name)(namespace) if isinstance(row, Named) else row


_NAMESPACES: dict[type, Any] = {}


def register(namespace: Any, kinds: Iterable[type]) -> None:
    """Let functions of tensors of these types be those of a namespace."""
    _NAMESPACES.update(dict.fromkeys(kinds, namespace))
    _namespace.cache_clear()


@functools.cache
def _namespace(kind: type) -> Any:
    return next((namespace for base, namespace in _NAMESPACES.items() if issubclass(kind, base)), None)


def _namespace_of(inputs: Iterable[Any]) -> Any:
    for x in inputs:
        found = _namespace_of(x) if isinstance(x, list | tuple) else _namespace(type(x))
        if found is not None:
            return found
    return None


def dtype_of(number: int) -> np.dtype:
    """The type that an attribute names."""
    return ir.DataType(number).numpy()


def as_vector(values: Any, axis: int, rank: int) -> Any:
    """Numbers in a shape that has them along one of `rank` axes."""
    return values.reshape([-1 if i == axis % rank else 1 for i in range(rank)])
