"""Translation of TensorFlow graphs: each operation calls the function of its type in a table.

Such a function takes a builder and the inputs, and returns the result or several. Its keywords are
attributes of the operation, and `node`, which knows the shapes of inputs and the values of constant
ones.

    operators(Tanh=lambda op, x: op.Tanh(x))

    @operators.define("ExpandDims")
    def expand_dims(op, x, _, *, node):
        return op.Unsqueeze(x, node.numbers(1))

An operation without a function, or that its function refuses, becomes a value that no node
computes. If results depend on such values, one error names them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.build import Builder, Expr
from onward.engines.framework import Operators, collect_operators, keywords
from onward.frameworks.formulas.graph_building import cast, value_of
from onward.model.walk import ancestors

FAMILIES = ("elementwise", "reduction", "movement", "indexing", "convolution", "control")


@functools.cache
def operators() -> Operators:
    return collect_operators("onward.frameworks.tensorflow.operators", FAMILIES)


class RefusedOperation(Exception):
    """Reason why an operation of TensorFlow cannot be expressed in ONNX."""


@dataclasses.dataclass(frozen=True)
class Resource:
    """Variable, as an input of operations."""

    value: ir.Value  # initializer


class Replacement(Protocol):
    def __call__(self, op: Builder, inputs: Sequence[Any], node: Node) -> Sequence[Any] | None:
        """Return the results of a call; None to inline its function."""


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Missing value: the reason why no node computes it, and the inputs of its operation."""

    reason: str
    inputs: Sequence[ir.Value]


@dataclasses.dataclass
class Statistics:
    """Batch normalization in training, with the statistics that averages read."""

    node: ir.Node
    batch: tuple[ir.Value, ir.Value]  # mean and variance of the batch
    sample: bool  # True if the variance is divided by n - 1


class Layouts(Protocol):
    """Value that a replaced call takes and returns, with its tensor in the layout of TensorFlow."""

    @property
    def plain(self) -> Expr: ...


Value = Expr | Resource | Layouts
Environment = dict[Any, Value]


class Translator:
    """Translator of all graphs of a function, with updates of variables and missing values."""

    def __init__(self, calls: Mapping[str, Replacement] | None = None) -> None:
        self.calls = calls or {}
        """Replacements of calls, by a part of the name of the function."""
        self.unknown: dict[ir.Value, Unknown] = {}  # values that no node computes
        self.updates: dict[ir.Value, Expr] = {}  # last values assigned to variables
        self.statistics: list[Statistics] = []
        self.own_gradients = False  # True for `tf.custom_gradient`, which a graph does not contain

    @contextlib.contextmanager
    def without_updates(self) -> Iterator[None]:
        """Refuse assignments to variables in the block."""
        before = dict(self.updates)
        yield
        if self.updates != before:
            self.updates = before
            raise RefusedOperation("variables are assigned in a branch or in a loop")

    def inline(
        self, op: Builder, graph: Any, arguments: Iterable[Value], outputs: Sequence[Any] | None = None
    ) -> list[Value]:
        """Write the operations of a graph for these inputs; return `outputs` (default: those of the graph)."""
        requested = graph.outputs if outputs is None else outputs
        needed = _needed_operations(graph, requested)
        environment: Environment = {
            x.ref(): op(value.value) if isinstance(value, Expr) else value
            for x, value in zip(graph.inputs, arguments, strict=True)
        }
        for operation in graph.get_operations():
            if operation in needed and operation.type != "Placeholder":
                results = self._results(op, operation, environment)
                environment.update(zip((y.ref() for y in operation.outputs), results, strict=False))
        return [environment[y.ref()] for y in requested]

    def _results(self, op: Builder, operation: Any, environment: Environment) -> Sequence[Value]:
        function = operators().get(operation.type)
        node = Node(self, operation, environment)
        try:
            if function is None:
                raise RefusedOperation("no ONNX operator computes it")
            settings = {name: node if name == "node" else node.attribute(name) for name in keywords(function)}
            is_call = operation.type in _CALLS
            arguments = (environment[x.ref()] for x in operation.inputs)
            results = function(op, *(x if is_call else unwrapped(x) for x in arguments), **settings)
        except RefusedOperation as refusal:
            inputs = [unwrapped(environment[x.ref()]).value for x in operation.inputs]
            return [self.placeholder(op, node, str(refusal), y, inputs) for y in operation.outputs]
        results = list(results) if isinstance(results, tuple | list) else [results]
        for y in operation.outputs[len(results) :]:  # outputs that only TensorFlow's gradients read
            results.append(self.placeholder(op, node, f"no ONNX operator computes its output `{y.name}`", y))
        for y, result in zip(operation.outputs, results, strict=False):
            if isinstance(result, Expr) and result.value.producer() is not None and y.dtype not in _OPAQUE:
                result.value.type, result.value.shape = ir.TensorType(dtype_of(y.dtype)), _shape(y.shape, result.value)
        return results

    def placeholder(self, op: Builder, node: Node, reason: str, like: Any, inputs: Sequence[ir.Value] = ()) -> Expr:
        value = ir.Value(name=op.names.fresh("unknown"), shape=_shape(like.shape, None))
        value.type = None if like.dtype in _OPAQUE else ir.TensorType(dtype_of(like.dtype))
        self.unknown[value] = Unknown(f"`{node.operation.type}` (`{node.operation.name}`): {reason}", inputs)
        return op(value)

    def obstacles(self, outputs: Iterable[ir.Value]) -> list[str]:
        """Return the reasons for all missing values on which results depend."""
        reasons: dict[str, None] = {}
        pending, seen = set(outputs), set[ir.Value]()
        while pending:
            _, reached = ancestors(pending)
            missing = [value for value in self.unknown if value in reached and value not in seen]
            seen.update(missing)
            reasons.update(dict.fromkeys(self.unknown[value].reason for value in missing))
            pending = {x for value in missing for x in self.unknown[value].inputs}
        return list(reasons)


def unwrapped(value: Value) -> Expr | Resource:
    return value if isinstance(value, Expr | Resource) else value.plain


_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_EFFECTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "StatefulPartitionedCall", "If", "While")


def _needed_operations(graph: Any, outputs: Iterable[Any]) -> set[Any]:
    """Return the operations on which results depend, and those that may assign variables."""
    pending = [y.op for y in outputs] + [x for x in graph.get_operations() if x.type in _EFFECTS]
    needed: set[Any] = set()
    while pending:
        operation = pending.pop()
        if operation not in needed:
            needed.add(operation)
            pending += [x.op for x in operation.inputs]
    return needed


_OPAQUE = (tf.resource, tf.variant, tf.string)


class Node:
    """Operation, as an argument of the functions in the table."""

    def __init__(self, translator: Translator, operation: Any, environment: Environment):
        self.translator = translator
        self.operation = operation
        self._environment = environment

    def attribute(self, name: str) -> Any:
        value = self.operation.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value

    def shape(self, index: int) -> list[int | None]:
        shape = self._shape(self.operation.inputs[index])
        if shape.rank is None:
            raise RefusedOperation("the rank of its input is unknown")
        return list(shape.as_list())

    def _shape(self, tensor: Any) -> Any:
        """Return the shape of TensorFlow, or ours if it is unknown, as after a call."""
        value = self._environment.get(tensor.ref())
        if tensor.shape.rank is not None or not isinstance(value, Expr) or value.value.shape is None:
            return tensor.shape
        return tf.TensorShape([size if isinstance(size, int) else None for size in value.value.shape])

    def rank(self, index: int) -> int:
        return len(self.shape(index))

    def size(self, index: int, axis: int) -> int:
        size = self.shape(index)[axis]
        if size is None:
            raise RefusedOperation(f"the size of its input along axis {axis} is unknown")
        return size

    def known(self, index: int) -> np.ndarray | None:
        return self.constant(self.operation.inputs[index])

    def constant(self, tensor: Any) -> np.ndarray | None:
        """Return the value of a tensor; None if it is not constant."""
        static = tf.get_static_value(tensor)
        if static is not None:
            return np.asarray(static)
        value = unwrapped(self._environment[tensor.ref()])  # may be a constant in the graph of the caller
        return None if isinstance(value, Resource) else value_of(value)

    def array(self, index: int) -> np.ndarray:
        array = self.known(index)
        if array is None:
            raise RefusedOperation(f"its input {index} is computed, but ONNX needs a constant")
        return array

    def numbers(self, index: int) -> list[int]:
        return list(self.array(index).reshape(-1).tolist())

    def number(self, index: int) -> Any:
        return self.array(index).item()

    def value(self, tensor: Any) -> Expr | Resource:
        """Return the result of another operation of the same graph."""
        return unwrapped(self._environment[tensor.ref()])

    def of(self, operation: Any) -> Node:
        return Node(self.translator, operation, self._environment)

    def read(self, op: Builder, variable: Resource) -> Expr:
        """Return the current value of a variable."""
        updated = self.translator.updates.get(variable.value)
        return op(variable.value if updated is None else updated.value)

    def function(self, attribute: str) -> Any:
        """Return the graph of a function that the operation calls."""
        called = self.operation.graph._get_function(self.operation.get_attr(attribute).name)
        if not hasattr(called, "graph"):
            raise RefusedOperation("it calls a function whose graph TensorFlow does not keep")
        return called.graph


def dtype_of(dtype: Any) -> ir.DataType:
    return ir.DataType.from_numpy(np.dtype(dtype.as_numpy_dtype))


def as_int64(op: Builder, x: Expr) -> Expr:
    return cast(op, x, ir.DataType.INT64)


def _shape(shape: Any, value: ir.Value | None) -> ir.Shape | None:
    """Return a shape of TensorFlow, with dynamic sizes as ours if these are known."""
    ours = None if value is None else value.shape
    if shape.rank is None:
        return ours
    sizes = shape.as_list()
    if ours is not None and ours.rank() == shape.rank:
        sizes = [our_size if size is None else size for size, our_size in zip(sizes, ours, strict=True)]
    return ir.Shape(sizes)
