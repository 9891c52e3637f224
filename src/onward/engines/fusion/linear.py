"""A product and a bias, which exporters write as two or three nodes: one operator, that rounds once.

Add(MatMul(x, Transpose(w)), bias)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Framework
from onward.engines.fusion.match import Following, Match

LINEAR = "onward.Linear"
"""The row of a table: `(x, weight, bias)`, with the weight as it is in the product."""


@dataclasses.dataclass(frozen=True)
class Linear(Match):
    x: ir.Value
    weight: ir.Value
    bias: ir.Value
    transposed: bool
    """Whether the weight is transposed before the product."""

    @property
    def inputs(self) -> list[ir.Value]:
        return [self.x, self.weight, self.bias]

    def compute(self, framework: Framework, values: dict[ir.Value, Any]) -> Any:
        x, weight, bias = (values[value] for value in self.inputs)
        tensors = not any(isinstance(value, np.ndarray) for value in (x, weight, bias))
        if not tensors or len(weight.shape) != 2 or len(bias.shape) != 1 or len(x.shape) < 2:
            return NotImplemented
        turned = framework.operators["Transpose"](weight, perm=[1, 0]) if self.transposed else weight
        if turned.shape[1] != bias.shape[0]:
            return NotImplemented
        return framework.operators[LINEAR](x, turned, bias)


def linear(last: ir.Node, among: Container[ir.Node], kept: Container[ir.Value]) -> Linear | None:
    """The product that a node adds a bias to."""
    if last.op_type != "Add":
        return None
    follow = Following(among, kept)
    for product, bias in (last.inputs, last.inputs[::-1]):
        node = follow.only(product, "MatMul")
        x, weight = node.inputs if node is not None else (None, None)
        if node is None or bias is None or x is None or weight is None:
            continue
        transpose = follow.only(weight, "Transpose")
        if transpose is None or transpose.inputs[0] is None:
            return Linear([node, last], x, weight, bias, False)
        if list(transpose.attributes["perm"].as_ints()) == [1, 0]:
            return Linear([transpose, node, last], x, transpose.inputs[0], bias, True)
    return None
