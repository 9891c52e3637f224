"""Keras: eager operators of `keras.ops`, on the CPU of TensorFlow.

Gradients come from Onward's rules, since the backends of Keras share no derivative. The same table
makes live Keras models on any backend, and their written programs (see frameworks/keras): a row is
a function of `keras.ops`, or a function here whose source is copied into the program. So rows call
only Keras, numpy and one another, and their host inputs are Python numbers and lists.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onward.engines.keras.quiet import keras  # isort: skip  (other imports of it are not quiet)

from onward.engines.framework import Framework, Function, Operators, collect_operators
from onward.engines.keras import control, layers
from onward.engines.keras.types import constant
from onward.engines.numpy import Numpy
from onward.engines.shared import sequence
from onward.engines.shared.arrays import Named, function_of
from onward.engines.shared.elementwise import operators as named
from onward.engines.shared.movement import operators as movements
from onward.errors import UnknownNameError, UnsupportedError

FAMILIES = ("elementwise", "algebra", "movement", "spatial", "layers")
_NAMED = {name: function_of(row, keras.ops) for name, row in named.items() if isinstance(row, Named)}
ROWS = Operators({**_NAMED, **collect_operators(__name__, FAMILIES), **layers.functions})
"""Rows that programs may call."""
CONTROL = Operators({**control.operators, **sequence.operators})

_TYPES = frozenset(
    {
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
        "float16", "bfloat16", "float32", "float64",
    }
)  # fmt: skip
"""Types of all backends, natively or by a wider type."""
_NAME_TYPES = ("to", "dtype", "stash_type", "softmax_precision")
_NUMBERS = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


def as_lists(value: Any) -> Any:
    """Convert an array to Python numbers in lists. Return other values unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim:
        return [as_lists(np.asarray(item, value.dtype)) for item in value]
    number = value.item()
    return float(str(value)) if isinstance(number, float) else number  # 0.1, not 0.10000000149011612


def as_operator(
    function: Function, on_host: Callable[[Any], Any] = as_lists, compute: Function | None = None
) -> Function:
    """Wrap a row for the interpreter: host arrays become numbers and lists, and types become names."""
    call = compute or function

    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        named = {key: _named_attribute(key, value) for key, value in attributes.items()}
        return call(*map(on_host, inputs), **named)

    return run


def _named_attribute(attribute: str, value: Any) -> Any:
    """Return the name of a type, and a number with its type as a pair."""
    if attribute == "value" and isinstance(value, np.ndarray):
        return [value.item(), str(value.dtype)]
    if attribute not in _NAME_TYPES or not isinstance(value, int):
        return value
    name = ir.DataType(value).name if value == ir.DataType.STRING else ir.DataType(value).numpy().name
    if name not in _TYPES:
        raise UnsupportedError(f"Keras has no tensors of {name}")
    return name


_NUMPYS = (
    "BitShift", "BitCast", "Range", "Compress", "NonZero", "Unique", "NonMaxSuppression", "QuantizeLinear",
    "DequantizeLinear", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
)  # fmt: skip
"""Operators without a function of Keras that is exact for all types and values."""


def _by_numpy(function: Function) -> Function:
    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        arrays = (x if x is None or isinstance(x, np.ndarray) else keras.ops.convert_to_numpy(x) for x in inputs)
        results = function(*arrays, **attributes)
        return tuple(map(_placed, results)) if isinstance(results, tuple) else _placed(results)

    return run


def _placed(array: np.ndarray) -> Any:
    return constant(array, str(array.dtype)) if array.dtype.name in _TYPES else np.asarray(array)


@functools.wraps(Numpy.operators["Cast"])
def _cast(x: Any, *, to: int, **others: Any) -> Any:
    is_available = to != ir.DataType.STRING and ir.DataType(to).numpy().name in _TYPES
    return _CAST(x, to=to) if is_available else _by_numpy(Numpy.operators["Cast"])(x, to=to, **others)


_CAST = as_operator(ROWS["Cast"])


class Keras(Framework):
    name = "keras"
    operators = Operators(
        {
            **CONTROL,
            **{name: movements[name] for name in ("Shape", "Size")},
            **{name: as_operator(row) for name, row in ROWS.items()},
            **{name: _by_numpy(Numpy.operators[name]) for name in _NUMPYS},
            "Cast": _cast,
        }
    )
    takes_numbers: ClassVar[Mapping[str, Sequence[int]]] = {
        **dict.fromkeys(_NUMBERS, (0, 1)),
        "Pow": (1,),
        "Clip": (1, 2),
    }

    def __init__(self, device: str = "cpu") -> None:
        if device not in self.devices():
            raise UnknownNameError(f"Keras has no device `{device}` here", hint="it has cpu")
        if (backend := keras.backend.backend()) != "tensorflow":
            raise UnsupportedError(
                f"Keras on {backend} lacks 64-bit types (on JAX) or uint32 (on PyTorch)",
                hint="set KERAS_BACKEND=tensorflow, or use the engine `jax` or `torch`",
            )

    def active(self) -> contextlib.AbstractContextManager[None]:
        device: contextlib.AbstractContextManager[None] = keras.device("cpu")
        return device

    def supports(self, dtype: np.dtype) -> bool:
        return dtype.name in _TYPES

    def shape_of(self, x: Any) -> list[Any]:
        """Return the sizes of a tensor."""
        return list(keras.ops.shape(x))

    def tensor(self, array: np.ndarray) -> Any:
        return constant(array, str(array.dtype))

    def array(self, tensor: Any) -> np.ndarray:
        return np.asarray(keras.ops.convert_to_numpy(tensor))

    def derivative(self, function: Any, xs: Any) -> Any:
        raise UnsupportedError("Keras's operations have no derivative", hint="use Onward's rules: `rules=True`")
