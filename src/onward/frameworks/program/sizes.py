"""Sizes that are only known when a graph runs.

A vector of sizes is an array on the host: integers where they are known, a `Size` where they are
not. Whatever depends on known sizes only stays known while a graph is recorded.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.engines.framework import HOST_INPUTS, Function, keywords
from onward.engines.numpy import Numpy
from onward.frameworks.program.calls import Holder, ProgramStep, Value, step_result


class Size:
    """Integer that is assumed to be greater than 1."""

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
    """True if a value is an array of sizes, some of which are unknown."""
    return isinstance(value, np.ndarray) and value.dtype == object


def vector(sizes: Any) -> np.ndarray:
    """Return sizes as an array of integers, and of `Size` for anything else."""
    return array_of([size if isinstance(size, int) else Size(size) for size in sizes])


def array_of(sizes: Any) -> np.ndarray:
    """Return sizes, or one of any type, as an array: of integers or booleans if all of them are known."""
    array = np.empty(np.shape(sizes) if isinstance(sizes, list | tuple | np.ndarray) else (), object)
    array[...] = sizes
    if not all(isinstance(x, int) for x in array.flat):
        return array
    return array.astype(bool if array.size and all(isinstance(x, bool) for x in array.flat) else np.int64)


def as_lists(value: Any) -> Any:
    """Return an array as nested lists of Python numbers, and anything else unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    return _number(value) if value.ndim == 0 else [as_lists(np.asarray(item, value.dtype)) for item in value]


def _number(array: np.ndarray) -> Any:
    value = array.item()
    return float(str(array)) if isinstance(value, float) else _value(value)  # 0.1, not 0.10000000149011612


# ---- sizes in programs -----------------------------------------------------------------------------------------------

Pair = tuple[int, int]
"""Size under each of two choices of the unknown sizes."""
_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


class Extent(Holder):
    """Integer that is known when a program runs: the size of an axis, or a formula of such sizes."""

    def __init__(self, pair: Pair, *parts: Any):
        """Take the value of the size, a value and an axis, or a sign and two numbers."""
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
    """Type and two shapes of a value, one per choice of the unknown sizes."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: str


class Choices:
    """Two choices of the unknown sizes.

    The first axis is assumed to be the batch, and so are other axes of the name that the batch has
    in the inputs.
    """

    def __init__(self, inputs: Iterable[ir.Value] = (), *, batch_first: bool = True) -> None:
        """Without `batch_first`, only unnamed first axes are the batch."""
        self._known: dict[Any, Pair] = {}
        self._batch_first = batch_first
        self._batch = {
            str(value.shape[0].value) for value in inputs if value.shape and not isinstance(value.shape[0], int)
        }

    def shapes(self, value: ir.Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
        assert value.shape is not None
        pairs = [(x, x) if isinstance(x, int) else self._pair(value, i, x.value) for i, x in enumerate(value.shape)]
        return tuple(first for first, _ in pairs), tuple(second for _, second in pairs)

    def _pair(self, value: ir.Value, axis: int, name: str | None) -> Pair:
        is_first = axis == 0 and (name is None or self._batch_first)
        key = None if is_first or name in self._batch else name or (value.name, axis)
        first = 8 * (len(self._known) + 1)
        return self._known.setdefault(key, (first, first + 4))


class Sizes:
    """Sizes of values, some of which have names."""

    def __init__(self) -> None:
        self._known: dict[Any, Extent] = {}
        self.roles: dict[Value, str] = {}
        """Names of sizes."""

    def name(self, x: Value, dims: Iterable[str | None], shape: Callable[[Value], tuple[str, list[Any]]]) -> None:
        """Name sizes of an input. `shape` returns the call of its shape: function and arguments."""
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
        """Return the shape of a value: integers, and extents that are known when the program runs."""
        return [
            pair[0]
            if pair[0] == pair[1]
            else self._known.get(pair) or self._known.setdefault((x, axis), Extent(pair, x, axis))
            for axis, pair in enumerate(zip(*x.tensor.shapes, strict=True))
        ]


# ---- operators on the host -------------------------------------------------------------------------------------------

_SAME_ON_SIZES = frozenset(
    {
        "Add", "Sub", "Mul", "Gather", "Concat", "Slice", "Unsqueeze", "Squeeze", "Identity", "Split", "Where",
        "Shape", "Size",
    }
)  # fmt: skip
_ON_SIZES: Mapping[str, Callable[..., Any]] = {
    "Cast": lambda x, *, to: NotImplemented if ir.DataType(to).is_floating_point() else x,
    "Div": lambda a, b: a // b,
    "Equal": lambda a, b: np.asarray(a == b, bool),
    "ReduceProd": lambda x, axes=None, *, keepdims: np.prod(x, keepdims=bool(keepdims)),
    "Reshape": lambda x, shape: x.reshape(shape.tolist()),
}


def on_host(
    rows: Mapping[str, Function],
    to_device: Callable[[np.ndarray], Any],
    own: Mapping[str, Function] | None = None,
) -> dict[str, Function]:
    """Return numpy's operators, with `rows` for unknown sizes that neither these nor `own` compute."""
    with_sizes = {**{name: Numpy.operators[name] for name in _SAME_ON_SIZES}, **_ON_SIZES, **(own or {})}
    return {
        name: _either(function, with_sizes.get(name), name, rows.get(name), to_device)
        for name, function in Numpy.operators.items()
    }


def _either(
    function: Function,
    on_sizes: Function | None,
    name: str,
    row: Function | None,
    to_device: Callable[[np.ndarray], Any],
) -> Function:
    # Inputs that select positions or branches must be known.
    selectors = slice(1, None) if name in _INDEXED else slice(0, 1 if name == "Where" else 0)

    @functools.wraps(function)
    def call(*inputs: Any, **attributes: Any) -> Any:
        candidate = on_sizes if not any(map(is_open, inputs[selectors])) else None
        chosen = candidate if any(map(is_open, inputs)) else function
        result = NotImplemented if chosen is None else chosen(*inputs, **_keywords_of(chosen, attributes))
        if result is not NotImplemented:
            return _plain(result)
        if row is None:
            raise NotImplementedError("a size is not known")
        hosted = HOST_INPUTS.get(name, ())
        converted = (x if x is None or i in hosted else to_device(x) for i, x in enumerate(inputs))
        return row(*converted, **_keywords_of(row, attributes))

    return with_attributes(call, {key for row in (function, on_sizes, row) if row is not None for key in keywords(row)})


_INDEXED = ("Gather", "Slice", "Split", "Squeeze", "Unsqueeze", "Reshape")


def with_attributes(call: Function, attributes: Iterable[str]) -> Function:
    """Set the signature of a function that takes attributes by these names."""
    inputs = inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)
    by_name = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted({*attributes})]
    call.__signature__ = inspect.Signature([inputs, *by_name])  # type: ignore[attr-defined]
    return call


def _plain(result: Any) -> Any:
    """Return known sizes as an array of integers."""
    if isinstance(result, tuple):
        return tuple(map(_plain, result))
    if isinstance(result, list | np.generic) or (isinstance(result, np.ndarray) and result.dtype != object):
        return result
    return array_of(result)


def _keywords_of(function: Function, attributes: Mapping[str, Any]) -> dict[str, Any]:
    names = keywords(function)
    return {key: value for key, value in attributes.items() if key in names}
