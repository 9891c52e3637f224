"""Helpers for graphs of functions of any framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import tensor_in
from onward.inspect import describe
from onward.model import Model
from onward.model.core import as_input
from onward.model.walk import ancestors, is_random
from onward.runtime.sessions import evaluate
from onward.standard import IR_VERSION
from onward.transform.training import drop_unused_definitions

END = np.iinfo(np.int64).max  # after the last element of any axis


def same_operator(op_type: str) -> Callable[..., Expr]:
    """Return a row that calls an operator of ONNX with the same inputs."""
    return lambda op, *xs: op.node("", op_type, *xs)


def dtype_of(dtype: Any) -> ir.DataType:
    return ir.DataType.from_numpy(np.dtype(dtype))


def cast(op: Builder, x: Expr, dtype: Any) -> Expr:
    target = dtype if isinstance(dtype, ir.DataType) else dtype_of(dtype)
    return x if x.dtype is target else op.Cast(x, to=target)


def constant_of(x: Expr) -> np.ndarray | None:
    """Return the value of a constant; None for a computed value."""
    tensor = tensor_in(x.value.producer())
    return None if tensor is None else tensor.numpy()


def value_of(x: Expr) -> np.ndarray | None:
    """Return the value of a constant, or of what is computed from constants alone; else None."""
    array = constant_of(x)
    nodes, read = (set[ir.Node](), set[ir.Value]()) if array is not None else ancestors([x.value])
    inside = [node for node in x.op.graph if node in nodes]
    if array is not None or len(inside) < len(nodes) or any(y.producer() is None for y in read):
        return array
    if any(is_random(node) or node.domain for node in nodes):
        return None
    view = ir.GraphView([], [x.value], nodes=inside, opset_imports={"": x.op.opset})
    return evaluate(Model(ir.Model(view.clone(), ir_version=IR_VERSION)))[0]


def permute(op: Builder, x: Expr, order: Sequence[int]) -> Expr:
    """Transpose `x`. Successive transpositions, as between convolutions, become one or none."""
    before = x.value.producer()
    if before is not None and before.op_type == "Transpose" and before.inputs[0] is not None:
        perm = before.attributes["perm"].as_ints()
        return permute(op, op(before.inputs[0]), [perm[axis] for axis in order])
    return x if list(order) == sorted(order) else op.Transpose(x, perm=list(order))


def inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(axis) for axis in range(len(order))]


def reverse(op: Builder, x: Expr, axes: Sequence[int]) -> Expr:
    count = len(axes)
    return op.Slice(x, [-1] * count, [-END] * count, list(axes), [-1] * count) if count else x


def stack(op: Builder, xs: Iterable[Expr], axis: int) -> Expr:
    return op.Concat(*(op.Unsqueeze(x, [axis]) for x in xs), axis=axis)


def unstack(op: Builder, x: Expr, count: int, axis: int) -> list[Expr]:
    return [op.Gather(x, op.constant(np.int64(i)), axis=axis) for i in range(count)]


def as_pads(pairs: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the pads before each axis, then those after each axis, as ONNX has them."""
    before, after = zip(*pairs, strict=True)
    return [*before, *after]


def initializer(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)


def put_out(op: Builder, result: Expr, name: str) -> Expr:
    """Make a result an output with this name. An input or output gets an Identity."""
    if result.value.producer() is None or result.value.is_graph_output():
        result = op.Identity(result).like(result.value)
    result.value.name = name
    op.graph.outputs.append(result.value)
    return result


def frozen_weights(model: Model) -> list[str]:
    """Return the initializers that are frozen weights."""
    return [weight.name for weight in describe(model).with_role("frozen") if weight.name in model.graph.initializers]


def open_initializers(graph: ir.Graph, names: Iterable[str]) -> None:
    """Make inputs of the initializers with these names."""
    for name in names:
        if name in graph.initializers:
            as_input(graph, name)


def model_of(graph: ir.Graph, functions: Iterable[ir.Function] = ()) -> Model:
    """Return the model of a graph, with the functions that it calls."""
    model = Model(ir.Model(graph, ir_version=IR_VERSION, producer_name="onward", functions=list(functions)))
    drop_unused_definitions(model)
    return model
