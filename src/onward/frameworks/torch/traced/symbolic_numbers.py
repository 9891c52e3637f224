"""Python's numbers as tensors while a step is traced, so that nothing that changes becomes a constant of the graph.

An optimizer computes with numbers of Python (`state["step"] += 1`, `lr * math.sqrt(1 - beta2 ** step)`), which a trace
would not see. While `Numbers` is active they are float64 tensors without axes: `.item()` gives one, and where PyTorch
insists on a number (`add_(g, alpha=-lr)`) the same is computed otherwise. Where Python decides (`if step > 5:`), one
way is taken, and `Numbers` remembers the question, so that the other way can be traced too."""

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


_MOST_QUESTIONS = 6
_CONCRETE = {"__float__", "__int__", "__index__", "__complex__", "tolist", "numpy", "__array__", "__contains__"}
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "true_divide", "divide", "multiply", "subtract", "pow", "remainder", "floor_divide"),
    *("rsub", "rpow", "rdiv", "rtruediv", "rmul", "radd", "rfloordiv", "mod", "floordiv", "truediv", "fmod"),
    *("gt", "ge", "lt", "le", "eq", "ne", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where", "atan2"),
}
_FILLED = {"full_like": 1, "full": 1, "new_full": 2}
"""Functions that fill a tensor, and which argument is the number."""


class Question(NamedTuple):
    """What Python asked about a tensor."""

    key: object
    """Equal for questions that have the same answer."""
    condition: Tensor


class Numbers(TorchFunctionMode):  # type: ignore[misc]
    """Computes with numbers as tensors. `answers` says which way to go where Python asks; others are yes."""

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
        self._kept = [tensor for _, tensor in inputs]  # so that nothing else gets their ids
        self._keys: dict[int, object] = {id(tensor): key for key, tensor in inputs}

    def key(self, value: Any) -> object:
        """How a number was computed, if that was from numbers alone; else something that equals nothing else."""
        return self._keys.get(id(value), ("computed", id(value))) if isinstance(value, Tensor) else value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._called(func, args, kwargs)
        if isinstance(result, Tensor) and result.ndim == 0:
            self._remember(func, args, kwargs, result)
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if func == Tensor.data.__get__:  # what is written to it is written to the tensor
            return args[0]
        if func == Tensor.grad.__get__:
            return self._gradients.get(id(args[0]))
        if func == Tensor.grad.__set__:
            self._gradients[id(args[0])] = args[1]
            return None
        if name == "item":
            return number(args[0])
        if name == "__bool__":
            return self._decide(args[0])
        if name in _CONCRETE:
            raise UnsupportedError(
                f"a step makes a number of Python of a tensor (`{name}`), whose way from there cannot be followed",
                hint="compute with tensors: `torch.sqrt(x)` in place of `numpy.sqrt(x)`",
            )
        if name.startswith("_foreach_"):
            return self._each(name, args, kwargs)
        if (rewritten := REWRITTEN.get(name.removesuffix("_"))) is not None:
            found = rewritten(name.endswith("_"), *args, **kwargs)
            if found is not NotImplemented:
                return found
        place = _FILLED.get(name, len(args))  # of the number that a tensor is filled with
        value = args[place] if place < len(args) else kwargs.get("fill_value")
        if name in _FILLED and isinstance(value, Tensor):
            rest = {key: x for key, x in kwargs.items() if key != "fill_value"}
            return func(*args[:place], 0.0, **rest) + value
        if name in ("tensor", "as_tensor", "asarray", "scalar_tensor") and args and isinstance(args[0], Tensor):
            return args[0].clone().to(kwargs.get("dtype") or args[0].dtype)
        if name.strip("_") in _ELEMENTWISE:
            args, kwargs = in_double(args, kwargs)
        return func(*args, **kwargs)

    def _remember(self, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        """Two numbers that are computed alike from the same are the same."""
        flat = [*args, *(part for item in kwargs.items() for part in item)]
        name = str(getattr(func, "__name__", func)).strip("_")
        is_plain = all(isinstance(x, Tensor | float | int | str | torch.dtype | None) for x in flat)
        has_source = name == "tensor" or any(isinstance(x, Tensor) for x in flat)  # not random, not read from elsewhere
        is_known = is_plain and has_source and all(id(x) in self._keys for x in flat if isinstance(x, Tensor))
        key = (name, *(self._keys.get(id(x)) if isinstance(x, Tensor) else x for x in flat))
        self._kept.append(result)
        self._keys.pop(id(result), None)
        if is_known:
            self._keys[id(result)] = key

    def _decide(self, condition: Tensor) -> bool:
        key = self._keys.get(id(condition), ("data", len(self.asked)))
        if all(question.key != key for question in self.asked):
            if len(self.asked) == _MOST_QUESTIONS:
                raise UnsupportedError(
                    "a step decides by the values of tensors what to do, more often than can be followed",
                    hint="choose by `torch.where`",
                )
            self.asked.append(Question(key, condition))
        return self._answers.get(key, True)

    def _each(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """A function of lists, one tensor after the other."""
        plain = name.removeprefix("_foreach_")
        single = torch.linalg.vector_norm if plain == "norm" else getattr(Tensor, plain)
        count = next(len(x) for x in args if isinstance(x, list | tuple))
        results = []
        for i in range(count):
            own = [x[i] if isinstance(x, list | tuple) else x for x in args]
            named = {key: x[i] if isinstance(x, list | tuple) else x for key, x in kwargs.items()}
            if plain.rstrip("_") in ("addcdiv", "addcmul") and len(own) == 4:
                named["value"] = own.pop()
            results.append(self.__torch_function__(single, (), tuple(own), named))
        return None if name.endswith("_") else results


def exported_update(update: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Model:
    """The graph of a function of tensors, which computes with numbers as an optimizer does."""

    def computed(*tensors: Tensor) -> Any:
        with Numbers((), (), {}):
            return update(*tensors)

    return export_function(computed, inputs, "an update")
