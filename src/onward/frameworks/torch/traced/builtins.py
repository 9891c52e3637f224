"""What Python's own functions do to numbers, for the modules that an optimizer is written in, while it is traced.

`item()` is then a tensor, too: see `numbers`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onward.frameworks.torch.traced.rewritten_functions import double

_SAME_NAME = (
    *("sqrt", "exp", "log2", "log10", "log1p", "expm1", "pow", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos"),
    *("asin", "atan", "atan2", "erf", "floor", "ceil", "trunc", "isnan", "isinf", "isfinite", "hypot", "copysign"),
)


@contextlib.contextmanager
def shadow_builtins(kind: type) -> Iterator[None]:
    """Let `math.sqrt`, `max`, `float` and the like take tensors in the modules that a class is written in."""
    modules = [sys.modules[base.__module__] for base in kind.__mro__ if base.__module__ in sys.modules]
    undo = contextlib.ExitStack()
    with undo:
        for module in dict.fromkeys(modules):
            if module is not builtins:
                _shadow(vars(module), undo)
        yield


def _shadow(names: dict[str, Any], undo: contextlib.ExitStack) -> None:
    functions = {getattr(math, name): function for name, function in _MATH.items()}
    changes: dict[str, Any] = {name: new for name, new in _BUILTINS.items() if name not in names}
    for name, value in names.items():
        if value is math:
            changes[name] = types.SimpleNamespace(**{**vars(math), **_MATH})
        elif isinstance(value, types.BuiltinFunctionType) and value in functions:
            changes[name] = functions[value]
    for name, new in changes.items():
        undo.callback(names.__setitem__, name, names[name]) if name in names else undo.callback(names.pop, name)
        names[name] = new


def _of_numbers(given: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(given)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Tensor) for x in args):
            return function(*(x.item() if isinstance(x, Tensor) else double(float(x)) for x in args))
        return given(*args, **kwargs)

    return compute


def _log(x: Tensor, base: Tensor | None = None) -> Tensor:
    return torch.log(x) if base is None else torch.log(x) / torch.log(base)


def _extreme(given: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        items = list(args[0]) if len(args) == 1 and not isinstance(args[0], Tensor) else list(args)
        if kwargs or not any(isinstance(x, Tensor) for x in items):
            return given(items, **kwargs)
        return functools.reduce(function, (x.item() if isinstance(x, Tensor) else double(float(x)) for x in items))

    return compute


class _Kind(type):
    """A type of numbers that tensors in the place of numbers belong to."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.given)  # type: ignore[attr-defined]

    def __call__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return cls.of(args[0].item())  # type: ignore[attr-defined]
        return cls.given(*args)  # type: ignore[attr-defined]


class _Float(metaclass=_Kind):
    given, of = float, staticmethod(lambda x: x)


class _Int(metaclass=_Kind):
    given, of = int, staticmethod(torch.trunc)


_MATH = {
    **{name: _of_numbers(getattr(math, name), getattr(torch, name)) for name in _SAME_NAME},
    "log": _of_numbers(math.log, _log),
    "fabs": _of_numbers(math.fabs, torch.abs),
}
_BUILTINS = {
    "max": _extreme(max, torch.maximum),
    "min": _extreme(min, torch.minimum),
    "float": _Float,
    "int": _Int,
}
