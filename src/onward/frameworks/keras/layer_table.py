"""What a row of the table of layers is: how one layer is written with operators of ONNX.

    @row("Dense")
    def dense(c: Call, x: Tensor) -> Expr:
        return x.plain @ c.weight(c.layer.kernel)

The arguments are those with which the model calls the layer. A row returns expressions in Keras's layout, or tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from onward.build import Builder, Expr
from onward.engines.framework import Function, Operators
from onward.frameworks.keras.tensors import Shape
from onward.vocabulary.keras import Refused

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
