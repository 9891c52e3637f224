"""Arithmetic with sizes, some of which are symbols: arrays of objects, where the interpreter has arrays of numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onward.engines.framework import Framework, Function, keywords
from onward.engines.host import HOST_INPUTS
from onward.engines.numpy import Numpy


def array_of(sizes: Any) -> np.ndarray:
    """Sizes as an array: of numbers, if all of them are."""
    made = np.empty(np.shape(sizes) if not isinstance(sizes, torch.SymInt) else (), object)
    made[...] = sizes
    return _plain(made)


def _plain(array: np.ndarray) -> np.ndarray:
    if array.dtype == object and all(isinstance(x, int) for x in array.flat):
        return array.astype(bool if array.size and all(isinstance(x, bool) for x in array.flat) else np.int64)
    return array


def is_open(array: Any) -> bool:
    """Whether an array has symbols in it."""
    return isinstance(array, np.ndarray) and array.dtype == object and any(_is_symbol(x) for x in array.flat)


def _is_symbol(x: Any) -> bool:
    return isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool)


def host_table(framework: Framework) -> dict[str, Function]:
    """What computes nodes whose inputs are on the host; where that needs to know all sizes, PyTorch does it."""
    return {name: _either(name, function, framework) for name, function in Numpy.operators.items()}


def _either(name: str, function: Function, framework: Framework) -> Function:
    symbolic = _SYMBOLIC.get(name) or _placing(name, framework)
    asked = [*keywords(function), *keywords(symbolic)]

    def call(*inputs: Any, **attributes: Any) -> Any:
        chosen = symbolic if any(map(is_open, inputs)) else function
        results = chosen(*inputs, **{key: attributes[key] for key in keywords(chosen) if key in attributes})
        if _is_symbol(results):  # numpy returns elements, where there are no axes
            return array_of(results)
        return _plain(results) if isinstance(results, np.ndarray) else results

    return asking(call, asked)


def _placing(name: str, framework: Framework) -> Function:
    """An operator of the framework, on tensors but for what it takes from the host."""
    function = framework.operators.get(name)
    if function is None:
        return lambda *inputs: NotImplemented
    host = HOST_INPUTS.get(name, ())

    def call(*inputs: Any, **attributes: Any) -> Any:
        return function(*(x if i in host else framework.place(x) for i, x in enumerate(inputs)), **attributes)

    return asking(call, keywords(function))


def asking(call: Function, asked: Iterable[str]) -> Function:
    """A function that asks for attributes by these names."""
    names = dict.fromkeys(asked)
    inputs = inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)
    by_name = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    call.__signature__ = inspect.Signature([inputs, *by_name])  # type: ignore[attr-defined]
    return call


def _elementwise(function: Callable[..., Any]) -> Function:
    vectorized = np.frompyfunc(function, function.__code__.co_argcount, 1)
    return lambda *arrays: np.asarray(vectorized(*arrays), object)


def _numbers(array: np.ndarray, floating: bool) -> np.ndarray:
    convert = torch.sym_float if floating else torch.sym_int
    return np.asarray(np.frompyfunc(convert, 1, 1)(array), object)


def _quotient(x: Any, y: Any) -> Any:
    return x / y if any(isinstance(part, float | torch.SymFloat) for part in (x, y)) else x // y


def _shape(x: np.ndarray, shape: np.ndarray, *, allowzero: int) -> np.ndarray:
    return x.reshape(shape.tolist())


def _slices(x: np.ndarray, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> np.ndarray:
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    at = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes, steps, strict=True):
        at[axis] = slice(start, end, step)
    return x[tuple(at)]


_SYMBOLIC: dict[str, Function] = {
    "Identity": lambda x: x,
    "Cast": lambda x, *, to: _numbers(x, ir.DataType(to).is_floating_point()),
    "CastLike": lambda x, like: _numbers(x, like.dtype.is_floating_point),
    "Add": _elementwise(lambda x, y: x + y),
    "Sub": _elementwise(lambda x, y: x - y),
    "Mul": _elementwise(lambda x, y: x * y),
    "Div": _elementwise(_quotient),
    "Mod": _elementwise(lambda x, y: x % y),
    "Neg": _elementwise(lambda x: -x),
    "Equal": _elementwise(lambda x, y: bool(x == y)),
    "Where": lambda condition, x, y: np.where(condition.astype(bool), x, y),
    "Gather": lambda x, indices, *, axis: np.take(x, indices.astype(np.int64), axis),
    "Concat": lambda *xs, axis: np.concatenate(xs, axis),
    "Slice": _slices,
    "Squeeze": lambda x, axes=None: x.squeeze(None if axes is None else tuple(axes.ravel().tolist())),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes.ravel().tolist())),
    "Reshape": _shape,
    "ReduceProd": lambda x, axes=None, *, keepdims: np.prod(x, keepdims=bool(keepdims)),
}
"""Of arrays that hold symbols."""
