"""Calls as a person would write them: operators between operands, methods, indices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.printers import PythonPrinter

from onward.convert.program.literals import number
from onward.convert.program.names import quoted
from onward.convert.torch.source.program import LIVE, TRAINING, Step, Value, WhileTraining, defaults_of
from onward.errors import UnsupportedError

ATOM, POWER, UNARY, PRODUCT, SUM, BITS, COMPARISON, WIDE = 0, 1, 2, 3, 4, 5, 6, 7
"""How loosely the parts of an expression hold together."""


class Expression(NamedTuple):
    text: str
    looseness: int = ATOM
    depth: int = 0
    """How many calls are inside of one another."""

    def within(self, most: int) -> str:
        return f"({self.text})" if self.looseness > most else self.text


class Infix(NamedTuple):
    sign: str
    looseness: int
    swapped: bool = False


_BETWEEN = {
    "add": Infix("+", SUM),
    "sub": Infix("-", SUM),
    "__rsub__": Infix("-", SUM, True),
    "mul": Infix("*", PRODUCT),
    "div": Infix("/", PRODUCT),
    "__rtruediv__": Infix("/", PRODUCT, True),
    "__rdiv__": Infix("/", PRODUCT, True),
    "matmul": Infix("@", PRODUCT),
    "__pow__": Infix("**", POWER),
    "__and__": Infix("&", BITS),
    "__or__": Infix("|", BITS),
    "__eq__": Infix("==", COMPARISON),
    "eq": Infix("==", COMPARISON),
    "__ne__": Infix("!=", COMPARISON),
    "gt": Infix(">", COMPARISON),
    "ge": Infix(">=", COMPARISON),
    "lt": Infix("<", COMPARISON),
    "le": Infix("<=", COMPARISON),
}
_BEFORE = {"neg": "-", "__invert__": "~"}
_SPREAD = {"reshape", "permute", "expand", "repeat", "view", "flip"}
"""Methods that take sizes or axes one by one."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"F.gelu": {"approximate": "none"}}
"""Of functions that do not say so themselves."""
_PRODUCT = re.compile(r"(?<!\*)\*(?!\*)")
_TENSOR, _FUNCTIONAL = "torch.Tensor.", "torch.nn.functional."


class Printer:
    """Writes expressions, given how values are called."""

    def __init__(self, name: Callable[[Value], Expression], sizes: Mapping[str, str], device: str):
        self._name = name
        self._sizes = sizes
        self._device = device
        self.used_sizes: set[str] = set()
        """Symbols that were written."""

    def step(self, step: Step) -> Expression:
        method = step.function.removeprefix(_TENSOR)
        if step.function == "torch.where" and len(step.arguments) == 3:
            condition, x, y = step.arguments
            texts = [self.value(condition), self._operand(x, y), self._operand(y, x)]
            return Expression(f"torch.where({', '.join(t.text for t in texts)})", ATOM, 1 + max(t.depth for t in texts))
        if method == step.function:
            return self._call(_shortened(step.function), step.arguments, step.named, defaults_of(step.call))
        first, *rest = step.arguments
        if method.endswith(".__get__"):
            return self._after(first, f".{method.removesuffix('.__get__')}")
        if method in _BETWEEN and len(rest) == 1 and not step.named:
            return self._between(_BETWEEN[method], first, rest[0])
        if method in _BEFORE and not rest:
            return Expression(f"{_BEFORE[method]}{self.value(first).within(UNARY)}", UNARY, self.value(first).depth)
        if method == "__getitem__":
            places = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
            return self._after(first, f"[{', '.join(map(self._place, places))}]")
        if method == "select" and rest[0] >= 0:
            return self._after(first, f"[{', '.join([*[':'] * rest[0], self.value(rest[1]).text])}]")
        if method in _SPREAD and len(rest) == 1 and isinstance(rest[0], list | tuple):
            rest = list(rest[0])
        if method == "permute" and len(moved := [i for i, axis in enumerate(rest) if axis != i]) == 2:
            method, rest = "transpose", moved
        called = self._call(method, rest, step.named, defaults_of(step.call))
        return self._after(first, f".{called.text}", called.depth)

    def _after(self, first: Value, text: str, depth: int = 1) -> Expression:
        owner = self.value(first)
        return Expression(f"{owner.within(ATOM)}{text}", ATOM, max(owner.depth, depth))

    def _between(self, infix: Infix, first: Any, second: Any) -> Expression:
        left, right = (second, first) if infix.swapped else (first, second)
        x, y = self._operand(left, right), self._operand(right, left)
        leftmost = infix.looseness if infix.looseness in (PRODUCT, SUM, BITS) else infix.looseness - 1
        text = f"{x.within(leftmost)} {infix.sign} {y.within(infix.looseness - 1)}"
        return Expression(text, infix.looseness, max(x.depth, y.depth))

    def _operand(self, given: Any, other: Any) -> Expression:
        """A number in place of a tensor with one element, if the other operand has the axes and the type."""
        if isinstance(given, Value) and given.array is not None and isinstance(other, Value):
            one, whole = given.tensor, other.tensor
            usual = one.dtype in (torch.float32, torch.int64) and one.ndim == 0
            fits = given.array.size == 1 and one.ndim <= whole.ndim and one.dtype == whole.dtype
            if fits and (other.array is None or usual):
                return Expression(number(given.array.item()))
        return self.value(given)

    def _call(self, function: str, arguments: Any, named: Mapping[str, Any], defaults: Mapping[str, Any]) -> Expression:
        given = [self.value(argument) for argument in arguments]
        defaults = {**_DEFAULTS.get(function, {}), **defaults}
        by_name = {key: value for key, value in named.items() if key not in defaults or not _same(value, defaults[key])}
        parts = {key: self.value(value) for key, value in by_name.items()}
        texts = [*(part.text for part in given), *(f"{key}={part.text}" for key, part in parts.items())]
        depth = 1 + max((part.depth for part in (*given, *parts.values())), default=0)
        return Expression(f"{function}({', '.join(texts)})", ATOM, depth)

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def value(self, given: Any) -> Expression:
        """Anything that can be an argument."""
        if isinstance(given, Value):
            return self._name(given)
        if isinstance(given, torch.SymInt | torch.SymFloat):
            return self._formula(given.node.expr)
        if isinstance(given, WhileTraining):
            return Expression(f"{number(given.value)} if self.training else 0.0", WIDE)
        if isinstance(given, list | tuple):
            parts = [self.value(item) for item in given]
            inside = ", ".join(part.text for part in parts)
            text = f"[{inside}]" if isinstance(given, list) else f"({inside}{',' if len(parts) == 1 else ''})"
            return Expression(text, ATOM, max((part.depth for part in parts), default=0))
        if isinstance(given, torch.device):
            return Expression(self._device)
        if isinstance(given, bool | int | float | np.generic):
            return Expression(number(given))
        if given is None or given is Ellipsis or isinstance(given, str):
            return Expression("..." if given is Ellipsis else "None" if given is None else quoted(given))
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

    def _place(self, place: Any) -> str:
        if not isinstance(place, slice):
            return self.value(place).text
        start, stop, step = (
            "" if part is None or (part == empty and isinstance(part, int)) else self.value(part).text
            for part, empty in ((place.start, 0), (place.stop, None), (place.step, 1))
        )
        return f"{start}:{stop}{f':{step}' if step else ''}"


def _shortened(function: str) -> str:
    return f"F.{function.removeprefix(_FUNCTIONAL)}" if function.startswith(_FUNCTIONAL) else function


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, Value) and value == default
