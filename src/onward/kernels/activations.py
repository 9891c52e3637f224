"""Activations that exporters write as several nodes: found, and computed in one pass.

x * 0.5 * (1 + Erf(x / sqrt(2)))                                       Gelu
x * 0.5 * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))           Gelu, by its approximation
x * Sigmoid(x)                                                         Swish, or SiLU
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from onward.kernels.known import Known
from onward.kernels.library import DOMAIN
from onward.kernels.rewriting import made_by, only_made_by
from onward.standard import is_standard
from onward.transform.context import Context


def use_activations(context: Context) -> None:
    """Let kernels compute the activations in the outermost graph, in place."""
    search = _Search()
    for node in list(context.graph):
        if not is_standard(node) or node.op_type != "Mul" or node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        if (found := search.activation(node)) is not None:
            name, x = found
            with context.before(node) as op:
                context.replace(node.outputs[0], op.node(DOMAIN, name, x))


class _Search:
    def __init__(self) -> None:
        self._known = Known()

    def activation(self, last: ir.Node) -> tuple[str, ir.Value] | None:
        """The kernel that computes what a product ends, and what of."""
        number, factors = self._product(last.outputs[0], last)
        if len(factors) != 2:
            return None
        for x, share in (factors, factors[::-1]):
            name = self._share_of(x, share, number)
            if name is not None:
                return name, x
        return None

    def _share_of(self, x: ir.Value, share: ir.Value, number: float) -> str | None:
        sigmoid = only_made_by(share, "Sigmoid")
        if sigmoid is not None:
            return "Swish" if sigmoid.inputs[0] is x and number == 1 else None
        added = only_made_by(share, "Add")
        if added is None or not math.isclose(number, 0.5):
            return None
        rest = [value for value in added.inputs if self._known.number(value) != 1]
        inner = only_made_by(rest[0], "Erf", "Tanh") if len(rest) == 1 else None
        if inner is None:
            return None
        if inner.op_type == "Erf":
            return "Gelu" if self._is(inner.inputs[0], math.sqrt(0.5), x) else None
        scale, factors = self._product(inner.inputs[0])
        cubic = only_made_by(factors[0], "Add") if len(factors) == 1 else None
        if cubic is None or not _is_near(scale, math.sqrt(2 / math.pi)) or x not in cubic.inputs:
            return None
        cube = next((value for value in cubic.inputs if value is not x), None)
        return "GeluOfTanh" if self._is(cube, 0.044715, x, x, x) else None

    def _is(self, value: ir.Value | None, number: float, *factors: ir.Value) -> bool:
        """Whether a value is a product of these."""
        found, others = self._product(value)
        return _is_near(found, number) and others == list(factors)

    def _product(self, value: ir.Value | None, last: ir.Node | None = None) -> tuple[float, list[ir.Value]]:
        """A value as a number times others, through products, quotients and powers that nothing else reads."""
        node = last or only_made_by(value, "Mul", "Div", "Pow") or made_by(value, "Pow")
        if (number := self._known.number(value)) is not None:
            return number, []
        if node is None:
            return 1.0, [value] if value is not None else []
        a, b = node.inputs
        if node.op_type == "Mul":
            (left, more), (right, others) = self._product(a), self._product(b)
            return left * right, more + others
        exponent = self._known.number(b)
        if not exponent or (node.op_type == "Pow" and exponent not in (2, 3)):
            return 1.0, list(_present(value))
        before, factors = self._product(a)
        if node.op_type == "Div":
            return before / exponent, factors
        return before**exponent, factors * int(exponent)


def _present(value: ir.Value | None) -> Iterator[ir.Value]:
    if value is not None:
        yield value


def _is_near(number: float, wanted: float) -> bool:
    return math.isclose(number, wanted, rel_tol=1e-5)
