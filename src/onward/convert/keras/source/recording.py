"""Graphs as lines of Python: the table is executed with names in the place of tensors.

Each value has two shapes, one for each of two choices of the sizes that are not known. Where they are the same, the
size does not depend on the choice; where they differ, it is asked for when the program runs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.convert.keras.ops import ROWS, KerasOps, interpreted
from onward.convert.keras.ops.elementwise import converted, converted_like, divided, same
from onward.convert.keras.ops.random import dropout
from onward.convert.keras.ops.sizes import listed
from onward.convert.keras.ops.types import available, constant
from onward.convert.keras.source.lines import Line, Numbered, names_in, needed, nested, renamed
from onward.convert.program.literals import literal
from onward.convert.program.names import RESERVED, identifier
from onward.engines.framework import Function, NotOnHost
from onward.errors import UnsupportedError
from onward.model import Model
from onward.transform.declare import way_out

Pair = tuple[int, int]


class Extent:
    """A whole number that is known when the program runs, as an expression."""

    def __init__(self, text: str, pair: Pair):
        self.text = text
        self.pair = pair

    def __repr__(self) -> str:
        return self.text

    def _with(self, sign: str, other: Any, *, turned: bool = False) -> Extent:
        operands = [self, other][:: -1 if turned else 1]
        text = f" {sign} ".join(f"({x})" if " " in repr(x) else repr(x) for x in operands)
        numbers = ([x.pair[i] if isinstance(x, Extent) else x for x in operands] for i in (0, 1))
        compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "//": int.__floordiv__}[sign]
        first, second = (compute(int(a), int(b)) for a, b in numbers)
        return Extent(text, (first, second))

    def __add__(self, other: Any) -> Extent:
        return self._with("+", other)

    def __sub__(self, other: Any) -> Extent:
        return self._with("-", other)

    def __rsub__(self, other: Any) -> Extent:
        return self._with("-", other, turned=True)

    def __mul__(self, other: Any) -> Extent:
        return self._with("*", other)

    def __floordiv__(self, other: Any) -> Extent:
        return self._with("//", other)


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A tensor of the program."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: str

    @property
    def shape(self) -> tuple[int | None, ...]:
        return tuple(a if a == b else None for a, b in zip(*self.shapes, strict=True))


class _Computation(keras.Operation):  # type: ignore[misc]
    """A function of the table, which Keras tells the shape of. Only tensors are arguments: JAX takes nothing else."""

    def __init__(self, function: Function, inputs: list[Any], attributes: Mapping[str, Any]):
        super().__init__()
        self._given = function, inputs, attributes

    def call(self, tensors: list[Any]) -> Any:
        function, inputs, attributes = self._given
        remaining = iter(tensors)

        def filled(x: Any) -> Any:
            if isinstance(x, list):
                return [filled(item) for item in x]
            return next(remaining) if isinstance(x, keras.KerasTensor) else x

        return function(*map(filled, inputs), **attributes)


_INFIX = {"add": "+", "subtract": "-", "multiply": "*"}
_LITERAL = 64
"""Up to so many numbers are written into the program."""


class Recorder(KerasOps):
    """Keras while it writes a program."""

    def __init__(self, names: Numbered, constants: dict[str, np.ndarray]):
        super().__init__()
        self.lines: list[Line] = []
        self.used: dict[str, Function] = {}
        """Functions of the table that the program calls."""
        self._names = names
        self._constants = constants
        self._sizes: dict[Pair, str] = {}
        self._known: dict[str, Any] = {}

    def name_sizes(self, x: Recorded, dims: Sequence[str | None]) -> None:
        """Let sizes of an input have names of their own."""
        for axis, (pair, dim) in enumerate(zip(zip(*x.shapes, strict=True), dims, strict=True)):
            if dim is not None and pair not in self._sizes:
                name = self._names.fresh(identifier(dim))
                self.lines.append(Line([name], f"ops.shape({x.name})[{axis}]"))
                self._sizes[pair] = name

    # ---- as a framework ----------------------------------------------------------------------------------------------

    def shape_of(self, x: Recorded) -> list[Any]:
        sizes: list[Any] = []
        for axis, pair in enumerate(zip(*x.shapes, strict=True)):
            open_size = Extent(self._sizes.get(pair, f"ops.shape({x.name})[{axis}]"), pair)
            sizes.append(pair[0] if pair[0] == pair[1] else open_size)
        return sizes

    def tensor(self, array: np.ndarray) -> Any:
        if array.dtype.hasobject:
            return self._record("ops.convert_to_tensor", keras.ops.convert_to_tensor, [listed(array), "int32"], {})
        dtype = str(array.dtype)
        if array.size > _LITERAL:
            name = next((name for name, other in self._constants.items() if other is array), None)
            if name is None:
                name = f"constant_{len(self._constants) + 1}"
                self._constants[name] = array
            return Recorded(f"self.{name}", (array.shape, array.shape), available(dtype))
        return self._record("constant", constant, [list(array) if array.ndim else array[()], dtype], {})

    def array(self, tensor: Any) -> np.ndarray:
        raise NotOnHost

    def call(self, function: Function, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        first = next((x for x in inputs if isinstance(x, Recorded)), None)
        if function in (same, dropout, converted, converted_like) and self._keeps(function, inputs, attributes):
            return inputs[0]
        if function.__module__.startswith("keras."):
            return self._record(f"ops.{function.__name__}", function, inputs, attributes)
        if function is divided and first is not None and "float" in first.dtype:
            return self._record("ops.divide", keras.ops.divide, inputs, attributes)
        return self._record(function.__name__, function, inputs, attributes)

    def _keeps(self, function: Function, inputs: list[Any], attributes: dict[str, Any]) -> bool:
        """Whether the result is the first input. For conversions, a backend that lacks bits cannot tell."""
        if function in (same, dropout):
            return function is same or (attributes["outputs"] == 1 and function(*inputs, **attributes) is inputs[0])
        wanted = attributes["to"] if function is converted else inputs[1].dtype
        return available("float64") == "float64" and inputs[0].dtype == wanted

    def _record(self, text: str, function: Function, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        call = self._call_text(text, function, inputs, attributes)
        if call not in self._known:  # what was computed before is the same
            self._known[call] = self._line(text.rpartition(".")[2], call, function, inputs, attributes)
        return self._known[call]

    def _line(self, stem: str, call: str, function: Function, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        first, second = (self._computed(function, inputs, attributes, choice) for choice in (0, 1))
        if not function.__module__.startswith("keras."):
            self.used[function.__name__] = function
        is_single = not isinstance(first, list | tuple)
        pairs = [(first, second)] if is_single else zip(first, second, strict=True)
        made = [Recorded(self._names.numbered(stem), (tuple(a.shape), tuple(b.shape)), str(a.dtype)) for a, b in pairs]
        self.lines.append(Line([x.name for x in made], call, is_single))
        return made[0] if is_single else made if isinstance(first, list) else tuple(made)  # a list is one value

    def _computed(self, function: Function, inputs: list[Any], attributes: dict[str, Any], choice: int) -> Any:
        tensors: list[Any] = []

        def stand_in(x: Any) -> Any:
            if isinstance(x, list):
                return [stand_in(item) for item in x]
            if isinstance(x, Extent):
                return x.pair[choice]
            if not isinstance(x, Recorded):
                return x
            tensors.append(keras.KerasTensor(x.shapes[choice], x.dtype))
            return tensors[-1]

        return _Computation(function, [stand_in(x) for x in inputs], attributes).compute_output_spec(tensors)

    def _call_text(self, text: str, function: Function, inputs: list[Any], attributes: dict[str, Any]) -> str:
        arguments = [written(x) for x in inputs]
        while arguments and arguments[-1] == "None":
            arguments.pop()
        sign = _INFIX.get(
            text.removeprefix("ops."), "/" if text == "ops.divide" else "@" if text == "ops.matmul" else ""
        )
        if sign and len(arguments) == 2:
            return f"{arguments[0]} {sign} {arguments[1]}"
        defaults = {key: p.default for key, p in inspect.signature(function).parameters.items()}
        given = [f"{key}={written(x)}" for key, x in attributes.items() if not _is_same(x, defaults.get(key))]
        return f"{text}({', '.join([*arguments, *given])})"


def _is_same(value: Any, default: Any) -> bool:
    if isinstance(value, float) and isinstance(default, float):
        return np.float32(value) == np.float32(default)
    return bool(value == default)


def written(value: Any) -> str:
    if isinstance(value, Recorded):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return repr(value) if isinstance(value, Extent) else literal(value)


# ---- whole graphs ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph as lines."""

    lines: list[str]
    results: dict[str, str]
    """Name of an output -> the expression that it is."""
    used: dict[str, Function]


class Choices:
    """Which sizes stand for those that are not known, twice. All that come first are taken to be that of the batch,
    and so are others of the name that it has for the inputs of the model.
    """

    def __init__(self, inputs: Iterable[ir.Value]) -> None:
        self._known: dict[Any, Pair] = {}
        self._batch = {
            str(value.shape[0].value) for value in inputs if value.shape and not isinstance(value.shape[0], int)
        }

    def _key(self, value: ir.Value, axis: int, name: str | None) -> Any:
        """What tells a size from others: that of the batch, one that has a name, one that has none."""
        return None if axis == 0 or name in self._batch else name or (value.name, axis)

    def pair(self, size: Any) -> Pair:
        place = 8 * (len(self._known) + 1)
        return self._known.setdefault(size, (place, place + 4))

    def recorded(self, text: str, value: ir.Value) -> tuple[Recorded, list[str | None]]:
        if value.shape is None or value.dtype is None:
            raise UnsupportedError(f"nothing says which shape `{value.name}` has", hint=way_out(value.name or ""))
        sizes = list(value.shape)
        pairs = [(x, x) if isinstance(x, int) else self.pair(self._key(value, i, x.value)) for i, x in enumerate(sizes)]
        shapes = tuple(tuple(pair[i] for pair in pairs) for i in (0, 1))
        dims = [None if isinstance(x, int) else _dim(value, i, x.value) for i, x in enumerate(sizes)]
        return Recorded(text, shapes, available(value.dtype.numpy().name)), dims  # type: ignore[arg-type]


def _dim(value: ir.Value, axis: int, name: str | None) -> str:
    """What a size is called."""
    return "batch" if axis == 0 else name or f"{value.name}_{axis}"


MENTIONED = frozenset({
    "inputs", "training", "grads", "variables", "trainable_variables", "sample_weight", "available", "as_single",
    "fitted", "constant", "ops", "keras", "np", "math",
    *(function.__name__ for function in ROWS.values() if not function.__module__.startswith("keras.")),
})  # fmt: skip
"""What methods read beside their own variables."""


def recorded(
    model: Model,
    given: Mapping[str, str],
    choices: Choices,
    constants: dict[str, np.ndarray],
    wanted_names: Mapping[str, str],
) -> Program:
    """The graph of a model as a program, in which inputs are the expressions that are given.

    `wanted_names` says how results would best be called, by the names of outputs.
    """
    names = Numbered([*given.values(), *MENTIONED, *RESERVED])
    recorder = Recorder(names, constants)
    inputs = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        inputs[value.name or ""], dims = choices.recorded(given[value.name or ""], value)
        recorder.name_sizes(inputs[value.name or ""], dims)
    results = interpreted(model, recorder)(inputs)
    texts = {name: (recorder.place(x)).name for name, x in results.items()}
    lines = needed(recorder.lines, texts.values())
    better = {
        texts[name]: wanted
        for name, wanted in wanted_names.items()
        if texts[name] not in given.values() and wanted not in names
    }
    texts = {name: better.get(text, text) for name, text in texts.items()}
    for line in lines:
        line.targets = [better.get(name, name) for name in line.targets]
        line.text = renamed(line.text, better)
    inlined = nested(lines, texts.values())
    return Program(inlined, texts, _called(recorder.used, inlined))


def _called(used: Mapping[str, Function], lines: Iterable[str]) -> dict[str, Function]:
    """The functions that lines call."""
    names = {name for line in lines for name in names_in(line)}
    return {name: function for name, function in used.items() if name in names}
