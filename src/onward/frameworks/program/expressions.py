"""Calls as a person would write them: operators between operands, methods, indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.frameworks.program.calls import Step, Value
from onward.frameworks.program.literals import number
from onward.frameworks.program.names import quote
from onward.frameworks.program.sizes import Extent

ATOM, POWER, UNARY, PRODUCT, SUM, BITS, COMPARISON, WIDE = 0, 1, 2, 3, 4, 5, 6, 7
"""How loosely the parts of an expression hold together."""
SIGNS = {
    **dict.fromkeys(("+", "-"), SUM),
    **dict.fromkeys(("*", "/", "//", "%", "@"), PRODUCT),
    **dict.fromkeys(("&", "|", "^"), BITS),
    **dict.fromkeys(("==", "!=", ">", ">=", "<", "<="), COMPARISON),
    "**": POWER,
}
PREFIXES = {"neg": "-", "not": "~"}


_IDLE = {"dilations": 1, "strides": 1, "pads": 0}


def is_idle(name: str, value: Any) -> bool:
    """Whether an attribute of a window changes nothing: such need not be given."""
    return name in _IDLE and isinstance(value, list | tuple) and {*value} == {_IDLE[name]}


class Expression(NamedTuple):
    text: str
    looseness: int = ATOM
    depth: int = 0
    """How many calls are inside of one another."""

    def within(self, most: int) -> str:
        return f"({self.text})" if self.looseness > most else self.text


class Printer:
    """Writes expressions, given how values are called.

    A function that is a sign stands between its operands, one that begins with a dot is a method or an attribute of
    its first, and `[]` an index; what a framework calls otherwise it says in a class of its own.
    """

    special = "math"
    """The module that has infinity."""

    def __init__(self, name: Callable[[Value], Expression]):
        self._name = name

    def step(self, step: Step) -> Expression:
        function, given = step.function, step.arguments
        if function in SIGNS:
            return self.between(function, *given)
        if function == "=":
            return Expression(f"{self.value(given[0]).text} = {self.value(given[1]).text}", WIDE)
        if function in PREFIXES:
            operand = self.value(given[0])
            return Expression(f"{PREFIXES[function]}{operand.within(UNARY)}", UNARY, operand.depth)
        if function == "[]":
            return self.after(given[0], f"[{', '.join(map(self.place, given[1]))}]")
        if not function.startswith("."):
            called = self.call(function, given, step.named)
            return called if step.item is None else called._replace(text=f"{called.text}[{step.item}]")
        if function in (".T", ".shape"):
            return self.after(given[0], function)
        called = self.call(function, given[1:], step.named)
        return self.after(given[0], called.text, called.depth)

    def after(self, first: Value, text: str, depth: int = 1) -> Expression:
        owner = self.value(first)
        return Expression(f"{owner.within(ATOM)}{text}", ATOM, max(owner.depth, depth))

    def between(self, sign: str, left: Any, right: Any) -> Expression:
        looseness = SIGNS[sign]
        x, y = self.operand(left, right), self.operand(right, left)
        leftmost = looseness if looseness in (PRODUCT, SUM, BITS) else looseness - 1
        text = f"{x.within(leftmost)} {sign} {y.within(looseness - 1)}"
        return Expression(text, looseness, max(x.depth, y.depth))

    def operand(self, given: Any, other: Any) -> Expression:
        """What stands beside another operand, which may say the type of a number."""
        return self.value(given)

    def call(self, function: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Expression:
        given = [self.value(argument) for argument in arguments]
        parts = {key: self.value(value) for key, value in named.items()}
        texts = [*(part.text for part in given), *(f"{key}={part.text}" for key, part in parts.items())]
        depth = 1 + max((part.depth for part in (*given, *parts.values())), default=0)
        return Expression(f"{function}({', '.join(texts)})", ATOM, depth)

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def value(self, given: Any) -> Expression:
        """Anything that can be an argument."""
        if isinstance(given, Value):
            return self._name(given)
        if isinstance(given, Expression):
            return given
        if isinstance(given, Extent):
            return self._size(*given.parts)
        if isinstance(given, list | tuple):
            parts = [self.value(item) for item in given]
            inside = ", ".join(part.text for part in parts)
            text = f"[{inside}]" if isinstance(given, list) else f"({inside}{',' if len(parts) == 1 else ''})"
            return Expression(text, ATOM, max((part.depth for part in parts), default=0))
        if isinstance(given, bool | int | float | np.generic):
            return Expression(number(given, self.special))
        if given is None or given is Ellipsis or isinstance(given, str):
            return Expression("..." if given is Ellipsis else "None" if given is None else quote(given))
        return self.other(given)

    def _size(self, first: Any, *rest: Any) -> Expression:
        if isinstance(first, str):
            return self.between(first, *rest)
        return self.size(self.value(first), *rest) if rest else self.value(first)

    def size(self, x: Expression, axis: int) -> Expression:
        """How long an axis is."""
        return Expression(f"{x.within(ATOM)}.shape[{axis}]")

    def other(self, given: Any) -> Expression:
        """An argument that only this framework has."""
        raise TypeError(f"a {type(given).__name__} is an argument")

    def place(self, place: Any) -> str:
        """An index, or a slice."""
        if not isinstance(place, slice):
            return self.value(place).text
        start, stop, step = (
            "" if part is None or (part == empty and isinstance(part, int)) else self.value(part).text
            for part, empty in ((place.start, 0), (place.stop, None), (place.step, 1))
        )
        return f"{start}:{stop}{f':{step}' if step else ''}"
