"""Constant folding of scales and masks, and helpers to match patterns of nodes."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor
from onward.model.core import gradients_in, strings, visible
from onward.model.walk import read_by
from onward.standard import is_standard

_MOST = 2**22
"""Largest number of elements of a computed constant: masks of 2048 tokens have as many."""


class Constants:
    """Evaluates values that are the same in every run, each once."""

    def __init__(self) -> None:
        self._arrays: dict[ir.Value, np.ndarray | None] = {}

    def array(self, value: ir.Value | None) -> np.ndarray | None:
        """Return a value as an array; None if it may change from run to run."""
        if value is None or (value.is_graph_input() and not value.is_initializer()):
            return None
        if value not in self._arrays:
            self._arrays[value] = None  # ends recursion in a cyclic graph
            self._arrays[value] = self._computed(value)
        return self._arrays[value]

    def number(self, value: ir.Value | None) -> float | None:
        array = self.array(value)
        return None if array is None or array.size != 1 else float(array.reshape(()))

    def _computed(self, value: ir.Value) -> np.ndarray | None:
        tensor, node = constant_tensor(value), value.producer()
        if tensor is not None:
            return tensor.numpy() if tensor.size <= _MOST else None
        if node is None or not is_standard(node):
            return None
        try:
            with np.errstate(all="ignore"):
                return self._applied(node)
        except (IndexError, TypeError, ValueError):  # an invalid node fails when it runs
            return None

    def _applied(self, node: ir.Node) -> np.ndarray | None:
        if node.op_type == "Gather":
            return self._gathered(node)
        if node.op_type in ("Cast", "CastLike"):
            array, dtype = self.array(node.inputs[0]), node.outputs[0].dtype
            return None if array is None or dtype is None else array.astype(dtype.numpy())
        if (function := _FUNCTIONS.get(node.op_type)) is None:
            return None
        if node.op_type == "Shape":
            shape = node.inputs[0].shape if node.inputs[0] is not None else None
            inputs = [np.array(list(shape), np.int64) if shape is not None and shape.is_static() else None]
        else:
            inputs = [self.array(value) for value in node.inputs]
        arrays = [array for array in inputs if array is not None]
        if len(arrays) < len(inputs) or sum(array.size for array in arrays) > _MOST:
            return None
        return function(*arrays, **{name: attribute.value for name, attribute in node.attributes.items()})

    def _gathered(self, node: ir.Node) -> np.ndarray | None:
        """Gather from a constant, or from the known sizes of a partly dynamic shape."""
        source, indices = node.inputs[0], self.array(node.inputs[1])
        shape = source.producer() if source is not None else None
        if indices is None or node.attributes.get_int("axis", 0) != 0:
            return None
        if shape is None or shape.op_type != "Shape" or set(shape.attributes) - {"start"}:
            array = self.array(source)
            return None if array is None else np.take(array, indices, 0)
        sizes = () if shape.inputs[0] is None else tuple(shape.inputs[0].shape or ())
        dims = sizes[shape.attributes.get_int("start", 0) :]
        picked = [dims[i] for i in indices.reshape(-1) if -len(dims) <= i < len(dims)]
        if len(picked) != indices.size or not all(isinstance(n, int) for n in picked):
            return None
        return np.array(picked, np.int64).reshape(indices.shape)


def _slice(x: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: Any = None, steps: Any = None) -> np.ndarray:
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = np.ones_like(starts) if steps is None else steps
    cut = dict(zip(axes, map(slice, starts.tolist(), ends.tolist(), steps.tolist()), strict=True))
    return x[tuple(cut.get(axis, cut.get(axis - x.ndim, slice(None))) for axis in range(x.ndim))]


_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "Concat": lambda *xs, axis: np.concatenate(xs, axis),
    "Div": lambda a, b: a / b if a.dtype.kind == "f" else a // b,
    "Equal": np.equal,
    "Expand": lambda x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist()))),
    "Identity": lambda x: x,
    "Mul": np.multiply,
    "Not": np.logical_not,
    "Pow": np.power,
    "Reciprocal": np.reciprocal,
    "Shape": lambda sizes, start=0, end=None: sizes[start:end],
    "Slice": _slice,
    "Sqrt": np.sqrt,
    "Trilu": lambda x, k=0, upper=1: np.triu(x, int(k)) if upper else np.tril(x, int(k)),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes.tolist())),
    "Where": np.where,
}
"""Operators with which exporters compute scales and causal masks."""


# ---- nodes around a value --------------------------------------------------------------------------------------------


def producer_of(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """Return the producer of a value, if it is one of these standard operators."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in operators and is_standard(node) else None


def sole_producer(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """Return the producer like `producer_of`, if only one node reads its result."""
    node = producer_of(value, *operators)
    if node is None or value is None or value.is_graph_output() or len({use.node for use in value.uses()}) != 1:
        return None
    return node


def differentiable_values(graph: ir.Graph) -> Container[ir.Value | None]:
    """Return the values that depend on variables of a Gradient, not only by shape or type."""
    reached: set[ir.Value | None] = set()
    for node, scope in gradients_in(graph):
        known_values = visible(scope)
        reached.update(known_values[x] for x in strings(node, "xs"))
    for node in graph:
        inputs = node.inputs[:1] if node.op_type == "CastLike" else read_by(node)
        if any(value in reached for value in inputs):
            reached.update(v for v in node.outputs if v.dtype is None or v.dtype.is_floating_point())
    return reached
