"""Translation of TensorFlow graphs: an operation hands its inputs to the function that its type has in a table.

Such a function takes a builder and the inputs. By keyword it may ask for attributes of the operation, and for `node`,
which knows the shapes of inputs and the values of constant ones. It returns the result, or several.

    operators(Tanh=lambda op, x: op.Tanh(x))

    @operators.define("ExpandDims")
    def expand_dims(op, x, _, *, node):
        return op.Unsqueeze(x, node.numbers(1))

An operation that is not in the table, or that its function refuses, becomes a value that nothing computes. If the
results turn out to depend on it, that is an error, and all such values are named in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.build import Builder, Expr
from onward.engines.framework import Operators, collect_operators, keywords
from onward.frameworks.formulas.graph_building import cast, constant_of
from onward.model.walk import ancestors

FAMILIES = ("elementwise", "reduction", "movement", "indexing", "convolution", "control")


@functools.cache
def operators() -> Operators:
    """The rows of all families."""
    return collect_operators("onward.frameworks.tensorflow.operators", FAMILIES)


class Refused(Exception):
    """An operation that ONNX cannot express as it is used; why."""


@dataclasses.dataclass(frozen=True)
class Resource:
    """A variable, as operations hand it to each other."""

    value: ir.Value
    """The initializer that holds it."""


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Why nothing computes a value, and what that would have read."""

    reason: str
    inputs: Sequence[ir.Value]


@dataclasses.dataclass
class Statistics:
    """A batch normalization in training: what it normalizes with, and what it hands out for averages to follow."""

    node: ir.Node
    batch: tuple[ir.Value, ir.Value]
    """Mean and variance of the batch."""
    sample: bool
    """Whether the variance is that of a sample, with n - 1."""


Value = Expr | Resource
Environment = dict[Any, Value]


class Translator:
    """What is known over all graphs of a function: how variables change, and what could not be expressed."""

    def __init__(self) -> None:
        self.unknown: dict[ir.Value, Unknown] = {}
        """Values that nothing computes."""
        self.updates: dict[ir.Value, Expr] = {}
        """Variables, and what they are assigned last."""
        self.statistics: list[Statistics] = []
        self.own_gradients = False
        """True if a function was given its derivative by hand (`tf.custom_gradient`), which a graph does not have."""

    @contextlib.contextmanager
    def without_updates(self) -> Iterator[None]:
        """Refuse what is assigned to variables meanwhile."""
        before = dict(self.updates)
        yield
        if self.updates != before:
            self.updates = before
            raise Refused("variables are assigned in a branch or in a loop")

    def inline(
        self, op: Builder, graph: Any, arguments: Iterable[Value], outputs: Sequence[Any] | None = None
    ) -> list[Value]:
        """Write the operations of a graph, given its inputs; what it returns, or other tensors of it."""
        wanted = graph.outputs if outputs is None else outputs
        needed = _needed_operations(graph, wanted)
        known: Environment = {x.ref(): _inside(op, value) for x, value in zip(graph.inputs, arguments, strict=True)}
        for operation in graph.get_operations():
            if operation in needed and operation.type != "Placeholder":
                results = self._results(op, operation, known)
                known.update(zip((y.ref() for y in operation.outputs), results, strict=False))
        return [known[y.ref()] for y in wanted]

    def _results(self, op: Builder, operation: Any, known: Environment) -> Sequence[Value]:
        function = operators().get(operation.type)
        node = Node(self, operation, known)
        try:
            if function is None:
                raise Refused("there is no such operator in the table")
            given = {name: node if name == "node" else node.attribute(name) for name in keywords(function)}
            results = function(op, *(known[x.ref()] for x in operation.inputs), **given)
        except Refused as refusal:
            inputs = [known[x.ref()].value for x in operation.inputs]
            return [self.placeholder(op, node, str(refusal), y, inputs) for y in operation.outputs]
        results = list(results) if isinstance(results, tuple | list) else [results]
        for y in operation.outputs[len(results) :]:  # which TensorFlow keeps for its own gradients
            results.append(self.placeholder(op, node, f"there is no operator for its output `{y.name}`", y))
        for y, result in zip(operation.outputs, results, strict=False):
            if isinstance(result, Expr) and result.value.producer() is not None and y.dtype not in _OPAQUE:
                result.value.type, result.value.shape = ir.TensorType(dtype_of(y.dtype)), _shape(y.shape, result.value)
        return results

    def placeholder(self, op: Builder, node: Node, reason: str, like: Any, inputs: Sequence[ir.Value] = ()) -> Expr:
        """A value that nothing computes, since an operation could not be expressed."""
        value = ir.Value(name=op.names.fresh("unknown"), shape=_shape(like.shape, None))
        value.type = None if like.dtype in _OPAQUE else ir.TensorType(dtype_of(like.dtype))
        self.unknown[value] = Unknown(f"`{node.operation.type}` (`{node.operation.name}`): {reason}", inputs)
        return op(value)

    def obstacles(self, outputs: Iterable[ir.Value]) -> list[str]:
        """What could not be expressed of all that results depend on."""
        reasons: dict[str, None] = {}
        pending, seen = set(outputs), set[ir.Value]()
        while pending:
            _, reached = ancestors(pending)
            found = [value for value in self.unknown if value in reached and value not in seen]
            seen.update(found)
            reasons.update(dict.fromkeys(self.unknown[value].reason for value in found))
            pending = {x for value in found for x in self.unknown[value].inputs}
        return list(reasons)


_EFFECTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "StatefulPartitionedCall", "If", "While")


def _needed_operations(graph: Any, outputs: Iterable[Any]) -> set[Any]:
    """The operations that results depend on, and those that may change variables."""
    pending = [y.op for y in outputs] + [found for found in graph.get_operations() if found.type in _EFFECTS]
    needed: set[Any] = set()
    while pending:
        operation = pending.pop()
        if operation not in needed:
            needed.add(operation)
            pending += [x.op for x in operation.inputs]
    return needed


def _inside(op: Builder, value: Value) -> Value:
    """The same value for expressions that this builder writes: it may be that of a nested graph."""
    return op(value.value) if isinstance(value, Expr) else value


_OPAQUE = (tf.resource, tf.variant, tf.string)


class Node:
    """One operation, as functions of the table see it."""

    def __init__(self, translator: Translator, operation: Any, known: Environment):
        self.translator = translator
        self.operation = operation
        self._known = known

    def attribute(self, name: str) -> Any:
        value = self.operation.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value

    def shape(self, index: int) -> list[int | None]:
        shape = self._shape(self.operation.inputs[index])
        if shape.rank is None:
            raise Refused("nobody knows how many axes its input has")
        found: list[int | None] = shape.as_list()
        return found

    def _shape(self, tensor: Any) -> Any:
        """As TensorFlow has it, or, behind calls of which it does not know what they return, as we have it."""
        value = self._known.get(tensor.ref())
        if tensor.shape.rank is not None or not isinstance(value, Expr) or value.value.shape is None:
            return tensor.shape
        return tf.TensorShape([size if isinstance(size, int) else None for size in value.value.shape])

    def rank(self, index: int) -> int:
        return len(self.shape(index))

    def size(self, index: int, axis: int) -> int:
        found = self.shape(index)[axis]
        if found is None:
            raise Refused(f"the size of its input along axis {axis} is not known")
        return found

    def known(self, index: int) -> np.ndarray | None:
        """The value of an input, if it is constant."""
        return self.constant(self.operation.inputs[index])

    def constant(self, tensor: Any) -> np.ndarray | None:
        found = tf.get_static_value(tensor)
        if found is not None:
            return np.asarray(found)
        value = self._known[tensor.ref()]  # of another graph, if this is a function that was called with a constant
        return None if isinstance(value, Resource) else constant_of(value)

    def array(self, index: int) -> np.ndarray:
        found = self.known(index)
        if found is None:
            raise Refused(f"its input {index} is computed, where ONNX needs a constant")
        return found

    def numbers(self, index: int) -> list[int]:
        """A constant vector, or number, of integers."""
        found: list[int] = self.array(index).reshape(-1).tolist()
        return found

    def number(self, index: int) -> Any:
        return self.array(index).item()

    def value(self, tensor: Any) -> Value:
        """What another operation of the same graph has computed."""
        return self._known[tensor.ref()]

    def of(self, operation: Any) -> Node:
        """Another operation of the same graph."""
        return Node(self.translator, operation, self._known)

    def read(self, op: Builder, variable: Resource) -> Expr:
        """What a variable is at this point."""
        updated = self.translator.updates.get(variable.value)
        return op(variable.value if updated is None else updated.value)

    def function(self, attribute: str) -> Any:
        """The graph of a function that the operation calls."""
        found = self.operation.graph._get_function(self.operation.get_attr(attribute).name)
        if not hasattr(found, "graph"):
            raise Refused("it calls a function that TensorFlow keeps without its graph")
        return found.graph


# ---- types -----------------------------------------------------------------------------------------------------------


def dtype_of(dtype: Any) -> ir.DataType:
    return ir.DataType.from_numpy(np.dtype(dtype.as_numpy_dtype))


def as_int64(op: Builder, x: Expr) -> Expr:
    """What says how large or where something is, as ONNX has it."""
    return cast(op, x, ir.DataType.INT64)


def _shape(found: Any, value: ir.Value | None) -> ir.Shape | None:
    """What TensorFlow knows of a shape, and what we know."""
    ours = None if value is None else value.shape
    if found.rank is None:
        return ours
    sizes = found.as_list()
    if ours is not None and ours.rank() == found.rank:
        sizes = [known if size is None else size for size, known in zip(sizes, ours, strict=True)]
    return ir.Shape(sizes)
