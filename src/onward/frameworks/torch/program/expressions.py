"""Calls as a person would write them: operators between operands, methods, indices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.printers import PythonPrinter

from onward.errors import UnsupportedError
from onward.frameworks.program.calls import ProgramStep, Value
from onward.frameworks.program.printing import ATOM, SUM, UNARY, WIDE, Expression, Printer
from onward.frameworks.program.source_text import number
from onward.frameworks.torch.forward import LIVE
from onward.frameworks.torch.program.recording import TRAINING, WhileTraining, defaults_of


class Infix(NamedTuple):
    sign: str
    swapped: bool = False


_BETWEEN = {
    "add": Infix("+"),
    "sub": Infix("-"),
    "__rsub__": Infix("-", True),
    "mul": Infix("*"),
    "div": Infix("/"),
    "__rtruediv__": Infix("/", True),
    "__rdiv__": Infix("/", True),
    "matmul": Infix("@"),
    "__pow__": Infix("**"),
    "__and__": Infix("&"),
    "__or__": Infix("|"),
    "__eq__": Infix("=="),
    "eq": Infix("=="),
    "__ne__": Infix("!="),
    "gt": Infix(">"),
    "ge": Infix(">="),
    "lt": Infix("<"),
    "le": Infix("<="),
}
_BEFORE = {"neg": "-", "__invert__": "~"}
_SPREAD = {"reshape", "permute", "expand", "repeat", "view", "flip"}
"""Methods that take sizes or axes one by one."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"F.gelu": {"approximate": "none"}}
"""Of functions that do not say so themselves."""
_PRODUCT = re.compile(r"(?<!\*)\*(?!\*)")
_TENSOR, _FUNCTIONAL = "torch.Tensor.", "torch.nn.functional."


class TorchPrinter(Printer):
    """Functions and methods of PyTorch, sizes that vary, and whether the module is in training."""

    def __init__(self, name: Callable[[Value], Expression], sizes: Mapping[str, str], device: str):
        super().__init__(name)
        self._sizes = sizes
        self._device = device
        self.used_sizes: set[str] = set()
        """Symbols that were written."""

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
        if method in _BETWEEN and len(rest) == 1 and not step.named:
            sign, is_swapped = _BETWEEN[method]
            return self.between(sign, *((rest[0], first) if is_swapped else (first, rest[0])))
        if method in _BEFORE and not rest:
            return Expression(f"{_BEFORE[method]}{self.value(first).within(UNARY)}", UNARY, self.value(first).depth)
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

    def operand(self, given: Any, other: Any) -> Expression:
        """A number in place of a tensor with one element, if the other operand has the axes and the type."""
        if isinstance(given, Value) and given.array is not None and isinstance(other, Value):
            one, whole = given.tensor, other.tensor
            usual = one.dtype in (torch.float32, torch.int64) and one.ndim == 0
            fits = given.array.size == 1 and one.ndim <= whole.ndim and one.dtype == whole.dtype
            if fits and (other.array is None or usual):
                return Expression(number(given.array.item()))
        return self.value(given)

    def _call(self, function: str, arguments: Sequence[Any], step: ProgramStep) -> Expression:
        """Without arguments that are what they would be anyway."""
        defaults = {**_DEFAULTS.get(function, {}), **defaults_of(step.call)}
        named = {k: value for k, value in step.named.items() if k not in defaults or not _same(value, defaults[k])}
        return self.call(function, arguments, named)

    def other(self, given: Any) -> Expression:
        if isinstance(given, torch.SymInt | torch.SymFloat):
            return self._formula(given.node.expr)
        if isinstance(given, WhileTraining):
            return Expression(f"{number(given.value)} if self.training else 0.0", WIDE)
        if isinstance(given, torch.device):
            return Expression(self._device)
        if isinstance(given, torch.dtype | torch.memory_format):
            return Expression(str(given))
        if given is TRAINING:
            return Expression("self.training")
        raise UnsupportedError(f"a {type(given).__name__} is an argument", hint=LIVE)

    def _formula(self, formula: sympy.Expr) -> Expression:
        names = {}
        for symbol in sorted(formula.free_symbols, key=str):
            if str(symbol) not in self._sizes:
                raise UnsupportedError("the sizes of some tensors depend on values", hint=LIVE)
            self.used_sizes.add(str(symbol))
            names[symbol] = sympy.Symbol(self._sizes[str(symbol)], integer=True, positive=True)
        text = _PRODUCT.sub(" * ", PythonPrinter().doprint(formula.xreplace(names)))
        return Expression(text, ATOM if formula.is_Symbol else SUM)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, Value) and value == default
