"""Groups of nodes that a framework computes faster, or more exactly, as one operator.

Matches are found when a graph is planned and checked again at run time, when shapes are known. If
the check fails, the nodes run one by one.
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
    """Nodes that are equivalent to one operator of a framework."""

    nodes: Sequence[ir.Node]
    """Nodes of the match. The last node has the output."""

    @property
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    @property
    @abstractmethod
    def inputs(self) -> list[ir.Value]:
        """Values that `compute` reads."""

    @abstractmethod
    def compute(self, framework: Framework, values: dict[ir.Value, Any]) -> Any:
        """Return the output, or NotImplemented if the values show that the match is wrong."""


def readers(node: ir.Node) -> set[ir.Node]:
    return {reader for output in node.outputs for reader, _ in output.uses()}


# ---- attention that an exporter has written out ----------------------------------------------------------------------

# MatMul(Softmax(MatMul(q * scale, kᵀ * scale) + mask), v)
#
# The shapes decide at run time whether the mask is causal, and whether reshapes swap two axes.


@dataclasses.dataclass(frozen=True)
class Attention(FusionMatch):
    """Attention of queries, keys and values."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None
    factors: Sequence[tuple[ir.Value, bool]]
    """Factors of queries, keys or scores; divisors if True."""
    swap: Sequence[ir.Value]
    """The two shapes of the reshapes that transpose keys. Empty if a Transpose does it."""
    guarded: bool
    """True if rows that attend to nothing become zeros."""

    @property
    def inputs(self) -> list[ir.Value]:
        mask = [self.mask] if self.mask is not None else []
        return [self.q, self.k, self.v, *(value for value, _ in self.factors), *self.swap, *mask]

    def compute(self, framework: Framework, values: dict[ir.Value, Any]) -> Any:
        q, k, v = (values[value] for value in (self.q, self.k, self.v))
        factors = [values[value] for value, _ in self.factors]
        shapes = [values[value] for value in self.swap]
        mask = None if self.mask is None else values[self.mask]
        is_static = all(isinstance(array, np.ndarray) for array in (*factors, *shapes))
        if not is_static or any(isinstance(x, np.ndarray) or len(x.shape) != 4 for x in (q, k, v)):
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
        mask = None if causal or mask is None else framework.place(mask)
        attributes = {"scale": float(scale), "is_causal": int(causal), "kv_num_heads": None, "q_num_heads": None}
        return framework.operators["Attention"](q, k, v, mask, **attributes)


def _may_be_scalar(value: ir.Value) -> bool:
    return value.shape is None or all(size == 1 for size in value.shape)


def _swaps(shape: Sequence[int], through: np.ndarray, to: np.ndarray) -> bool:
    """True if a reshape, a transpose and a reshape swap the last two axes."""
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
"""Operator `(x, weight, bias)` with the weight as in the matmul."""


@dataclasses.dataclass(frozen=True)
class Linear(FusionMatch):
    x: ir.Value
    weight: ir.Value
    bias: ir.Value
    transposed: bool
    """True if the weight is transposed before the matmul."""

    @property
    def inputs(self) -> list[ir.Value]:
        return [self.x, self.weight, self.bias]

    def compute(self, framework: Framework, values: dict[ir.Value, Any]) -> Any:
        x, weight, bias = (values[value] for value in self.inputs)
        tensors = not any(isinstance(value, np.ndarray) for value in (x, weight, bias))
        if not tensors or len(weight.shape) != 2 or len(bias.shape) != 1 or len(x.shape) < 2:
            return NotImplemented
        weight = framework.operators["Transpose"](weight, perm=[1, 0]) if self.transposed else weight
        if weight.shape[1] != bias.shape[0]:
            return NotImplemented
        return framework.operators[LINEAR](x, weight, bias)


# ---- matching --------------------------------------------------------------------------------------------------------


class _Matcher:
    """Search for one match, from its last node to its inputs."""

    def __init__(self, candidates: Container[ir.Node], results: Container[ir.Value]):
        self._candidates = candidates
        self._results = results
        self.nodes: list[ir.Node] = []
        """Matched nodes so far."""
        self._factors: list[tuple[ir.Value, bool]] = []

    def inside(self, value: ir.Value | None) -> ir.Node | None:
        """Return the candidate that computes a value, unless the value is a result of the graph."""
        node = value.producer() if value is not None else None
        if node is None or node not in self._candidates or value in self._results or not is_standard(node):
            return None
        return node

    def only(self, value: ir.Value | None, *operators: str) -> ir.Node | None:
        """Return the producer of a value if it is one of the operators and has a single reader."""
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
        """Return the attention whose last node is a matmul of weights and values."""
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
        """Return the softmax over the last axis, and if `Where(IsNaN(w), 0, w)` follows it."""
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
        """Return the scores and the mask that is added to them."""
        if node is None or node.op_type != "Add" or len(readers(node)) != 1:
            return node, None
        for scores, mask in (node.inputs, node.inputs[::-1]):
            if (producer := self.only(scores, "MatMul", "Mul", "Div")) is not None:
                self.nodes.append(node)
                return producer, mask
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


_PATTERNS = {"Attention": _Matcher.attention, LINEAR: _Matcher.linear}


def matches(nodes: Sequence[ir.Node], results: Container[ir.Value], operators: Container[str]) -> Iterator[FusionMatch]:
    """Yield groups of nodes that are equivalent to one of the operators; `results` are read outside of the nodes."""
    left = set(nodes)
    for operator, pattern in _PATTERNS.items():
        for node in nodes if operator in operators else ():
            if node in left and (match := pattern(_Matcher(left, results), node)) is not None:
                left -= set(match.nodes)
                yield match
