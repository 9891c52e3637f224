"""Layers of Keras with operators of ONNX: what a row of the table is, and the values that rows take.

    @row("Dense")
    def dense(c: Call, x: Tensor) -> Expr:
        return x.plain @ c.weight(c.layer.kernel)

The arguments are those with which the model calls the layer. A row returns expressions in the layout of Keras, or
tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.engines.framework import Function, Operators
from onward.vocabulary.keras import Refused

Shape = tuple[int | None, ...]


class Tensor:
    """A value as Keras has it (`plain`), and with the last axis moved to the second place, where ONNX has channels.

    Either is made of the other when it is asked for, and only once: neighbours that agree need no Transpose.
    """

    def __init__(self, shape: Sequence[int | None], *, plain: Expr | None = None, moved: Expr | None = None):
        self.shape: Shape = tuple(shape)
        self.logits: Tensor | None = None
        """What this is the softmax or sigmoid of."""
        self.below: int | None = None
        """The number of rows of the table that this is an index into."""
        self._plain = plain
        self._moved = moved if len(self.shape) > 2 else None
        if len(self.shape) <= 2 and plain is None:
            self._plain = moved
        self._declare()

    @property
    def rank(self) -> int:
        return len(self.shape)

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
        """Whether only the layout of ONNX is there so far."""
        return self._plain is None

    def map(self, function: Callable[[Expr], Expr]) -> Tensor:
        """What a function of single elements makes of it, in the layout that is there."""
        if self.is_moved:
            return Tensor(self.shape, moved=function(self.moved))
        return Tensor(self.shape, plain=function(self.plain))

    def _declare(self) -> None:
        """Shapes are known from Keras."""
        sizes = [size if size is not None else ("batch" if axis == 0 else None) for axis, size in enumerate(self.shape)]
        if self._plain is not None:
            self._plain.value.shape = ir.Shape(sizes)
        if self._moved is not None:
            self._moved.value.shape = ir.Shape([sizes[0], sizes[-1], *sizes[1:-1]])


def elementwise(function: Callable[..., Expr], *tensors: Tensor) -> Expr | Tensor:
    """What a function of the elements of several tensors makes of them; they may be broadcast."""
    first = tensors[0]
    if all(x.is_moved and x.shape == first.shape for x in tensors):
        return Tensor(first.shape, moved=function(*(x.moved for x in tensors)))
    return function(*(x.plain for x in tensors))


ROWS = Operators()
"""Names of Keras's classes, of layers and operations, -> how they are written."""
row = ROWS.define


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer: what its row works with."""

    op: Builder
    layer: Any
    shape: Shape
    """Of the result, or of the first one."""
    weight: Callable[[Any], Expr]
    """The initializer of a variable."""

    def refuse_unless(self, condition: bool, reason: str) -> None:
        if not condition:
            raise Refused(reason)

    def constant(self, array: Any) -> Expr:
        return self.op.constant(np.asarray(array))

    def of(self, layer: Any) -> Call:
        """The same for a layer inside of this one."""
        return dataclasses.replace(self, layer=layer)


def find(layer: Any) -> Function | None:
    """The row of one of Keras's own layers or operations; what others derive from these is their own."""
    kind = type(layer)
    return ROWS.get(kind.__name__) if kind.__module__.startswith("keras.") else None


def accepted_arguments(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a row takes, if the others say nothing."""
    known = inspect.signature(function).parameters
    for name, value in arguments.items():
        if name not in known and value is not None and value is not False:
            raise Refused(f"is called with `{name}`")
    return {name: value for name, value in arguments.items() if name in known}
