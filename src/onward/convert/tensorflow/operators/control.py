"""Calls, branches and loops."""

from __future__ import annotations

import onnx_ir as ir
import tensorflow as tf

from onward.convert.tensorflow.graph import Refused, Resource
from onward.run.framework import Operators

operators = Operators()


@operators.define("PartitionedCall", "StatefulPartitionedCall")
def call(op, *arguments, node):
    return node.walk.inline(op, node.function("f", node.operation.inputs), arguments)


operators(NoOp=lambda op: (), Assert=lambda op, *_: ())


@operators.define("If", "StatelessIf")
def branch(op, condition, *arguments, node):
    with node.walk.without_updates():
        branches = {
            name: op.subgraph(lambda inner, graph=graph: node.walk.inline(inner, graph, arguments), name=name)
            for name in ("then_branch", "else_branch")
            for graph in [node.function(name, node.operation.inputs[1:])]
        }
    return op.If(op.Reshape(condition, []), outputs=len(node.operation.outputs), **branches)


@operators.define("While", "StatelessWhile")
def loop(op, *initial, node):
    """What no iteration changes is read from around the loop."""
    condition, body = (node.function(name, node.operation.inputs) for name in ("cond", "body"))
    carried = [i for i, value in enumerate(initial) if not _is_kept(body, i, value)]

    def goes_on(inner, values):
        return inner.Reshape(node.walk.inline(inner, condition, values)[0], [])

    def iteration(inner, number, again, *values):
        given = list(initial)
        for i, value in zip(carried, values, strict=True):
            given[i] = value
        results = node.walk.inline(inner, body, given)
        for i in carried:
            given[i] = results[i]
        return goes_on(inner, given), *(results[i] for i in carried)

    counter = ir.Value(name="iteration", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    again = ir.Value(name="again", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    inputs = [ir.Value(name="carried", type=initial[i].value.type, shape=_shape(body, i, initial[i])) for i in carried]
    with node.walk.without_updates():
        first = goes_on(op, initial)
        graph = op.subgraph(iteration, [counter, again, *inputs])
        found = op.Loop(None, first, *(initial[i] for i in carried), body=graph, outputs=len(carried))
    results = list(initial)
    for i, value in zip(carried, found if isinstance(found, tuple) else (found,), strict=True):
        results[i] = value
    return results


def _is_kept(body, index, value):
    """Whether a loop hands something on as it is."""
    result = body.outputs[index]
    while result.op.type == "Identity":
        result = result.op.inputs[0]
    if isinstance(value, Resource) and result is not body.inputs[index]:
        raise Refused("a variable is another one after each iteration")
    return result is body.inputs[index]


def _shape(body, index, value):
    """The shape that something has in all iterations. A list is no scalar here, as it is in TensorFlow."""
    result = body.outputs[index]
    if result.dtype == tf.variant:
        return value.value.shape
    return None if result.shape.rank is None else ir.Shape(result.shape.as_list())
