"""Calls as idiomatic Python: infix operators, methods, indices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.printers import PythonPrinter

from onward.errors import UnsupportedError
from onward.frameworks.program.calls import ProgramStep, Value
from onward.frameworks.program.printing import ATOM, SUM, UNARY, WIDE, Expression, Printer
from onward.frameworks.program.source_text import number
from onward.frameworks.torch.arguments import defaults_of
from onward.frameworks.torch.module import LIVE
from onward.frameworks.torch.program.recording import TRAINING, WhileTraining

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "__pow__": "**", "__and__": "&", "__or__": "|",
    "__eq__": "==", "eq": "==", "__ne__": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<=",
}  # fmt: skip
_SWAPPED = {"__rsub__": "-", "__rtruediv__": "/", "__rdiv__": "/"}
"""Methods of the right operand."""
_PREFIX = {"neg": "-", "__invert__": "~"}
_SPREAD = {"reshape", "permute", "expand", "repeat", "view", "flip"}
"""Methods that take sizes or axes as separate arguments."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"F.gelu": {"approximate": "none"}}
"""Defaults of functions without a signature."""
_PRODUCT = re.compile(r"(?<!\*)\*(?!\*)")
_TENSOR, _FUNCTIONAL = "torch.Tensor.", "torch.nn.functional."


class TorchPrinter(Printer):
    """Printer of calls of PyTorch, dynamic sizes and `self.training`."""

    def __init__(
        self, name: Callable[[Value], Expression], sizes: Mapping[str, str], device: str, used_sizes: set[str]
    ):
        """Take size names by symbol, and the device of the inputs; add printed symbols to `used_sizes`."""
        super().__init__(name)
        self._sizes = sizes
        self._device = device
        self._used_sizes = used_sizes

    def step(self, step: ProgramStep) -> Expression:
        method = step.function.removeprefix(_TENSOR)
        if step.function == "torch.where" and len(step.arguments) == 3:
            condition, x, y = step.arguments
            texts = [self.value(condition), self.operand(x, y), self.operand(y, x)]
            return Expression(f"torch.where({', '.join(t.text for t in texts)})", ATOM, 1 + max(t.depth for t in texts))
        if method == step.function:
            name, is_functional = step.function.removeprefix(_FUNCTIONAL), step.function.startswith(_FUNCTIONAL)
            return self._call(f"F.{name}" if is_functional else name, step.arguments, step)
        first, *rest = step.arguments
        if method.endswith(".__get__"):
            return self.after(first, f".{method.removesuffix('.__get__')}")
        if method in _INFIX and len(rest) == 1 and not step.named:
            return self.between(_INFIX[method], first, rest[0])
        if method in _SWAPPED and len(rest) == 1 and not step.named:
            return self.between(_SWAPPED[method], rest[0], first)
        if method in _PREFIX and not rest:
            return Expression(f"{_PREFIX[method]}{self.value(first).within(UNARY)}", UNARY, self.value(first).depth)
        if method == "__getitem__":
            places = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
            return self.after(first, f"[{', '.join(map(self.place, places))}]")
        if method == "select" and rest[0] >= 0:
            return self.after(first, f"[{', '.join([*[':'] * rest[0], self.value(rest[1]).text])}]")
        if method in _SPREAD and len(rest) == 1 and isinstance(rest[0], list | tuple):
            rest = list(rest[0])
        if method == "permute" and len(moved := [i for i, axis in enumerate(rest) if axis != i]) == 2:
            method, rest = "transpose", moved
        called = self._call(method, rest, step)
        return self.after(first, f".{called.text}", called.depth)

    def operand(self, argument: Any, other: Any) -> Expression:
        """Return an operand, as a number if it is a constant of one element and the result is the same."""
        if isinstance(argument, Value) and argument.array is not None and isinstance(other, Value):
            constant, tensor = argument.tensor, other.tensor
            fits = argument.array.size == 1 and constant.ndim <= tensor.ndim and constant.dtype == tensor.dtype
            is_default = constant.dtype in (torch.float32, torch.int64) and constant.ndim == 0
            if fits and (other.array is None or is_default):
                return Expression(number(argument.array.item()))
        return self.value(argument)

    def _call(self, function: str, arguments: Sequence[Any], step: ProgramStep) -> Expression:
        """Return a call without arguments that have their defaults."""
        defaults = {**_DEFAULTS.get(function, {}), **defaults_of(step.call)}
        named = {k: value for k, value in step.named.items() if k not in defaults or not _same(value, defaults[k])}
        return self.call(function, arguments, named)

    def other(self, argument: Any) -> Expression:
        if isinstance(argument, torch.SymInt | torch.SymFloat):
            return self._formula(argument.node.expr)
        if isinstance(argument, WhileTraining):
            return Expression(f"{number(argument.value)} if self.training else 0.0", WIDE)
        if isinstance(argument, torch.device):
            return Expression(self._device)
        if isinstance(argument, torch.dtype | torch.memory_format):
            return Expression(str(argument))
        if argument is TRAINING:
            return Expression("self.training")
        raise UnsupportedError(f"a call has an argument of type {type(argument).__name__}", hint=LIVE)

    def _formula(self, formula: sympy.Expr) -> Expression:
        names = {}
        for symbol in sorted(formula.free_symbols, key=str):
            if str(symbol) not in self._sizes:
                raise UnsupportedError("the shapes of some tensors depend on values", hint=LIVE)
            self._used_sizes.add(str(symbol))
            names[symbol] = sympy.Symbol(self._sizes[str(symbol)], integer=True, positive=True)
        text = _PRODUCT.sub(" * ", PythonPrinter().doprint(formula.xreplace(names)))
        return Expression(text, ATOM if formula.is_Symbol else SUM)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, Value) and value == default
