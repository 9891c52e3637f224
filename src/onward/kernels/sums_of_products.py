"""Products that are added up, with a bias or without, as one kernel: what adapters and the gradients of queries, keys
and values are made of. Each then goes on where the last one ended, in registers and caches.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onward.kernels.library import DOMAIN
from onward.shapes import dims
from onward.standard import is_standard
from onward.transform.context import Context

PRODUCT = "Product"
_NEAR = 64
"""Nodes before a sum in which products are looked for: what they read stays in memory until it is computed."""


def add_up_products(context: Context) -> None:
    """Join them, in the outermost graph, in place."""
    position = {node: i for i, node in enumerate(context.graph)}
    for node in reversed(list(position)):
        if node.graph is not None and _adds(node) and dims(node.outputs[0]) is not None:
            found = _Sum(node, position)
            if found.can_be_joined:
                found.replace(context)


class _Sum:
    """What an Add is the sum of, through others that nothing else reads."""

    def __init__(self, root: ir.Node, position: Mapping[ir.Node, int]):
        self._root, self._position, self._sizes = root, position, dims(root.outputs[0]) or ()
        self._products: list[ir.Node] = []
        self._bias: ir.Value | None = None
        self._rest: list[ir.Value] = []
        self._adds = [root]
        for value in root.inputs:
            self._collect(value)

    @property
    def can_be_joined(self) -> bool:
        """Whether there are several products, or one that has no bias yet."""
        return len(self._products) > 1 or any(_bias_of(node) is not self._bias for node in self._products)

    def _collect(self, value: ir.Value | None) -> None:
        assert value is not None
        made = self._made_for_this(value)
        if made is not None and _adds(made):
            self._adds.append(made)
            for part in made.inputs:
                self._collect(part)
        elif made is not None and _is_product(made) and (self._bias is None or _bias_of(made) is None):
            self._products.append(made)
            self._bias = _bias_of(made) or self._bias
        elif self._bias is None and dims(value) == self._sizes[-1:]:
            self._bias = value
        else:
            self._rest.append(value)

    def _made_for_this(self, value: ir.Value) -> ir.Node | None:
        """The node that computes a term as large as the sum, shortly before, and for nothing else."""
        node = value.producer()
        if node is None or node not in self._position or dims(value) != self._sizes:
            return None
        is_near = self._position[self._root] - self._position[node] <= _NEAR
        return node if is_near and len(value.uses()) == 1 and not value.is_graph_output() else None

    def replace(self, context: Context) -> None:
        terms = [value for node in self._products for value in node.inputs[:2]]
        turned = [flag for node in self._products for flag in node.attributes["turned"].as_ints()]
        with context.before(self._root) as op:
            bias = [] if self._bias is None else [self._bias]
            total = op.node(DOMAIN, PRODUCT, *terms, *bias, turned=turned).like(self._root.outputs[0])
            for value in self._rest:
                total = op.Add(value, total)
            context.replace(self._root.outputs[0], total)
        context.graph.remove([*self._adds, *self._products], safe=True)


def _adds(node: ir.Node) -> bool:
    return node.op_type == "Add" and is_standard(node)


def _is_product(node: ir.Node) -> bool:
    return node.op_type == PRODUCT and node.domain == DOMAIN


def _bias_of(product: ir.Node) -> ir.Value | None:
    return product.inputs[-1] if len(product.inputs) % 2 else None
