"""Rows of Keras layers, and the values that they take.

    @row("Dense")
    def dense(c: Call, x: LayerTensor) -> Expr:
        return x.plain @ c.weight(c.layer.kernel)

The arguments are those of the call of the layer. A row returns expressions in the layout of Keras,
or tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.engines.framework import Function, Operators
from onward.vocabulary.keras import Refused

Shape = tuple[int | None, ...]


class LayerTensor:
    """Value in the layout of Keras (`plain`), and with the last axis second, the channels of ONNX (`moved`).

    A layout is computed from the other one on first access, so layers that agree need no Transpose.
    """

    def __init__(self, shape: Sequence[int | None], *, plain: Expr | None = None, moved: Expr | None = None):
        self.shape: Shape = tuple(shape)
        self.logits: LayerTensor | None = None  # the input of the softmax or sigmoid that made this
        self.below: int | None = None  # the number of rows of the table that this indexes
        self._plain = plain
        self._moved = moved if len(self.shape) > 2 else None
        if len(self.shape) <= 2 and plain is None:
            self._plain = moved
        self._declare()

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        dtype = (self.plain if self._moved is None else self._moved).dtype
        assert dtype is not None
        return dtype.numpy()

    @property
    def plain(self) -> Expr:
        if self._plain is None:
            assert self._moved is not None
            self._plain = self._moved.op.Transpose(self._moved, perm=[0, *range(2, self.rank), 1])
            self._declare()
        return self._plain

    @property
    def moved(self) -> Expr:
        if self.rank <= 2:
            return self.plain
        if self._moved is None:
            assert self._plain is not None
            self._moved = self._plain.op.Transpose(self._plain, perm=[0, self.rank - 1, *range(1, self.rank - 1)])
            self._declare()
        return self._moved

    @property
    def is_moved(self) -> bool:
        """True if only the layout of ONNX exists so far."""
        return self._plain is None

    def map(self, function: Callable[[Expr], Expr]) -> LayerTensor:
        """Apply an elementwise function in the layout that exists."""
        if self.is_moved:
            return LayerTensor(self.shape, moved=function(self.moved))
        return LayerTensor(self.shape, plain=function(self.plain))

    def _declare(self) -> None:
        """Set the shapes, which Keras knows."""
        sizes = [size if size is not None else ("batch" if axis == 0 else None) for axis, size in enumerate(self.shape)]
        if self._plain is not None:
            self._plain.value.shape = ir.Shape(sizes)
        if self._moved is not None:
            self._moved.value.shape = ir.Shape([sizes[0], sizes[-1], *sizes[1:-1]])


def elementwise(function: Callable[..., Expr], *tensors: LayerTensor) -> Expr | LayerTensor:
    """Apply an elementwise function to several tensors, with broadcasting."""
    first = tensors[0]
    if all(x.is_moved and x.shape == first.shape for x in tensors):
        return LayerTensor(first.shape, moved=function(*(x.moved for x in tensors)))
    return function(*(x.plain for x in tensors))


ROWS = Operators()  # by the name of a Keras layer or operation
row = ROWS.define


@dataclasses.dataclass(frozen=True)
class Call:
    """Call of a layer, as its row gets it."""

    op: Builder
    layer: Any
    shape: Shape  # of the first result
    weight: Callable[[Any], Expr]  # from a variable to its initializer
    is_frozen: bool = False  # True if the layer is in inference mode in training, too

    def refuse_unless(self, condition: bool, reason: str) -> None:
        if not condition:
            raise Refused(reason)

    def constant(self, array: Any) -> Expr:
        return self.op.constant(np.asarray(array))

    def of(self, layer: Any) -> Call:
        """Return the call of a layer inside this one."""
        return dataclasses.replace(self, layer=layer)


OPERATIONS = {"Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum"}
"""Names that a layer has and a function of `keras.ops`, which is not called with a list."""


def find(layer: Any) -> Function | None:
    """Return the row of a layer or operation of Keras; None for a subclass of another package."""
    name, is_layer = type(layer).__name__, isinstance(layer, keras.layers.Layer)
    is_own = type(layer).__module__.startswith("keras.")
    return ROWS.get(name) if is_own and (is_layer or name in OPERATIONS) else None


def accepted_arguments(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a row takes; raise `Refused` for others that are set."""
    parameters = inspect.signature(function).parameters
    for name, value in arguments.items():
        if name not in parameters and value is not None and value is not False:
            raise Refused(f"is called with `{name}`")
    return {name: value for name, value in arguments.items() if name in parameters}
