"""BatchNormalization in forms that all engines compute."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import InvalidModelError
from onward.lowering.expand import expand
from onward.transform.context import Context

_KEY = ("", "BatchNormalization")


def give_two_axes(context: Context) -> None:
    """Let inputs of one axis, which the standard allows and frameworks do not, be of one channel."""
    expand(context, {_KEY: _add_channel}, _has_one_axis)


def _has_one_axis(node: ir.Node) -> bool:
    named = [output.name for output in node.outputs if output.name]
    if len(named) > 1 and not node.attributes.get_int("training_mode", 0):
        raise InvalidModelError(
            f"the node `{node.name or named[0]}` (BatchNormalization) has statistics, but is not in training mode",
            hint="set `training_mode`, or remove all outputs but the first",
        )
    x = node.inputs[0]
    return x is not None and x.shape is not None and len(x.shape) == 1


def _add_channel(op: Builder, inputs: list[Expr | None], attributes: dict[str, Any], outputs: int) -> tuple[Expr, ...]:
    x, *others = inputs
    made = op.BatchNormalization(op.Unsqueeze(x, [1]), *others, outputs=outputs, **attributes)
    y, *statistics = (made,) if outputs == 1 else made
    return op.Squeeze(y, [1]), *statistics


def write_out_unsafe(context: Context) -> None:
    """Write in plain operators what ONNX Runtime gets wrong: unless both running statistics are outputs of the graph,
    it writes them over those that it reads, also over constants and what callers own."""
    expand(context, {_KEY: _write_out}, lambda node: _is_unsafe(node, context.graph))


def _is_unsafe(node: ir.Node, graph: ir.Graph) -> bool:
    if not node.attributes.get_int("training_mode", 0):
        return False
    returned = [output for output in node.outputs[1:] if output.is_graph_output()]
    return (len(returned) < 2 or node.graph is not graph) and not all(map(_is_nobodys, node.inputs[3:]))


def _is_nobodys(value: ir.Value | None) -> bool:
    """Whether nobody is harmed if a value is overwritten."""
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type != "Constant" and value is not None and len(value.uses()) == 1


def _write_out(op: Builder, inputs: list[Expr | None], attributes: dict[str, Any], outputs: int) -> tuple[Expr, ...]:
    x, scale, bias, old_mean, old_variance = (value for value in inputs if value is not None)
    wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    x3, *vectors = (
        op.Cast(value, to=wide.value) for value in (op.Reshape(x, [0, 0, -1]), scale, bias, old_mean, old_variance)
    )
    mean = op.ReduceMean(x3, [0, 2], keepdims=1)
    centred = x3 - mean
    variance = op.ReduceMean(centred * centred, [0, 2], keepdims=1)
    factor, offset = (op.Unsqueeze(vector, [1]) for vector in vectors[:2])
    y = centred / op.Sqrt(variance + attributes["epsilon"]) * factor + offset
    share = attributes["momentum"]
    running = (
        op.CastLike(old * share + op.Squeeze(new, [0, 2]) * (1 - share), like)
        for old, new, like in zip(vectors[2:], (mean, variance), (old_mean, old_variance), strict=True)
    )
    return (op.CastLike(op.Reshape(y, op.Shape(x)), x), *running)[:outputs]
