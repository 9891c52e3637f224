"""Attention that an exporter has written out: found in the graph, and handed to the framework's own, where it is that.

    MatMul(Softmax(MatMul(q * scale, kᵀ * scale) + mask), v)

What the numbers are (whether the mask is causal, whether reshapes swap two axes) is known only when the shapes are. So
a match holds the nodes too, which are executed as they stand where the numbers are not those of attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.run.framework import Framework

@dataclasses.dataclass(frozen=True)
class Match:
    """Nodes that compute attention, and of what."""

    nodes: Sequence[ir.Node]
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
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    @property
    def inputs(self) -> list[ir.Value]:
        mask = [self.mask] if self.mask is not None else []
        return [self.q, self.k, self.v, *(value for value, _ in self.factors), *self.swap, *mask]


def matches(nodes: Sequence[ir.Node], kept: Container[ir.Value]) -> Iterator[Match]:
    """All attention among some nodes; what is `kept` is read by others."""
    among = set(nodes)
    for node in nodes:
        if node.op_type == "MatMul" and (match := _Matcher(among, kept).match(node)) is not None:
            yield match


class _Matcher:
    """Follows one product of weights and values back to queries and keys."""

    def __init__(self, among: Container[ir.Node], kept: Container[ir.Value]):
        self._among = among
        self._kept = kept
        self._nodes: list[ir.Node] = []
        self._factors: list[tuple[ir.Value, bool]] = []

    def match(self, last: ir.Node) -> Match | None:
        weights, v = last.inputs
        self._nodes.append(last)
        softmax, guarded = self._softmax(weights)
        if softmax is None or v is None:
            return None
        scores, mask = self._masked(self._inside(softmax.inputs[0]))
        scores = self._unscaled(scores)
        if scores is None or scores.op_type != "MatMul":
            return None
        self._nodes.append(scores)
        q, transposed = (self._without_factor(value) for value in scores.inputs)
        keys = self._untransposed(transposed)
        if q is None or keys is None:
            return None
        k, swap = keys
        return Match(self._nodes[::-1], q, k, v, mask, self._factors, swap, guarded)

    def _inside(self, value: ir.Value | None) -> ir.Node | None:
        """The node that computes a value which nobody else reads."""
        node = value.producer() if value is not None else None
        if node is None or node not in self._among or value in self._kept or node.domain not in ("", "ai.onnx"):
            return None
        return node

    def _only(self, value: ir.Value | None, *operators: str) -> ir.Node | None:
        node = self._inside(value)
        return node if node is not None and node.op_type in operators and len(_readers(node)) == 1 else None

    def _softmax(self, weights: ir.Value | None) -> tuple[ir.Node | None, bool]:
        """The softmax over the last axis, behind `Where(IsNaN(weights), 0, weights)` if that is there."""
        guard = self._only(weights, "Where")
        if guard is not None:
            condition, _, inner = guard.inputs
            test = self._only(condition, "IsNaN")
            node = self._inside(inner)
            if test is None or node is None or test.inputs[0] is not inner or _readers(node) != {guard, test}:
                return None, False
            self._nodes += [guard, test]
        else:
            node = self._only(weights, "Softmax")
        if node is None or node.op_type != "Softmax" or node.attributes.get_int("axis", -1) not in (-1, 3):
            return None, False
        self._nodes.append(node)
        return node, guard is not None

    def _masked(self, node: ir.Node | None) -> tuple[ir.Node | None, ir.Value | None]:
        """The scores, and the mask that is added to them."""
        if node is None or node.op_type != "Add" or len(_readers(node)) != 1:
            return node, None
        for scores, mask in (node.inputs, node.inputs[::-1]):
            if (found := self._only(scores, "MatMul", "Mul", "Div")) is not None:
                self._nodes.append(node)
                return found, mask
        return None, None

    def _unscaled(self, node: ir.Node | None) -> ir.Node | None:
        if node is None or node.op_type not in ("Mul", "Div"):
            return node if node is not None and len(_readers(node)) == 1 else None
        value, factor = node.inputs
        self._nodes.append(node)
        if factor is not None:
            self._factors.append((factor, node.op_type == "Div"))
        return self._only(value, "MatMul")

    def _without_factor(self, value: ir.Value | None) -> ir.Value | None:
        node = self._only(value, "Mul", "Div")
        if node is None or node.inputs[1] is None or not _may_be_scalar(node.inputs[1]):
            return value
        self._nodes.append(node)
        self._factors.append((node.inputs[1], node.op_type == "Div"))
        return node.inputs[0]

    def _untransposed(self, value: ir.Value | None) -> tuple[ir.Value, list[ir.Value]] | None:
        node = self._only(value, "Transpose", "Reshape")
        if node is None:
            return None
        self._nodes.append(node)
        k = node.inputs[0]
        if node.op_type == "Transpose":
            return (k, []) if k is not None and list(node.attributes["perm"].as_ints()) == [0, 1, 3, 2] else None
        transpose = self._only(k, "Transpose")
        if transpose is None or list(transpose.attributes["perm"].as_ints()) != [0, 2, 1]:
            return None
        reshape = self._only(transpose.inputs[0], "Reshape")
        if reshape is None or reshape.inputs[0] is None or reshape.inputs[1] is None or node.inputs[1] is None:
            return None
        self._nodes += [transpose, reshape]
        return reshape.inputs[0], [reshape.inputs[1], node.inputs[1]]


def _readers(node: ir.Node) -> set[ir.Node]:
    return {reader for output in node.outputs for reader, _ in output.uses()}


def _may_be_scalar(value: ir.Value) -> bool:
    return value.shape is None or all(size == 1 for size in value.shape)


# ---- execution -------------------------------------------------------------------------------------------------------


def attend(match: Match, framework: Framework, values: dict[ir.Value, Any]) -> Any:
    """What the nodes compute, by the framework's own attention; NotImplemented if the numbers are others."""
    q, k, v = (values[value] for value in (match.q, match.k, match.v))
    factors = [values[value] for value, _ in match.factors]
    shapes = [values[value] for value in match.swap]
    mask = None if match.mask is None else values[match.mask]
    known = all(isinstance(array, np.ndarray) for array in (*factors, *shapes))
    if not known or any(isinstance(x, np.ndarray) or len(x.shape) != 4 for x in (q, k, v)):
        return NotImplemented
    if not all(factor.size == 1 for factor in factors) or (shapes and not _swaps(k.shape, *shapes)):
        return NotImplemented
    scale = np.prod(
        [1 / f.item() if divides else f.item() for f, (_, divides) in zip(factors, match.factors, strict=True)]
    )
    causal = isinstance(mask, np.ndarray) and _is_causal(mask, q.shape[2], k.shape[2])
    if match.guarded and mask is not None and not causal and not _always_attends(mask):
        return NotImplemented
    placed = None if causal or mask is None else framework.place(mask)
    given = {"scale": float(scale), "is_causal": int(causal)} | _PLAIN
    return framework.operators["Attention"](q, k, v, placed, **given)[0]


_PLAIN = {
    "kv_num_heads": None,
    "q_num_heads": None,
    "qk_matmul_output_mode": 0,
    "softcap": 0.0,
    "softmax_precision": None,
    "outputs": 1,
}
"""What else `Attention` may be told."""


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


def _always_attends(mask: Any) -> bool:
    return isinstance(mask, np.ndarray) and bool(np.isfinite(mask).any(-1).all())
