"""Sizes that are known only when a graph runs: what becomes of shapes while it is recorded.

A vector of sizes is an array on the host, with whole numbers where they are known and a `Size` where they are not. So
what depends on known sizes stays known, and only the rest is computed when the graph runs.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.engines.framework import HOST_INPUTS, Function, keywords
from onward.engines.numpy import Numpy
from onward.frameworks.program.calls import Holder, ProgramStep, Value, step_result


class Size:
    """A whole number, taken to be more than 1."""

    def __init__(self, value: Any):
        self.value = value

    def __add__(self, other: Any) -> Size:
        return Size(self.value + _value(other))

    def __sub__(self, other: Any) -> Size:
        return Size(self.value - _value(other))

    def __rsub__(self, other: Any) -> Size:
        return Size(_value(other) - self.value)

    def __mul__(self, other: Any) -> Any:
        return 0 if other == 0 else self if other == 1 else Size(self.value * _value(other))

    def __floordiv__(self, other: Any) -> Size:
        return self if other == 1 else Size(self.value // _value(other))

    __truediv__ = __floordiv__
    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.value is other.value

    def __ge__(self, other: Any) -> bool:
        return True

    def __gt__(self, other: Any) -> bool:
        return True

    def __lt__(self, other: Any) -> bool:
        return False

    def __le__(self, other: Any) -> bool:
        return False

    __hash__ = object.__hash__


def _value(number: Any) -> Any:
    return number.value if isinstance(number, Size) else number


def is_open(value: Any) -> bool:
    """Whether something is an array of sizes, some of which are not known."""
    return isinstance(value, np.ndarray) and value.dtype == object


def vector(sizes: Any) -> np.ndarray:
    """Sizes as an array: numbers, or anything else that is only known when the graph runs."""
    known = all(isinstance(size, int) for size in sizes)
    if known:
        return np.array(sizes, np.int64)
    made = np.empty(len(sizes), object)
    made[:] = [size if isinstance(size, int) else Size(size) for size in sizes]
    return made


def as_lists(given: Any) -> Any:
    """An array as numbers of Python, in lists; anything else as it is."""
    if not isinstance(given, np.ndarray):
        return given
    return _number(given) if given.ndim == 0 else [as_lists(np.asarray(item, given.dtype)) for item in given]


def _number(array: np.ndarray) -> Any:
    value = array.item()
    return float(str(array)) if isinstance(value, float) else _value(value)  # 0.1, not 0.10000000149011612


# ---- sizes in programs -----------------------------------------------------------------------------------------------

Pair = tuple[int, int]
"""A size for each of two choices of those that are not known."""
_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


class Extent(Holder):
    """A whole number that is known when a program runs: the size of an axis, or a formula of such sizes."""

    def __init__(self, pair: Pair, *parts: Any):
        """A value that is the size, or a value and an axis, or a sign and two numbers."""
        self.pair = pair
        self.parts = parts

    def _with(self, sign: str, left: Any, right: Any) -> Extent:
        numbers = [[x.pair[i] if isinstance(x, Extent) else int(x) for x in (left, right)] for i in (0, 1)]
        return Extent((_COMPUTE[sign](*numbers[0]), _COMPUTE[sign](*numbers[1])), sign, left, right)

    def __add__(self, other: Any) -> Extent:
        return self._with("+", self, other)

    def __sub__(self, other: Any) -> Extent:
        return self._with("-", self, other)

    def __rsub__(self, other: Any) -> Extent:
        return self._with("-", other, self)

    def __mul__(self, other: Any) -> Extent:
        return self._with("*", self, other)

    def __floordiv__(self, other: Any) -> Extent:
        return self._with("//", self, other)


class Shaped(NamedTuple):
    """The tensor of a value: a shape for each of two choices of what is not known. Where both are the same, it is."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: str


class Choices:
    """Which sizes stand for those that are not known, twice. Those that come first are taken to be that of the batch,
    and so are others of the name that it has for the inputs of the model.
    """

    def __init__(self, inputs: Iterable[ir.Value] = (), *, batch_first: bool = True) -> None:
        """Without `batch_first`, sizes that come first are that of the batch only if they have no name."""
        self._known: dict[Any, Pair] = {}
        self._batch_first = batch_first
        self._batch = {
            str(value.shape[0].value) for value in inputs if value.shape and not isinstance(value.shape[0], int)
        }

    def shapes(self, value: ir.Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
        assert value.shape is not None
        pairs = [(x, x) if isinstance(x, int) else self._pair(value, i, x.value) for i, x in enumerate(value.shape)]
        return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)

    def _pair(self, value: ir.Value, axis: int, name: str | None) -> Pair:
        """What tells a size from others: that of the batch, one that has a name, one that has none."""
        is_first = axis == 0 and (name is None or self._batch_first)
        key = None if is_first or name in self._batch else name or (value.name, axis)
        place = 8 * (len(self._known) + 1)
        return self._known.setdefault(key, (place, place + 4))


class Sizes:
    """The sizes of values, some of which have names of their own."""

    def __init__(self) -> None:
        self._known: dict[Any, Extent] = {}
        self.roles: dict[Value, str] = {}
        """What sizes are called."""

    def name(self, x: Value, dims: Iterable[str | None], shape: Callable[[Value], tuple[str, list[Any]]]) -> None:
        """Let sizes of an input have names. `shape` is the function that tells them all, and its arguments."""
        pairs = list(zip(*x.tensor.shapes, strict=True))
        new = {i: dim for i, dim in enumerate(dims) if dim is not None and pairs[i] not in self._known}
        has_all = len(new) == len(pairs) > 1
        whole = ProgramStep(*shape(x), is_tuple=has_all)
        whole.results = [Value(step=whole) for _ in (pairs if has_all else [x])]
        for axis, dim in new.items():
            size = whole.results[axis] if has_all else step_result("[]", whole.results[0], (axis,))
            self.roles[size] = dim
            self._known[pairs[axis]] = Extent(pairs[axis], size)

    def of(self, x: Value) -> list[Any]:
        """The shape of a value: numbers, and what is known when the program runs."""
        return [
            pair[0] if pair[0] == pair[1] else self._known.get(pair) or self._of_axis(x, axis, pair)
            for axis, pair in enumerate(zip(*x.tensor.shapes, strict=True))
        ]

    def _of_axis(self, x: Value, axis: int, pair: Pair) -> Extent:
        return self._known.setdefault((x, axis), Extent(pair, x, axis))


# ---- operators on the host -------------------------------------------------------------------------------------------

_AS_THEY_ARE = frozenset(
    {
        "Add", "Sub", "Mul", "Gather", "Concat", "Slice", "Unsqueeze", "Squeeze", "Identity", "Split", "Where",
        "Shape", "Size",
    }
)  # fmt: skip
_OWN: Mapping[str, Callable[..., Any]] = {
    "Cast": lambda x, *, to: NotImplemented if ir.DataType(to).is_floating_point() else x,
    "Div": lambda a, b: a // b,
    "Equal": lambda a, b: np.asarray(a == b, bool),
    "ReduceProd": lambda x, axes=None, *, keepdims: np.prod(x, keepdims=bool(keepdims)),
    "Reshape": lambda x, shape: x.reshape(shape.tolist()),
}


def on_host(
    rows: Mapping[str, Function],
    place: Callable[[np.ndarray], Any],
    own: Mapping[str, Function] | None = None,
) -> dict[str, Function]:
    """Numpy's operators; what they cannot do with sizes that are not known is left to the rows of a table.

    `own` are operators on such sizes, where they are not of the class above.
    """
    known = {**_OWN, **(own or {})}
    return {
        name: _either(
            function, known.get(name, function if name in _AS_THEY_ARE else None), name, rows.get(name), place
        )
        for name, function in Numpy.operators.items()
    }


def _either(
    function: Function,
    on_sizes: Function | None,
    name: str,
    row: Function | None,
    place: Callable[[np.ndarray], Any],
) -> Function:
    @functools.wraps(function)
    def call(*inputs: Any, **attributes: Any) -> Any:
        chosen = function if not any(map(is_open, inputs)) else on_sizes if not _places_are_open(name, inputs) else None
        result = NotImplemented if chosen is None else chosen(*inputs, **_keywords_of(chosen, attributes))
        if result is not NotImplemented:
            return _plain(result)
        if row is None:
            raise NotImplementedError("a size is not known")
        hosted = HOST_INPUTS.get(name, ())
        placed = (x if x is None or i in hosted else place(x) for i, x in enumerate(inputs))
        return row(*placed, **_keywords_of(row, attributes))

    return asking(call, {key for part in (function, on_sizes, row) if part is not None for key in keywords(part)})


_PLACED = ("Gather", "Slice", "Split", "Squeeze", "Unsqueeze", "Reshape")


def _places_are_open(operator: str, inputs: Sequence[Any]) -> bool:
    """Whether what says where something is, or which of two things, is not known."""
    return any(map(is_open, inputs[1:] if operator in _PLACED else inputs[:1] if operator == "Where" else ()))


def asking(call: Function, asked: Iterable[str]) -> Function:
    """A function that asks for attributes by these names."""
    inputs = inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)
    by_name = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted({*asked})]
    call.__signature__ = inspect.Signature([inputs, *by_name])  # type: ignore[attr-defined]
    return call


def _plain(result: Any) -> Any:
    """What is known is an array of numbers, also where it came from sizes that are not."""
    if isinstance(result, tuple):
        return tuple(map(_plain, result))
    if isinstance(result, list | np.generic) or (isinstance(result, np.ndarray) and result.dtype != object):
        return result
    array = np.empty(np.shape(result) if isinstance(result, np.ndarray) else (), object)
    array[...] = result
    if not all(isinstance(x, int) for x in array.flat):
        return array
    return array.astype(bool if array.size and all(isinstance(x, bool) for x in array.flat) else np.int64)


def _keywords_of(function: Function, attributes: Mapping[str, Any]) -> dict[str, Any]:
    wanted = keywords(function)
    return {key: value for key, value in attributes.items() if key in wanted}
