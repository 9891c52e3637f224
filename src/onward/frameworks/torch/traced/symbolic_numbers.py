"""Python numbers as tensors while a step is traced, so that changing numbers do not become constants.

An optimizer computes with Python numbers (`state["step"] += 1`, `lr * math.sqrt(1 - beta2 **
step)`) that a trace would not see. Under `Numbers` they are float64 scalars: `.item()` returns one,
and where PyTorch requires a number (`add_(g, alpha=-lr)`) the same is computed differently. Where
Python branches (`if step > 5:`), one branch is taken, and `Numbers` records the question so that
the other can be traced.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onward.errors import UnsupportedError
from onward.frameworks.torch.exporter import export_function
from onward.model import Model


def _double(value: Any) -> Any:
    """Return a Python float as a float64 tensor: a traced call would round it to float32."""
    return torch.tensor(value, dtype=torch.float64) if type(value) is float else value


def _as_factor(factor: Any, x: Any) -> Tensor | None:
    """Return a factor as a tensor if it must be one."""
    if isinstance(factor, Tensor):
        return factor
    is_wide = isinstance(x, Tensor) and x.dtype == torch.float64 and type(factor) is float
    return _double(factor) if is_wide else None


def _sum(name: str) -> Callable[..., Any]:
    def compute(in_place: bool, x: Any, *args: Any, alpha: Any = 1, **kwargs: Any) -> Any:
        if len(args) == 2:  # deprecated signature: add(alpha, other)
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
        if len(args) == 3:  # deprecated signature: addcmul(value, a, b)
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
        has_integer = x.is_floating_point() and int in (type(min), type(max))  # the exporter mishandles integers
        limits = [float(limit) if has_integer and limit is not None else limit for limit in (min, max)]
        return _finish("clamp", in_place, x, *limits) if has_integer and x.dtype != torch.float64 else NotImplemented
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
"""Rewritten functions by name, without the underscore of in-place ones."""


_SAME_NAME = (
    *("sqrt", "exp", "log2", "log10", "log1p", "expm1", "pow", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos"),
    *("asin", "atan", "atan2", "erf", "floor", "ceil", "trunc", "isnan", "isinf", "isfinite", "hypot", "copysign"),
)


@contextlib.contextmanager
def shadow_builtins(kind: type) -> Iterator[None]:
    """Let `math.sqrt`, `max`, `float` and others accept tensors in the modules of a class."""
    modules = [sys.modules[base.__module__] for base in kind.__mro__ if base.__module__ in sys.modules]
    with contextlib.ExitStack() as undo:
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


def _of_numbers(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Tensor) for x in args):
            return function(*(x.item() if isinstance(x, Tensor) else _double(float(x)) for x in args))
        return original(*args, **kwargs)

    return compute


def _log(x: Tensor, base: Tensor | None = None) -> Tensor:
    return torch.log(x) if base is None else torch.log(x) / torch.log(base)


def _extreme(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        items = list(args[0]) if len(args) == 1 and not isinstance(args[0], Tensor) else list(args)
        if kwargs or not any(isinstance(x, Tensor) for x in items):
            return original(items, **kwargs)
        return functools.reduce(function, (x.item() if isinstance(x, Tensor) else _double(float(x)) for x in items))

    return compute


class _Kind(type):
    """Metaclass of number types that include tensors."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.original)  # type: ignore[attr-defined]

    def __call__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return cls.of(args[0].item())  # type: ignore[attr-defined]
        return cls.original(*args)  # type: ignore[attr-defined]


class _Float(metaclass=_Kind):
    original, of = float, staticmethod(lambda x: x)


class _Int(metaclass=_Kind):
    original, of = int, staticmethod(torch.trunc)


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


_MOST_QUESTIONS = 6
_CONCRETE = {"__float__", "__int__", "__index__", "__complex__", "tolist", "numpy", "__array__", "__contains__"}
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "true_divide", "divide", "multiply", "subtract", "pow", "remainder", "floor_divide"),
    *("rsub", "rpow", "rdiv", "rtruediv", "rmul", "radd", "rfloordiv", "mod", "floordiv", "truediv", "fmod"),
    *("gt", "ge", "lt", "le", "eq", "ne", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where", "atan2"),
}
_FILLED = {"full_like": 1, "full": 1, "new_full": 2}
"""Functions that fill a tensor -> index of the number."""


class Question(NamedTuple):
    """Question of Python about a tensor."""

    key: object
    """Key that is equal for questions with the same answer."""
    condition: Tensor


class Numbers(TorchFunctionMode):  # type: ignore[misc]
    """Mode that computes with numbers as tensors, with `answers` to questions (default: yes)."""

    def __init__(
        self,
        inputs: Sequence[tuple[object, Tensor]],
        gradients: Sequence[tuple[Tensor, Tensor]],
        answers: Mapping[object, bool],
    ):
        super().__init__()
        self._gradients: dict[int, Any] = {id(parameter): gradient for parameter, gradient in gradients}
        self.asked: list[Question] = []
        self._answers = answers
        self._tensors = [tensor for _, tensor in inputs]  # so that their ids are not used again
        self._keys: dict[int, object] = {id(tensor): key for key, tensor in inputs}

    def key(self, value: Any) -> object:
        """Return how a number was computed from other numbers, else a unique key."""
        return self._keys.get(id(value), ("computed", id(value))) if isinstance(value, Tensor) else value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._called(func, args, kwargs)
        if isinstance(result, Tensor) and result.ndim == 0:
            self._remember(func, args, kwargs, result)
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if func == Tensor.data.__get__:  # writing to it writes to the tensor
            return args[0]
        if func == Tensor.grad.__get__:
            return self._gradients.get(id(args[0]))
        if func == Tensor.grad.__set__:
            self._gradients[id(args[0])] = args[1]
            return None
        if name == "item":
            return args[0].reshape(()).to(torch.float64, copy=True)
        if name == "__bool__":
            return self._decide(args[0])
        if name in _CONCRETE:
            raise UnsupportedError(
                f"a step converts a tensor to a Python number (`{name}`), which cannot be traced",
                hint="compute with tensors: `torch.sqrt(x)` in place of `numpy.sqrt(x)`",
            )
        if name.startswith("_foreach_"):
            return self._each(name, args, kwargs)
        if (rewritten := REWRITTEN.get(name.removesuffix("_"))) is not None:
            result = rewritten(name.endswith("_"), *args, **kwargs)
            if result is not NotImplemented:
                return result
        index = _FILLED.get(name, len(args))
        fill_value = args[index] if index < len(args) else kwargs.get("fill_value")
        if name in _FILLED and isinstance(fill_value, Tensor):
            others = {key: x for key, x in kwargs.items() if key != "fill_value"}
            return func(*args[:index], 0.0, **others) + fill_value
        if name in ("tensor", "as_tensor", "asarray", "scalar_tensor") and args and isinstance(args[0], Tensor):
            return args[0].clone().to(kwargs.get("dtype") or args[0].dtype)
        is_wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in (*args, *kwargs.values()))
        if is_wide and name.strip("_") in _ELEMENTWISE:
            return func(*map(_double, args), **{key: _double(x) for key, x in kwargs.items()})
        return func(*args, **kwargs)

    def _remember(self, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        """Record a number, so that numbers computed alike have the same key."""
        flat = [*args, *(argument for item in kwargs.items() for argument in item)]
        name = str(getattr(func, "__name__", func)).strip("_")
        is_plain = all(isinstance(x, Tensor | float | int | str | torch.dtype | None) for x in flat)
        has_source = name == "tensor" or any(isinstance(x, Tensor) for x in flat)  # not random or external
        is_known = is_plain and has_source and all(id(x) in self._keys for x in flat if isinstance(x, Tensor))
        key = (name, *(self._keys.get(id(x)) if isinstance(x, Tensor) else x for x in flat))
        self._tensors.append(result)
        self._keys.pop(id(result), None)
        if is_known:
            self._keys[id(result)] = key

    def _decide(self, condition: Tensor) -> bool:
        key = self._keys.get(id(condition), ("data", len(self.asked)))
        if all(question.key != key for question in self.asked):
            if len(self.asked) == _MOST_QUESTIONS:
                raise UnsupportedError(
                    f"a step branches on values of tensors more than {_MOST_QUESTIONS} times",
                    hint="choose by `torch.where`",
                )
            self.asked.append(Question(key, condition))
        return self._answers.get(key, True)

    def _each(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Apply a function of lists to one tensor after the other."""
        operation = name.removeprefix("_foreach_")
        single = torch.linalg.vector_norm if operation == "norm" else getattr(Tensor, operation)
        count = next(len(x) for x in args if isinstance(x, list | tuple))
        results = []
        for i in range(count):
            arguments = [x[i] if isinstance(x, list | tuple) else x for x in args]
            keywords = {key: x[i] if isinstance(x, list | tuple) else x for key, x in kwargs.items()}
            if operation.rstrip("_") in ("addcdiv", "addcmul") and len(arguments) == 4:
                keywords["value"] = arguments.pop()
            results.append(self.__torch_function__(single, (), tuple(arguments), keywords))
        return None if name.endswith("_") else results


def exported_update(update: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Model:
    """Return the graph of a function of tensors that computes with numbers as an optimizer does."""

    def computed(*tensors: Tensor) -> Any:
        with Numbers((), (), {}):
            return update(*tensors)

    return export_function(computed, inputs, "an update")
