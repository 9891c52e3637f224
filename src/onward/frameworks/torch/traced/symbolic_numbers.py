"""Python's numbers as tensors while a step is traced, so that nothing that changes becomes a constant of the graph.

An optimizer computes with numbers of Python (`state["step"] += 1`, `lr * math.sqrt(1 - beta2 ** step)`), which a trace
would not see. While `Numbers` is active they are float64 tensors without axes: `.item()` gives one, and where PyTorch
insists on a number (`add_(g, alpha=-lr)`) the same is computed otherwise. Where Python decides (`if step > 5:`), one
way is taken, and `Numbers` remembers the question, so that the other way can be traced too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onward.errors import UnsupportedError
from onward.frameworks.torch.exporter import export_function
from onward.frameworks.torch.traced.rewritten_functions import REWRITTEN, in_double, number
from onward.model import Model

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
        if (value := _filling(name, args, kwargs)) is not None:
            rest = {key: x for key, x in kwargs.items() if key != "fill_value"}
            return func(*args[: _FILLED[name]], 0.0, **rest) + value
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


def _filling(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The number that a tensor is to be filled with, where that is a tensor itself."""
    place = _FILLED.get(name)
    if place is None:
        return None
    value = args[place] if place < len(args) else kwargs.get("fill_value")
    return value if isinstance(value, Tensor) else None


def exported_update(update: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Model:
    """The graph of a function of tensors, which computes with numbers as an optimizer does."""

    def computed(*tensors: Tensor) -> Any:
        with Numbers((), (), {}):
            return update(*tensors)

    return export_function(computed, inputs, "an update")
