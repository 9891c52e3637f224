"""Nodes that amount to one operator which the framework computes faster, or more exactly, than one by one.

They are found when a graph is planned, and looked at again when they are reached: then the shapes are known, and all
that follows from them. Where the nodes turn out to be something else, they are executed as they stand.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Framework
from onward.standard import is_standard


@dataclasses.dataclass(frozen=True)
class FusionMatch(ABC):
    """Nodes that amount to one operator of a framework."""

    nodes: Sequence[ir.Node]
    """The last one has the output."""

    @property
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    @property
    @abstractmethod
    def inputs(self) -> list[ir.Value]:
        """What it has to know."""

    @abstractmethod
    def compute(self, framework: Framework, values: dict[ir.Value, Any]) -> Any:
        """The output by the operator; NotImplemented where, by the numbers, the nodes are something else."""


def readers(node: ir.Node) -> set[ir.Node]:
    return {reader for output in node.outputs for reader, _ in output.uses()}


# ---- attention that an exporter has written out ----------------------------------------------------------------------

# MatMul(Softmax(MatMul(q * scale, kᵀ * scale) + mask), v)
#
# What the numbers are (whether the mask is causal, whether reshapes swap two axes) is known only when the shapes are.


@dataclasses.dataclass(frozen=True)
class Attention(FusionMatch):
    """What attention is of."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None
    factors: Sequence[tuple[ir.Value, bool]]
    """What queries, keys or scores are multiplied by, or (True) divided by."""
    swap: Sequence[ir.Value]
    """The two shapes through which keys are reshaped to be transposed; none if a Transpose is enough."""
    guarded: bool
    """Whether rows that attend to nothing become zeros."""

    @property
    def inputs(self) -> list[ir.Value]:
        mask = [self.mask] if self.mask is not None else []
        return [self.q, self.k, self.v, *(value for value, _ in self.factors), *self.swap, *mask]

    def compute(self, framework: Framework, values: dict[ir.Value, Any]) -> Any:
        q, k, v = (values[value] for value in (self.q, self.k, self.v))
        factors = [values[value] for value, _ in self.factors]
        shapes = [values[value] for value in self.swap]
        mask = None if self.mask is None else values[self.mask]
        known = all(isinstance(array, np.ndarray) for array in (*factors, *shapes))
        if not known or any(isinstance(x, np.ndarray) or len(x.shape) != 4 for x in (q, k, v)):
            return NotImplemented
        if not all(factor.size == 1 for factor in factors) or (shapes and not _swaps(k.shape, *shapes)):
            return NotImplemented
        scale = np.prod(
            [1 / f.item() if over else f.item() for f, (_, over) in zip(factors, self.factors, strict=True)]
        )
        causal = isinstance(mask, np.ndarray) and _is_causal(mask, q.shape[2], k.shape[2])
        always_attends = isinstance(mask, np.ndarray) and bool(np.isfinite(mask).any(-1).all())
        if self.guarded and mask is not None and not causal and not always_attends:
            return NotImplemented
        placed = None if causal or mask is None else framework.place(mask)
        given = {"scale": float(scale), "is_causal": int(causal), "kv_num_heads": None, "q_num_heads": None}
        return framework.operators["Attention"](q, k, v, placed, **given)


def _may_be_scalar(value: ir.Value) -> bool:
    return value.shape is None or all(size == 1 for size in value.shape)


def _swaps(shape: Sequence[int], through: np.ndarray, to: np.ndarray) -> bool:
    """Whether reshaping, transposing and reshaping is swapping the last two axes."""
    *leading, rows, columns = shape
    return list(through[1:]) == [rows, columns] and list(to) == [*leading, columns, rows]


def _is_causal(mask: np.ndarray, queries: int, keys: int) -> bool:
    if queries != keys or mask.shape[-2:] != (queries, keys) or mask.size != queries * keys:
        return False
    flat = mask.reshape(queries, keys)
    below = np.tri(queries, dtype=bool)
    return bool((flat[below] == 0).all() and (flat[~below] <= np.finfo(flat.dtype).min).all())


# ---- a matmul and a bias, which exporters write as two or three nodes ------------------------------------------------

# Add(MatMul(x, Transpose(w)), bias) as one operator rounds once.

LINEAR = "onward.Linear"
"""The row of a table: `(x, weight, bias)`, with the weight as it is in the product."""


@dataclasses.dataclass(frozen=True)
class Linear(FusionMatch):
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


# ---- finding them ----------------------------------------------------------------------------------------------------


class _Finder:
    """Goes from node to node against the flow, as long as nobody else reads what is computed there."""

    def __init__(self, among: Container[ir.Node], kept: Container[ir.Value]):
        self._among = among
        self._kept = kept
        self.nodes: list[ir.Node] = []
        """The nodes of the match so far."""
        self._factors: list[tuple[ir.Value, bool]] = []

    def inside(self, value: ir.Value | None) -> ir.Node | None:
        """The node that computes a value which is not kept for others."""
        node = value.producer() if value is not None else None
        if node is None or node not in self._among or value in self._kept or not is_standard(node):
            return None
        return node

    def only(self, value: ir.Value | None, *operators: str) -> ir.Node | None:
        """The same, if it is one of some operators, and has a single reader."""
        node = self.inside(value)
        return node if node is not None and node.op_type in operators and len(readers(node)) == 1 else None

    def linear(self, last: ir.Node) -> Linear | None:
        """Return the matmul that a node adds a bias to."""
        if last.op_type != "Add":
            return None
        for product, bias in (last.inputs, last.inputs[::-1]):
            node = self.only(product, "MatMul")
            x, weight = node.inputs if node is not None else (None, None)
            if node is None or bias is None or x is None or weight is None:
                continue
            transpose = self.only(weight, "Transpose")
            if transpose is None or transpose.inputs[0] is None:
                return Linear([node, last], x, weight, bias, False)
            if list(transpose.attributes["perm"].as_ints()) == [1, 0]:
                return Linear([transpose, node, last], x, transpose.inputs[0], bias, True)
        return None

    def attention(self, last: ir.Node) -> Attention | None:
        """Return the attention that a matmul of weights and values ends."""
        if last.op_type != "MatMul":
            return None
        weights, v = last.inputs
        self.nodes.append(last)
        softmax, guarded = self._softmax(weights)
        if softmax is None or v is None:
            return None
        scores, mask = self._masked(self.inside(softmax.inputs[0]))
        scores = self._unscaled(scores)
        if scores is None or scores.op_type != "MatMul":
            return None
        self.nodes.append(scores)
        q, transposed = (self._without_factor(value) for value in scores.inputs)
        keys = self._untransposed(transposed)
        if q is None or keys is None:
            return None
        k, swap = keys
        return Attention(self.nodes[::-1], q, k, v, mask, self._factors, swap, guarded)

    def _softmax(self, weights: ir.Value | None) -> tuple[ir.Node | None, bool]:
        """The softmax over the last axis, behind `Where(IsNaN(weights), 0, weights)` if that is there."""
        guard = self.only(weights, "Where")
        if guard is not None:
            condition, _, inner = guard.inputs
            test = self.only(condition, "IsNaN")
            node = self.inside(inner)
            if test is None or node is None or test.inputs[0] is not inner or readers(node) != {guard, test}:
                return None, False
            self.nodes += [guard, test]
        else:
            node = self.only(weights, "Softmax")
        if node is None or node.op_type != "Softmax" or node.attributes.get_int("axis", -1) not in (-1, 3):
            return None, False
        self.nodes.append(node)
        return node, guard is not None

    def _masked(self, node: ir.Node | None) -> tuple[ir.Node | None, ir.Value | None]:
        """The scores, and the mask that is added to them."""
        if node is None or node.op_type != "Add" or len(readers(node)) != 1:
            return node, None
        for scores, mask in (node.inputs, node.inputs[::-1]):
            if (found := self.only(scores, "MatMul", "Mul", "Div")) is not None:
                self.nodes.append(node)
                return found, mask
        return None, None

    def _unscaled(self, node: ir.Node | None) -> ir.Node | None:
        if node is None or node.op_type not in ("Mul", "Div"):
            return node if node is not None and len(readers(node)) == 1 else None
        value, factor = node.inputs
        self.nodes.append(node)
        if factor is not None:
            self._factors.append((factor, node.op_type == "Div"))
        return self.only(value, "MatMul")

    def _without_factor(self, value: ir.Value | None) -> ir.Value | None:
        node = self.only(value, "Mul", "Div")
        if node is None or node.inputs[1] is None or not _may_be_scalar(node.inputs[1]):
            return value
        self.nodes.append(node)
        self._factors.append((node.inputs[1], node.op_type == "Div"))
        return node.inputs[0]

    def _untransposed(self, value: ir.Value | None) -> tuple[ir.Value, list[ir.Value]] | None:
        node = self.only(value, "Transpose", "Reshape")
        if node is None:
            return None
        self.nodes.append(node)
        k = node.inputs[0]
        if node.op_type == "Transpose":
            return (k, []) if k is not None and list(node.attributes["perm"].as_ints()) == [0, 1, 3, 2] else None
        transpose = self.only(k, "Transpose")
        if transpose is None or list(transpose.attributes["perm"].as_ints()) != [0, 2, 1]:
            return None
        reshape = self.only(transpose.inputs[0], "Reshape")
        if reshape is None or reshape.inputs[0] is None or reshape.inputs[1] is None or node.inputs[1] is None:
            return None
        self.nodes += [transpose, reshape]
        return reshape.inputs[0], [reshape.inputs[1], node.inputs[1]]


_PATTERNS = {"Attention": _Finder.attention, LINEAR: _Finder.linear}


def matches(nodes: Sequence[ir.Node], kept: Container[ir.Value], operators: Container[str]) -> Iterator[FusionMatch]:
    """What amounts to one of the operators, among some nodes; what is `kept` is read by others."""
    left = set(nodes)
    for operator, pattern in _PATTERNS.items():
        for node in nodes if operator in operators else ():
            if node in left and (match := pattern(_Finder(left, kept), node)) is not None:
                left -= set(match.nodes)
                yield match
