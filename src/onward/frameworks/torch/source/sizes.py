"""Arithmetic with sizes, some of which are symbols of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onward.engines.framework import Function


def array_of(sizes: Any) -> np.ndarray:
    """Sizes as an array: of numbers, if all of them are."""
    made = np.empty(np.shape(sizes) if not isinstance(sizes, torch.SymInt) else (), object)
    made[...] = sizes
    return made.astype(np.int64) if all(isinstance(x, int) for x in made.flat) else made


def is_open(array: Any) -> bool:
    """Whether an array has symbols in it."""
    return isinstance(array, np.ndarray) and array.dtype == object and any(_is_symbol(x) for x in array.flat)


def _is_symbol(x: Any) -> bool:
    return isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool)


def _elementwise(function: Callable[..., Any]) -> Function:
    vectorized = np.frompyfunc(function, function.__code__.co_argcount, 1)
    return lambda *arrays: np.asarray(vectorized(*arrays), object)


def _numbers(array: np.ndarray, floating: bool) -> np.ndarray:
    convert = torch.sym_float if floating else torch.sym_int
    return np.asarray(np.frompyfunc(convert, 1, 1)(array), object)


def _quotient(x: Any, y: Any) -> Any:
    return x / y if any(isinstance(part, float | torch.SymFloat) for part in (x, y)) else x // y


OWN: dict[str, Function] = {
    "Cast": lambda x, *, to: _numbers(x, ir.DataType(to).is_floating_point()),
    "CastLike": lambda x, like: _numbers(x, like.dtype.is_floating_point),
    "Div": _elementwise(_quotient),
    "Mod": _elementwise(lambda x, y: x % y),
    "Neg": _elementwise(lambda x: -x),
    "Equal": _elementwise(lambda x, y: bool(x == y)),
}
"""Of arrays that hold symbols."""
