"""Functions of PyTorch that insist on numbers of Python, with tensors in their place.

Each gets whether it works in place, and then what the function gets; NotImplemented where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def number(tensor: Tensor) -> Tensor:
    """A copy of a tensor of one element as a number, which Python has in double precision."""
    return tensor.reshape(()).to(torch.float64, copy=True)


def double(value: Any) -> Any:
    """A number of Python as a tensor: as an argument of an operator it would go through float32 on its way to ONNX."""
    return torch.tensor(value, dtype=torch.float64) if type(value) is float else value


def in_double(args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a function of which a tensor is in double precision, and so are numbers then."""
    if not any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in (*args, *kwargs.values())):
        return args, kwargs
    return tuple(map(double, args)), {key: double(x) for key, x in kwargs.items()}


def _as_factor(factor: Any, x: Any) -> Tensor | None:
    """A factor that has to be a tensor."""
    if isinstance(factor, Tensor):
        return factor
    is_wide = isinstance(x, Tensor) and x.dtype == torch.float64 and type(factor) is float
    return double(factor) if is_wide else None


def _sum(name: str) -> Callable[..., Any]:
    def compute(in_place: bool, x: Any, *args: Any, alpha: Any = 1, **kwargs: Any) -> Any:
        if len(args) == 2:  # as it was long ago: add(alpha, other)
            alpha, other = args
        else:
            other = args[0] if args else kwargs.get("other")
        factor = _as_factor(alpha, x)
        return NotImplemented if factor is None else _finish(name, in_place, x, other * factor)

    return compute


def _finish(name: str, in_place: bool, x: Tensor, *changes: Any) -> Tensor:
    result: Tensor = getattr(x, f"{name}_" if in_place else name)(*changes)
    return result


def _product_added(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def compute(in_place: bool, x: Any, *args: Any, value: Any = 1, **kwargs: Any) -> Any:
        if len(args) == 3:  # as it was long ago: addcmul(value, a, b)
            value, a, b = args
        else:
            a, b = (*args, *(kwargs[key] for key in ("tensor1", "tensor2") if key in kwargs))
        factor = _as_factor(value, x)
        return NotImplemented if factor is None else _finish("add", in_place, x, combine(a * factor, b))

    return compute


def _lerp(in_place: bool, x: Tensor, end: Tensor, weight: Any) -> Any:
    factor = _as_factor(weight, x)
    is_number = factor is not None and factor.ndim == 0
    return _finish("add", in_place, x, (end - x) * factor) if is_number else NotImplemented


def _matrix_added(in_place: bool, x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not isinstance(alpha, Tensor) and not isinstance(beta, Tensor):
        return NotImplemented
    result = x * beta + (a @ b) * alpha
    return x.copy_(result) if in_place else result


def _clamp(in_place: bool, x: Tensor, min: Any = None, max: Any = None) -> Any:
    if not isinstance(min, Tensor) and not isinstance(max, Tensor):
        whole = x.is_floating_point() and int in (type(min), type(max))  # with which the exporter has trouble
        limits = [float(limit) if whole and limit is not None else limit for limit in (min, max)]
        return _finish("clamp", in_place, x, *limits) if whole and x.dtype != torch.float64 else NotImplemented
    result = x
    for limit, function in ((min, torch.maximum), (max, torch.minimum)):
        if limit is not None:
            result = function(result, torch.as_tensor(limit, dtype=x.dtype))
    return x.copy_(result) if in_place else result


REWRITTEN: dict[str, Callable[..., Any]] = {
    "add": _sum("add"),
    "sub": _sum("sub"),
    "subtract": _sum("sub"),
    "addcmul": _product_added(lambda a, b: a * b),
    "addcdiv": _product_added(lambda a, b: a / b),
    "lerp": _lerp,
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _matrix_added),
    **dict.fromkeys(("clamp", "clip"), _clamp),
}
"""By name, without the underscore of those that work in place."""
