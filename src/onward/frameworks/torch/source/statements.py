"""The body of `forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onward.frameworks.program.calls import Value
from onward.frameworks.program.expressions import Expression
from onward.frameworks.program.names import Identifiers, quote
from onward.frameworks.program.statements import LETTERS, Statements
from onward.frameworks.torch.source.expressions import TorchPrinter
from onward.frameworks.torch.source.tracing import Program

_ROLES = {"torch.nn.functional.scaled_dot_product_attention": ("q", "k", "v", "mask")}
"""What arguments of functions are usually called."""


def forward_lines(program: Program, place: Callable[[Value], str]) -> Iterator[str]:
    """The body of `forward`. `place` says where the module holds a parameter, a buffer or a constant."""
    arguments = argument_names(program)
    sizes = _size_names(program, arguments)
    device = f"{arguments[0]}.device" if arguments else '"cpu"'
    printers: list[TorchPrinter] = []

    def printer(name: Callable[[Value], Expression]) -> TorchPrinter:
        printers.append(TorchPrinter(name, sizes, device))
        return printers[0]

    written = Statements(
        program.steps,
        list(program.outputs.values()),
        dict(zip(program.inputs, arguments, strict=True)),
        printer,
        lambda value: Expression(place(value)),
        taken=sizes.values(),
        roles=_roles(program),
    )
    body = written.lines()
    results = {name: written.name(value).text for name, value in program.outputs.items()}
    whole = ", ".join(f"{quote(name)}: {text}" for name, text in results.items())
    yield from _size_lines(program, {s: name for s, name in sizes.items() if s in printers[0].used_sizes})
    yield from body
    yield f"return {next(iter(results.values()))}" if len(results) == 1 else f"return {{{whole}}}"


def _size_lines(program: Program, left: dict[str, str]) -> Iterator[str]:
    """Sizes that formulas use, read from the inputs."""
    for value, argument in zip(program.inputs, argument_names(program), strict=True):
        symbols = [str(size) for size in value.tensor.shape]
        if len(set(symbols)) == len(symbols) > 1 and all(symbol in left for symbol in symbols):
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
    names = Identifiers([*MENTIONED, *taken, *LETTERS])
    return {symbol: names.like(name) for symbol, name in program.sizes.items()}


def _roles(program: Program) -> dict[Value, str]:
    return {
        value: role
        for step in program.steps
        for value, role in zip(step.arguments, _ROLES.get(step.function, ()), strict=False)
        if isinstance(value, Value)
    }
