"""Printers of calls as lines of Python: expressions, and statements that name their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.frameworks.program.calls import Body, LoopStep, ProgramStep, Value, count_uses
from onward.frameworks.program.sizes import Extent
from onward.frameworks.program.source_text import number, quote

ATOM, POWER, UNARY, PRODUCT, SUM, BITS, COMPARISON, WIDE = 0, 1, 2, 3, 4, 5, 6, 7
"""Precedence of expressions: larger numbers bind more loosely."""
SIGNS = {
    **dict.fromkeys(("+", "-"), SUM),
    **dict.fromkeys(("*", "/", "//", "%", "@"), PRODUCT),
    **dict.fromkeys(("&", "|", "^"), BITS),
    **dict.fromkeys(("==", "!=", ">", ">=", "<", "<="), COMPARISON),
    "**": POWER,
}
PREFIXES = {"neg": "-", "not": "~"}
_DEFAULTS = {"dilations": 1, "strides": 1, "pads": 0}


def is_idle(name: str, value: Any) -> bool:
    """True if an attribute of a window has its default and need not be passed."""
    return name in _DEFAULTS and isinstance(value, list | tuple) and {*value} == {_DEFAULTS[name]}


class Expression(NamedTuple):
    text: str
    looseness: int = ATOM
    depth: int = 0
    """Nesting depth of calls."""

    def within(self, most: int) -> str:
        return f"({self.text})" if self.looseness > most else self.text


class Printer:
    """Printer of expressions, given the names of values.

    A function that is a sign stands between its operands. One that begins with a dot is a method or
    an attribute of its first argument, and `[]` is an index. A subclass prints what is special to a
    framework.
    """

    special = "math"
    """Module that the program takes infinity from."""

    def __init__(self, name: Callable[[Value], Expression]):
        self._name = name

    def step(self, step: ProgramStep) -> Expression:
        function, arguments = step.function, step.arguments
        if function in SIGNS:
            return self.between(function, *arguments)
        if function == "=":
            return Expression(f"{self.value(arguments[0]).text} = {self.value(arguments[1]).text}", WIDE)
        if function in PREFIXES:
            operand = self.value(arguments[0])
            return Expression(f"{PREFIXES[function]}{operand.within(UNARY)}", UNARY, operand.depth)
        if function == "[]":
            return self.after(arguments[0], f"[{', '.join(map(self.place, arguments[1]))}]")
        if not function.startswith("."):
            called = self.call(function, arguments, step.named)
            return called if step.item is None else called._replace(text=f"{called.text}[{step.item}]")
        if function in (".T", ".shape"):
            return self.after(arguments[0], function)
        called = self.call(function, arguments[1:], step.named)
        return self.after(arguments[0], called.text, called.depth)

    def after(self, first: Value, text: str, depth: int = 1) -> Expression:
        owner = self.value(first)
        return Expression(f"{owner.within(ATOM)}{text}", ATOM, max(owner.depth, depth))

    def between(self, sign: str, left: Any, right: Any) -> Expression:
        looseness = SIGNS[sign]
        x, y = self.operand(left, right), self.operand(right, left)
        leftmost = looseness if looseness in (PRODUCT, SUM, BITS) else looseness - 1
        text = f"{x.within(leftmost)} {sign} {y.within(looseness - 1)}"
        return Expression(text, looseness, max(x.depth, y.depth))

    def operand(self, argument: Any, other: Any) -> Expression:
        """Return an operand of a sign. The other operand may determine the type of a number."""
        return self.value(argument)

    def call(self, function: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Expression:
        positional = [self.value(argument) for argument in arguments]
        keywords = {key: self.value(value) for key, value in named.items()}
        texts = [*(x.text for x in positional), *(f"{key}={x.text}" for key, x in keywords.items())]
        depth = 1 + max((x.depth for x in (*positional, *keywords.values())), default=0)
        return Expression(f"{function}({', '.join(texts)})", ATOM, depth)

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def value(self, argument: Any) -> Expression:
        if isinstance(argument, Value):
            return self._name(argument)
        if isinstance(argument, Expression):
            return argument
        if isinstance(argument, Extent):
            return self._size(*argument.parts)
        if isinstance(argument, list | tuple):
            items = [self.value(item) for item in argument]
            inside = ", ".join(item.text for item in items)
            text = f"[{inside}]" if isinstance(argument, list) else f"({inside}{',' if len(items) == 1 else ''})"
            return Expression(text, ATOM, max((item.depth for item in items), default=0))
        if isinstance(argument, bool | int | float | np.generic):
            return Expression(number(argument, self.special))
        if argument is None or argument is Ellipsis or isinstance(argument, str):
            return Expression("..." if argument is Ellipsis else "None" if argument is None else quote(argument))
        return self.other(argument)

    def _size(self, first: Any, *rest: Any) -> Expression:
        if isinstance(first, str):
            return self.between(first, *rest)
        return self.size(self.value(first), *rest) if rest else self.value(first)

    def size(self, x: Expression, axis: int) -> Expression:
        """Return the size of an axis as an expression."""
        return Expression(f"{x.within(ATOM)}.shape[{axis}]")

    def other(self, argument: Any) -> Expression:
        """Return an argument that only this framework has."""
        raise TypeError(f"a call has an argument of type {type(argument).__name__}")

    def place(self, index: Any) -> str:
        """Return an index or a slice as text."""
        if not isinstance(index, slice):
            return self.value(index).text
        start, stop, step = (
            "" if bound is None or (bound == empty and isinstance(bound, int)) else self.value(bound).text
            for bound, empty in ((index.start, 0), (index.stop, None), (index.step, 1))
        )
        return f"{start}:{stop}{f':{step}' if step else ''}"


# ---- statements ------------------------------------------------------------------------------------------------------

WIDTH, DEEPEST = 88, 2
"""Length of a line, and nesting depth of calls, above which a part of an expression gets a name."""
LETTERS = ("x", "y", "z", "u", "w", "a", "b", "c", "d", "e")


class FunctionWriter:
    """Lines of one function."""

    def __init__(
        self,
        steps: Sequence[ProgramStep],
        outputs: Sequence[Value],
        names: Mapping[Value, str],
        printer: Callable[[Callable[[Value], Expression]], Printer],
        stored: Callable[[Value], Expression],
        *,
        taken: Iterable[str] = (),
        roles: Mapping[Value, str] | None = None,
        carried: Mapping[Value, str] | None = None,
    ):
        """Take the names of inputs and the expressions of stored values.

        No result gets a name in `taken`; `roles` are preferred names of results. `carried` values
        are not needed after their last reader.
        """
        self._steps = steps
        self._outputs = set(outputs)
        self._inputs = set(names)
        self._taken = {*names.values(), *taken}
        self._names = {**names, **(carried or {})}
        self._place = stored
        self._roles = roles or {}
        self._inline: dict[Value, Expression] = {}
        self._at = {step: i for i, step in enumerate(steps)}
        self._readers = {value: step for step in steps for value in step.values()}
        self._last = {value: i for i, step in enumerate(steps) for value in step.values()}
        self._last |= dict.fromkeys(outputs, len(steps))
        self._uses = count_uses(steps, outputs)
        self._make_printer = printer
        self._printer = printer(self.name)

    def lines(self) -> list[str]:
        return [line for step in self._steps for line in self._statement(step)]

    # ---- names -------------------------------------------------------------------------------------------------------

    def name(self, value: Value) -> Expression:
        """Return the expression for a value, after the lines before it are written."""
        if value in self._inline:
            return self._inline[value]
        return Expression(self._names[value]) if value in self._names else self._place(value)

    def _fresh(self, step: ProgramStep, value: Value) -> str:
        """Return a name: that of an operand that is not read later, or a free letter."""
        number = self._at[step]
        is_read_again = isinstance(step, LoopStep)  # what a loop reads, its next iteration does
        used = self._used_names(number if is_read_again else number + 1) | self._taken
        role = self._roles.get(value)
        if role is not None and role not in used:
            return role
        operands = [self._names[v] for v in self._operands(step) if v in self._names]
        reused = next((n for n in operands if n in LETTERS and n not in used), None)
        return reused or next(name for name in _letters() if name not in used)

    def _used_names(self, position: int) -> set[str]:
        """Return the names of values that are read from this call on."""
        return {name for value, name in self._names.items() if self._last.get(value, -1) >= position}

    def _operands(self, step: ProgramStep) -> Iterator[Value]:
        """Yield what a statement reads, including the calls inlined in it."""
        for value in step.values():
            if value in self._inline and value.step is not None:
                yield from self._operands(value.step)
            else:
                yield value

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _statement(self, step: ProgramStep) -> Iterator[str]:
        if isinstance(step, LoopStep):
            yield from self._loop(step)
            return
        for argument, body in step.bodies.items():
            yield from self._function(step, argument, body)
        expression = self._printer.step(step)
        if not step.results:
            yield expression.text
            return
        if not step.is_tuple and self._stands_inside(step, expression):
            self._inline[step.results[0]] = expression
            self._keep(step)
            return
        targets = []
        for value in step.results:
            if value in self._last:
                name = self._fresh(step, value)
                self._names[value] = name
                targets.append(name)
            else:
                targets.append("_")
        for value in self._operands(step):
            if self._last.get(value) == self._at[step] and value not in self._inputs:
                self._names.pop(value, None)
        listed = f"{', '.join(targets)}{',' if step.is_tuple and len(targets) == 1 else ''}"
        nested = step.pattern.format(*targets).replace("(_, _)", "_")
        yield f"{nested or listed} = {expression.text}"

    def _loop(self, step: LoopStep) -> Iterator[str]:
        """Write a loop. A carried value has the same name before, in and after it."""
        names = []
        for value, result in zip(step.arguments, step.results, strict=True):
            is_free = value in self._names and value not in self._inputs and self._last[value] == self._at[step]
            name = self.name(value).text if is_free else self._fresh(step, result)
            if not is_free:
                yield f"{name} = {self.name(value).text}"
            self._names[result] = name
            names.append(name)
        used = self._used_names(self._at[step]) - {*names}
        inner = FunctionWriter(
            step.steps,
            step.new * 2,
            {v: n for v, n in self._names.items() if v not in step.arguments and v not in step.results},
            self._make_printer,
            self._place,
            taken=self._taken | used,
            roles={**self._roles, **dict(zip(step.new, names, strict=True))},
            carried=dict(zip(step.inner, names, strict=True)),
        )
        lines = inner.lines()
        moved = [(n, m) for n, v in zip(names, step.new, strict=True) if (m := inner.name(v).text) != n]
        begin, end = step.numbers.start, step.numbers.stop
        yield f"for block in {step.over}:" if step.over else f"for i in range({f'{begin}, ' if begin else ''}{end}):"
        yield from (f"    {line}" for line in lines)
        if moved:
            yield f"    {', '.join(n for n, _ in moved)} = {', '.join(m for _, m in moved)}"

    def _function(self, step: ProgramStep, argument: str, body: Body) -> Iterator[str]:
        """Define a function that the call takes as an argument."""
        used = self._used_names(self._at[step]) | self._taken
        candidates = itertools.chain([argument], (f"{argument}_{i}" for i in itertools.count(2)))
        name = next(name for name in candidates if name not in used)
        self._taken.add(name)
        step.named[argument] = Expression(name)
        free = (letter for letter in _letters() if letter not in used)
        arguments = dict(zip(body.arguments, free, strict=False))
        names_inside, taken = {**self._names, **arguments}, self._taken | used
        inner = FunctionWriter(body.steps, body.outputs, names_inside, self._make_printer, self._place, taken=taken)
        lines = inner.lines()
        results = ", ".join(inner.name(value).text for value in body.outputs)
        yield f"def {name}({', '.join(arguments.values())}):"
        yield from (f"    {line}" for line in [*lines, f"return [{results}]"])
        if body.after:
            yield body.after.format(name)

    def _keep(self, step: ProgramStep) -> None:
        """Extend the use of operands to the line in which their call is inlined."""
        until = self._last[step.results[0]]
        for value in self._operands(step):
            self._last[value] = max(self._last.get(value, 0), until)

    def _stands_inside(self, step: ProgramStep, expression: Expression) -> bool:
        """True if a call is inlined in its only reader: the next one, and short."""
        value = step.results[0]
        if self._uses.get(value) != 1 or expression.depth >= DEEPEST + 1 or len(expression.text) > WIDTH - 30:
            return False
        if value in self._outputs:
            return True
        reader = self._readers[value]
        if reader.bodies or isinstance(reader, LoopStep):
            return False
        read = set(reader.values())
        for other in self._steps[self._at[step] + 1 : self._at[reader]]:
            for first in other.results[:1]:
                if first not in self._inline and (self._uses.get(first) != 1 or first not in read):
                    return False
        self._inline[value] = expression
        is_printable = all(v in self._names or v in self._inline or v.step is None for v in reader.values())
        whole = self._printer.step(reader) if is_printable else expression
        del self._inline[value]
        return len(whole.text) <= WIDTH - 8 and whole.depth <= DEEPEST


def _letters() -> Iterator[str]:
    return itertools.chain(LETTERS, (f"x{i}" for i in itertools.count(1)))
