"""Steps as lines of Python: expressions, and statements that name their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.frameworks.program.calls import Body, Loop, ProgramStep, Value, count_uses
from onward.frameworks.program.sizes import Extent
from onward.frameworks.program.source_text import number, quote

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

    def step(self, step: ProgramStep) -> Expression:
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


# ---- statements ------------------------------------------------------------------------------------------------------

WIDTH, DEEPEST = 88, 2
"""How long a line gets, and how many calls stand inside of one another, before a part of it gets a name."""
LETTERS = ("x", "y", "z", "u", "w", "a", "b", "c", "d", "e")


class FunctionWriter:
    """The lines of one function."""

    def __init__(
        self,
        steps: Sequence[ProgramStep],
        outputs: Sequence[Value],
        names: Mapping[Value, str],
        printer: Callable[[Callable[[Value], Expression]], Printer],
        place: Callable[[Value], Expression],
        *,
        taken: Iterable[str] = (),
        roles: Mapping[Value, str] | None = None,
        carried: Mapping[Value, str] | None = None,
    ):
        """`names` are those of inputs, and `place` says where everything else is that no call computes.

        No result is called as what is `taken`; `roles` are how some of them are best called. What is `carried` is not
        needed any more after its last reader.
        """
        self._steps = steps
        self._outputs = set(outputs)
        self._inputs = set(names)
        self._taken = {*names.values(), *taken}
        self._names = {**names, **(carried or {})}
        self._place = place
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
        """The expression for a value, once the lines before it are there."""
        if value in self._inline:
            return self._inline[value]
        return Expression(self._names[value]) if value in self._names else self._place(value)

    def _fresh(self, step: ProgramStep, value: Value) -> str:
        """A name: that of an operand which is not used any more, or a letter that is free."""
        number = self._at[step]
        held = {self._names[v] for v in self._names if self._last.get(v, -1) > number} | self._taken
        role = self._roles.get(value)
        if role is not None and role not in held:
            return role
        operands = [self._names[v] for v in self._operands(step) if v in self._names]
        reused = next((n for n in operands if n in LETTERS and n not in held), None)
        return reused or next(name for name in _letters() if name not in held)

    def _operands(self, step: ProgramStep) -> Iterator[Value]:
        """What a statement reads, also within the calls that stand in it."""
        for value in step.values():
            if value in self._inline and value.step is not None:
                yield from self._operands(value.step)
            else:
                yield value

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _statement(self, step: ProgramStep) -> Iterator[str]:
        if isinstance(step, Loop):
            yield from self._loop(step)
            return
        for argument, body in step.bodies.items():
            yield from self._function(step, argument, body)
        made = self._printer.step(step)
        if not step.results:
            yield made.text
            return
        if not step.is_tuple and self._stands_inside(step, made):
            self._inline[step.results[0]] = made
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
        yield f"{nested or listed} = {made.text}"

    def _loop(self, step: Loop) -> Iterator[str]:
        """A loop: what is carried has the same name before, in and after it."""
        names = []
        for value, result in zip(step.arguments, step.results, strict=True):
            is_free = value in self._names and value not in self._inputs and self._last[value] == self._at[step]
            name = self.name(value).text if is_free else self._fresh(step, result)
            if not is_free:
                yield f"{name} = {self.name(value).text}"
            self._names[result] = name
            names.append(name)
        held = {self._names[v] for v in self._names if self._last.get(v, -1) >= self._at[step]} - {*names}
        inner = FunctionWriter(
            step.steps,
            step.new * 2,
            {v: n for v, n in self._names.items() if v not in step.arguments and v not in step.results},
            self._make_printer,
            self._place,
            taken=self._taken | held,
            roles={**self._roles, **dict(zip(step.new, names, strict=True))},
            carried=dict(zip(step.inner, names, strict=True)),
        )
        lines = inner.lines()
        moved = [(n, m) for n, v in zip(names, step.new, strict=True) if (m := inner.name(v).text) != n]
        begin, end = step.numbers.start, step.numbers.stop
        yield f"for i in range({f'{begin}, ' if begin else ''}{end}):"
        yield from (f"    {line}" for line in lines)
        if moved:
            yield f"    {', '.join(n for n, _ in moved)} = {', '.join(m for _, m in moved)}"

    def _function(self, step: ProgramStep, argument: str, body: Body) -> Iterator[str]:
        """A function that the step is given, defined before it."""
        held = {self._names[v] for v in self._names if self._last.get(v, -1) >= self._at[step]} | self._taken
        named = itertools.chain([argument], (f"{argument}_{i}" for i in itertools.count(2)))
        name = next(name for name in named if name not in held)
        self._taken.add(name)
        step.named[argument] = Expression(name)
        free = (letter for letter in _letters() if letter not in held)
        names = dict(zip(body.arguments, free, strict=False))
        known, taken = {**self._names, **names}, self._taken | held
        inner = FunctionWriter(body.steps, body.outputs, known, self._make_printer, self._place, taken=taken)
        lines = inner.lines()
        results = ", ".join(inner.name(value).text for value in body.outputs)
        yield f"def {name}({', '.join(names.values())}):"
        yield from (f"    {line}" for line in [*lines, f"return [{results}]"])
        if body.after:
            yield body.after.format(name)

    def _keep(self, step: ProgramStep) -> None:
        """Let what a call reads keep its name until the line that the call stands in."""
        until = self._last[step.results[0]]
        for value in self._operands(step):
            self._last[value] = max(self._last.get(value, 0), until)

    def _stands_inside(self, step: ProgramStep, made: Expression) -> bool:
        """Whether a call goes into the one line that reads it: if that is the next, and stays short."""
        value = step.results[0]
        if self._uses.get(value) != 1 or made.depth >= DEEPEST + 1 or len(made.text) > WIDTH - 30:
            return False
        if value in self._outputs:
            return True
        reader = self._readers[value]
        if reader.bodies or isinstance(reader, Loop):
            return False
        between = self._steps[self._at[step] + 1 : self._at[reader]]
        if any(
            not self._inline.keys() >= {*other.results[:1]} and not self._will_go_inside(other, reader)
            for other in between
        ):
            return False
        self._inline[value] = made
        known = all(v in self._names or v in self._inline or v.step is None for v in reader.values())
        whole = self._printer.step(reader) if known else made
        del self._inline[value]
        return len(whole.text) <= WIDTH - 8 and whole.depth <= DEEPEST

    def _will_go_inside(self, step: ProgramStep, reader: ProgramStep) -> bool:
        return bool(step.results) and self._uses.get(step.results[0]) == 1 and step.results[0] in set(reader.values())


def _letters() -> Iterator[str]:
    return itertools.chain(LETTERS, (f"x{i}" for i in itertools.count(1)))
