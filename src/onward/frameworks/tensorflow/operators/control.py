"""Calls, branches, loops, variables, and random numbers of dropout."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import tensorflow as tf

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import cast, constant_of
from onward.frameworks.tensorflow.graph import RefusedOperation, Resource, as_int64, dtype_of

operators = Operators()


operators(
    NoOp=lambda op: (),
    Assert=lambda op, *_: (),
    ReadVariableOp=lambda op, variable, *, node: node.read(op, variable),
    AssignVariableOp=lambda op, variable, value, *, node: _assign(node, variable, value),
    AssignAddVariableOp=lambda op, variable, value, *, node: _assign(node, variable, node.read(op, variable) + value),
    AssignSubVariableOp=lambda op, variable, value, *, node: _assign(node, variable, node.read(op, variable) - value),
)


@operators.define("PartitionedCall", "StatefulPartitionedCall")
def call(op, *arguments, node):
    name = node.operation.get_attr("f").name
    replace = next((replace for part, replace in node.translator.calls.items() if f"_{part}_" in name), None)
    results = None if replace is None else replace(op, arguments, node)
    return node.translator.inline(op, node.function("f"), arguments) if results is None else results


def _assign(node, variable, value):
    node.translator.updates[variable.value] = value
    return ()


@operators.define("If", "StatelessIf")
def branch(op, condition, *arguments, node):
    with node.translator.without_updates():
        branches = {
            name: op.subgraph(lambda inner, graph=graph: node.translator.inline(inner, graph, arguments), name=name)
            for name in ("then_branch", "else_branch")
            for graph in [node.function(name)]
        }
    return op.If(op.Reshape(condition, []), outputs=len(node.operation.outputs), **branches)


@operators.define("While", "StatelessWhile")
def loop(op, *initial, node):
    """Write a Loop. It reads constants from around it, and collects lists that are only written."""
    condition, body = (node.function(name) for name in ("cond", "body"))
    changed = [i for i, value in enumerate(initial) if not _is_constant(body, i, value)]
    items = {i: item for i in changed if (item := _collect_items(body, i, initial)) is not None}
    carried = [i for i in changed if i not in items]

    def continues(inner, values):
        return inner.Reshape(node.translator.inline(inner, condition, values)[0], [])

    def iteration(inner, number, again, *values):
        state = list(initial)
        for i, value in zip(carried, values, strict=True):
            state[i] = value
        results = node.translator.inline(inner, body, state, [*(body.outputs[i] for i in carried), *items.values()])
        for i, result in zip(carried, results, strict=False):
            state[i] = result
        return continues(inner, state), *results

    counter = ir.Value(name="iteration", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    again = ir.Value(name="again", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    inputs = [ir.Value(name="carried", type=initial[i].value.type, shape=_shape(body, i, initial[i])) for i in carried]
    with node.translator.without_updates():
        first = continues(op, initial)
        graph = op.subgraph(iteration, [counter, again, *inputs])
        start = (initial[i] for i in carried)
        loop_results = op.Loop(None, first, *start, body=graph, outputs=len(carried) + len(items))
    results = list(initial)
    for i, value in zip(
        [*carried, *items], loop_results if isinstance(loop_results, tuple) else (loop_results,), strict=True
    ):
        results[i] = value
    for i, item in items.items():
        results[i].value.type = ir.TensorType(dtype_of(item.dtype))
        results[i].value.shape = None if item.shape.rank is None else ir.Shape([None, *item.shape.as_list()])
    return results


def _is_constant(body, index, value):
    """True if a loop does not change a value."""
    is_constant = _source(body.outputs[index]) is body.inputs[index]
    if isinstance(value, Resource) and not is_constant:
        raise RefusedOperation("a variable is another one after each iteration")
    return is_constant


def _source(tensor):
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _collect_items(body, index, initial):
    """Return the item that each iteration writes to a list at a counter from 0, or None."""
    written = _source(body.outputs[index]).op
    if written.type != "TensorListSetItem" or written.inputs[0] is not body.inputs[index]:
        return None
    if len(body.inputs[index].consumers()) > 1:
        return None
    counter = _input(body, written.inputs[1])
    if counter is None or not _is_number(initial[counter], 0):
        return None
    after = _source(body.outputs[counter]).op
    follows = after.type in ("Add", "AddV2") and _input(body, after.inputs[0]) == counter
    return written.inputs[2] if follows and _is_one(body, after.inputs[1], initial) else None


def _input(body, tensor):
    """Return the index of an input of a graph; None for other tensors."""
    return next((i for i, x in enumerate(body.inputs) if x is _source(tensor)), None)


def _is_one(body, tensor, initial):
    index = _input(body, tensor)
    if index is None:
        return tf.get_static_value(tensor) == 1
    return _is_constant(body, index, initial[index]) and _is_number(initial[index], 1)


def _is_number(value, number):
    array = constant_of(value)
    return array is not None and array.ndim == 0 and array == number


def _shape(body, index, value):
    """Return the shape in all iterations. TensorFlow has a scalar for a list."""
    result = body.outputs[index]
    if result.dtype == tf.variant:
        return value.value.shape
    return None if result.shape.rank is None else ir.Shape(result.shape.as_list())


UNIFORM = ("RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2")


@operators.define(*UNIFORM)
def uniform(op, shape, *_, dtype, node):
    _refuse_fixed_seed(node.operation)
    return _drawn(op, "RandomUniformLike", shape, dtype)


@operators.define("RandomStandardNormal", "StatelessRandomNormal", "StatelessRandomNormalV2")
def normal(op, shape, *_, dtype, node):
    _refuse_fixed_seed(node.operation)
    return _drawn(op, "RandomNormalLike", shape, dtype)


@operators.define("RandomUniformInt", "StatelessRandomUniformInt", "StatelessRandomUniformIntV2")
def integers(op, shape, *more, node):
    _refuse_fixed_seed(node.operation)
    low, high = more[-2:]
    target = low.dtype
    width = cast(op, high - low, ir.DataType.FLOAT)
    return low + cast(op, op.Floor(_drawn(op, "RandomUniformLike", shape, tf.float32) * width), target)


def _refuse_fixed_seed(operation):
    """Refuse an operation that returns the same numbers at every call."""
    seed = operation.inputs[1] if operation.type.startswith("Stateless") else None
    pending = [] if seed is None else [seed.op]
    for other in pending:
        pending += [x.op for x in other.inputs]
    if pending and not any(other.type in ("Placeholder", "ReadVariableOp") for other in pending):
        raise RefusedOperation("its seed is constant: every step would get the same numbers")


def _drawn(op, operator, shape, dtype):
    """Draw numbers in inference with the operator; a training step draws them from its own generator."""
    number = op.constant(np.zeros([], dtype_of(dtype).numpy()))
    return op.node("", operator, op.Expand(number, as_int64(op, shape)))


@operators.define("SelectV2")
def select(op, condition, x, y, *, node):
    """Select elements, or drop them as `tf.nn.dropout` does."""
    dropout = _dropout(node)
    if dropout is None:
        return op.Where(condition, x, y)
    kept, rate = node.value(dropout[0]), dropout[1]
    if dropout[0].shape.as_list() == node.operation.inputs[0].shape.as_list():
        return op.Dropout(kept, rate)
    return kept * op.Dropout(cast(op, op.filled_like(condition.value, True), kept.dtype), rate)  # whole slices


def _dropout(node):
    """Return the tensor and the rate of a dropout; None for another selection."""
    condition, scaled, otherwise = (x.op for x in node.operation.inputs)
    if condition.type != "GreaterEqual" or scaled.type != "Mul":
        return None
    drawn = condition.inputs[0].op
    for operation, neutral in (("AddV2", 0), ("Mul", 1)):  # stateless numbers are scaled to the range from 0 to 1
        if drawn.type == operation and node.constant(drawn.inputs[1]) == neutral:
            drawn = drawn.inputs[0].op
    if drawn.type not in UNIFORM:
        return None
    rate, scale = node.constant(condition.inputs[1]), node.constant(scaled.inputs[1])
    nothing = node.constant(otherwise.outputs[0])
    if rate is None or scale is None or nothing is None or nothing.any() or abs(scale * (1 - rate) - 1) > 1e-5:
        return None
    _refuse_fixed_seed(drawn)
    return scaled.inputs[0], rate.astype("f4")
