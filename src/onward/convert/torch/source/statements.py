"""The body of `forward`: which calls stand inside of others, and how the rest is called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from onward.convert.program.names import Identifiers, quoted
from onward.convert.torch.source.expressions import Expression, Printer
from onward.convert.torch.source.program import Step, Value
from onward.convert.torch.source.tracing import Program

WIDTH, DEEPEST = 88, 2
"""How long a line gets, and how many calls stand inside of one another, before a part of it gets a name."""

_LETTERS = ("x", "y", "z", "u", "w", "a", "b", "c", "d", "e")
_ROLES = {"torch.nn.functional.scaled_dot_product_attention": ("q", "k", "v", "mask")}
"""What arguments of functions are usually called."""


def statements(program: Program, place: Callable[[Value], str]) -> Iterator[str]:
    """Lines of Python. `place` says where the module holds a parameter, a buffer or a constant."""
    yield from _Writer(program, place).lines()


class _Writer:
    def __init__(self, program: Program, place: Callable[[Value], str]):
        self._program = program
        self._place = place
        self._arguments = argument_names(program)
        self._names: dict[Value, str] = dict(zip(program.inputs, self._arguments, strict=True))
        self._inline: dict[Value, Expression] = {}
        self._at = {step: i for i, step in enumerate(program.steps)}
        self._readers = {value: step for step in program.steps for value in step.values()}
        self._last = _last_uses(program)
        self._uses = _count_uses(program)
        sizes = _size_names(program, self._arguments)
        device = f"{self._arguments[0]}.device" if self._arguments else '"cpu"'
        self._printer = Printer(self._named, sizes, device)
        self._sizes = sizes
        self._roles = _roles(program)

    def lines(self) -> Iterator[str]:
        body = [line for step in self._program.steps for line in self._statement(step)]
        result = self._return()
        yield from self._size_lines()
        yield from (*body, result)

    # ---- names -------------------------------------------------------------------------------------------------------

    def _named(self, value: Value) -> Expression:
        if value in self._inline:
            return self._inline[value]
        return Expression(self._names[value] if value in self._names else self._place(value))

    def _fresh(self, step: Step, value: Value) -> str:
        """A name: that of an operand which is not used any more, or a letter that is free."""
        number = self._at[step]
        held = {self._names[v] for v in self._names if self._last.get(v, -1) > number} | set(self._arguments)
        held |= set(self._sizes.values())
        role = self._roles.get(value)
        if role is not None and role not in held:
            return role
        operands = [self._names[v] for v in self._operands(step) if v in self._names]
        reused = next((n for n in operands if n in _LETTERS and n not in held), None)
        letters = itertools.chain(_LETTERS, (f"x{i}" for i in itertools.count(1)))
        return reused or next(name for name in letters if name not in held)

    def _operands(self, step: Step) -> Iterator[Value]:
        """What a statement reads, also within the calls that stand in it."""
        for value in step.values():
            if value in self._inline and value.step is not None:
                yield from self._operands(value.step)
            else:
                yield value

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _statement(self, step: Step) -> Iterator[str]:
        made = self._printer.step(step)
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
            if self._last.get(value) == self._at[step] and value not in self._program.inputs:
                self._names.pop(value, None)
        listed = f"{', '.join(targets)}{',' if step.is_tuple and len(targets) == 1 else ''}"
        nested = step.pattern.format(*targets).replace("(_, _)", "_")
        yield f"{nested or listed} = {made.text}"

    def _keep(self, step: Step) -> None:
        """Let what a call reads keep its name until the line that the call stands in."""
        until = self._last[step.results[0]]
        for value in self._operands(step):
            self._last[value] = max(self._last.get(value, 0), until)

    def _stands_inside(self, step: Step, made: Expression) -> bool:
        """Whether a call goes into the one line that reads it: if that is the next, and stays short."""
        value = step.results[0]
        if self._uses.get(value) != 1 or made.depth >= DEEPEST + 1 or len(made.text) > WIDTH - 30:
            return False
        if value in self._program.outputs.values():
            return True
        reader = self._readers[value]
        between = self._program.steps[self._at[step] + 1 : self._at[reader]]
        if any(other.results[0] not in self._inline and not self._will_go_inside(other, reader) for other in between):
            return False
        self._inline[value] = made
        known = all(v in self._names or v in self._inline or v.step is None for v in reader.values())
        whole = self._printer.step(reader) if known else made
        del self._inline[value]
        return len(whole.text) <= WIDTH - 8 and whole.depth <= DEEPEST

    def _will_go_inside(self, step: Step, reader: Step) -> bool:
        return self._uses.get(step.results[0]) == 1 and step.results[0] in set(reader.values())

    def _return(self) -> str:
        results = {name: self._named(value).text for name, value in self._program.outputs.items()}
        if len(results) == 1:
            return f"return {next(iter(results.values()))}"
        return f"return {{{', '.join(f'{quoted(name)}: {text}' for name, text in results.items())}}}"

    def _size_lines(self) -> Iterator[str]:
        """Sizes that formulas use, read from the inputs."""
        left = {symbol: name for symbol, name in self._sizes.items() if symbol in self._printer.used_sizes}
        for value, argument in zip(self._program.inputs, self._arguments, strict=True):
            symbols = [str(size) for size in value.tensor.shape]
            if (
                len(symbols) > 1
                and symbols
                and all(symbol in left for symbol in symbols)
                and len(set(symbols)) == len(symbols)
            ):
                yield f"{', '.join(left.pop(symbol) for symbol in symbols)} = {argument}.shape"
            for axis, symbol in enumerate(symbols):
                if symbol in left:
                    yield f"{left.pop(symbol)} = {argument}.shape[{axis}]"


# ---- names -----------------------------------------------------------------------------------------------------------


def argument_names(program: Program) -> list[str]:
    """What `forward` calls the inputs of the graph."""
    names = Identifiers(MENTIONED)
    return [names.like(value.name) for value in program.inputs]


MENTIONED = ("torch", "nn", "F", "math", "Tensor", "population_batch_norm")
"""What `forward` reads of what the file imports and defines."""


def _size_names(program: Program, taken: list[str]) -> dict[str, str]:
    names = Identifiers([*MENTIONED, *taken, *_LETTERS])
    return {symbol: names.like(name) for symbol, name in program.sizes.items()}


def _roles(program: Program) -> dict[Value, str]:
    return {
        value: role
        for step in program.steps
        for value, role in zip(step.arguments, _ROLES.get(step.function, ()), strict=False)
        if isinstance(value, Value)
    }


# ---- uses ------------------------------------------------------------------------------------------------------------


def _last_uses(program: Program) -> dict[Value, int]:
    found = {value: i for i, step in enumerate(program.steps) for value in step.values()}
    return found | dict.fromkeys(program.outputs.values(), len(program.steps))


def _count_uses(program: Program) -> dict[Value, int]:
    counts: dict[Value, int] = {}
    for value in (*(v for step in program.steps for v in step.values()), *program.outputs.values()):
        counts[value] = counts.get(value, 0) + 1
    return counts
