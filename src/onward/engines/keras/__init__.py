"""ONNX's operators as calls of `keras.ops`, on whichever backend Keras has.

The files of this table are also what generated models are made of: a row is a function of `keras.ops` or one of this
package, whose source is written into the model (see frameworks/keras/source). So rows call nothing but Keras, numpy and
one another, and what they take on the host are numbers and lists of Python.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.engines.framework import Framework, Function, NotOnHost, Operators, collect_operators
from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.shared import sequence
from onward.errors import UnsupportedError
from onward.engines.keras import control
from onward.engines.keras.values import constant
from onward.frameworks.program.sizes import as_lists, is_open, on_host, vector
from onward.model import Model
from onward.transform import inline

FAMILIES = (
    "elementwise", "activation", "reduction", "movement", "indexing", "matrix", "convolution", "pooling", "grids",
    "normalization", "attention", "recurrent", "random",
)  # fmt: skip
ROWS = collect_operators(__name__, FAMILIES)

_TYPES = frozenset(
    {
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
        "float16", "bfloat16", "float32", "float64",
    }
)  # fmt: skip
"""What all backends have, in one way or another."""
_NAME_TYPES = ("to", "dtype", "stash_type", "softmax_precision")
_NUMBERS = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


class KerasOps(Framework):
    """Keras, on its own backend."""

    name = "keras"
    takes_numbers = {**dict.fromkeys(_NUMBERS, (0, 1)), "Pow": (1,), "Clip": (1, 2)}  # noqa: RUF012

    def __init__(self) -> None:
        rows = Operators({name: self.row(name, function) for name, function in ROWS.items()})
        self.operators = Operators({**control.operators, **sequence.operators, **rows, **self.sizes()})
        self.on_host = on_host(self.operators, self.tensor)

    def row(self, operator: str, function: Function) -> Function:
        """A row as the interpreter calls it: arrays on the host become numbers and lists, and types get names."""

        @functools.wraps(function)
        def call(*inputs: Any, **attributes: Any) -> Any:
            named = {key: _named_attribute(key, value) for key, value in attributes.items()}
            return self.call(operator, function, [as_lists(x) for x in inputs], named)

        return call

    def call(self, operator: str, function: Function, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        return function(*inputs, **attributes)

    def sizes(self) -> dict[str, Function]:
        def shape(x: Any, *, start: int = 0, end: int | None = None) -> np.ndarray:
            return vector(self.shape_of(x)[start:end])

        def size(x: Any) -> np.ndarray:
            return np.asarray(np.prod(vector(self.shape_of(x))))

        return {"Shape": shape, "Size": size}

    def shape_of(self, x: Any) -> list[Any]:
        return list(keras.ops.shape(x))

    def supports(self, dtype: np.dtype) -> bool:
        return dtype.hasobject or dtype.name in _TYPES

    def tensor(self, array: np.ndarray) -> Any:
        if is_open(array):
            return keras.ops.convert_to_tensor(as_lists(array), "int32")
        return constant(array, str(array.dtype))

    def array(self, tensor: Any) -> np.ndarray:
        try:
            return np.asarray(keras.ops.convert_to_numpy(tensor))
        except Exception as error:  # each backend says in its own way that the tensor is only traced
            raise NotOnHost from error

    def derivative(self, function: Any, xs: Any) -> Any:
        raise no_gradient_inside()

    def is_tracing(self) -> bool:
        return True  # constants of one trace are not those of another


def _named_attribute(attribute: str, value: Any) -> Any:
    """Types by their names, and a number with its type as a pair."""
    if attribute == "value" and isinstance(value, np.ndarray):
        return [value.item(), str(value.dtype)]
    if attribute not in _NAME_TYPES or not isinstance(value, int):
        return value
    name = ir.DataType(value).name if value == ir.DataType.STRING else ir.DataType(value).numpy().name
    if name not in _TYPES:
        raise UnsupportedError(f"Keras has no tensors of {name}")
    return name


def interpret(model: Model, framework: KerasOps) -> Interpreter:
    """What executes the graph of a model. Functions that the table has stay calls."""
    called = [f"{domain}.{name}" for domain, name, _ in model.functions if f"{domain}.{name}" not in ROWS]
    return interpreter(inline(model, called), framework)


def no_gradient_inside() -> UnsupportedError:
    return UnsupportedError(
        "a Keras model computes a gradient inside of its graph, which Keras's operations have no word for",
        hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
    )
