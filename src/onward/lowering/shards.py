"""An update of which each process has a shard of every tensor: what is computed element by element stays as it is, and
sums over a tensor, such as norms of gradients, go over all processes."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.lowering.sharing import all_reduce, reduces_all
from onward.model import Model
from onward.model.walk import nested_graphs, read_by
from onward.standard import is_standard

_SUMS = {"ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2"}
_FILL = {"ConstantOfShape", "Expand"}
_ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Div", "Equal", "Erf", "Exp", "Floor", "Greater",
    "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Not",
    "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "Where",
    "Xor",
}  # fmt: skip


def split_update(model: Model, sharded: Collection[str]) -> None:
    """Let an update compute shards of these inputs, in place; it is refused if it takes whole tensors for that."""
    _Splitter(model).split(model.graph, {value for value in model.inputs if value.name in sharded})


class _Splitter:
    def __init__(self, model: Model):
        self._names, self._opset = model.names(), model.opset

    def split(self, graph: ir.Graph, shards: set[ir.Value]) -> None:
        op = Builder(graph, opset=self._opset, names=self._names)
        for node in list(graph):
            if shards.isdisjoint(read_by(node)):
                continue
            if inner := list(nested_graphs(node)):
                for nested in inner:
                    self.split(nested, shards)
                shards.update(
                    made
                    for nested in inner
                    for made, result in zip(node.outputs, nested.outputs, strict=True)
                    if result in shards
                )
            elif node.op_type == "Shape" and all(user.op_type in _FILL for user in node.outputs[0].consumers()):
                continue  # what is made of it is as large as the shard
            elif is_standard(node) and node.op_type in _ELEMENTWISE:
                shards.update(node.outputs)
            elif reduces_all(node) and node.op_type in _SUMS:
                self._sum_over_all(op, node)
            else:
                raise UnsupportedError(
                    f"the update takes whole tensors: {node.op_type} (`{node.outputs[0].name}`) needs more of a "
                    "tensor than the shard that a process has",
                    hint='take an optimizer of single elements, or `strategy="ddp"` (`--strategy ddp`)',
                )
        graph.sort()

    def _sum_over_all(self, op: Builder, node: ir.Node) -> None:
        value = node.outputs[0]
        uses, is_output = list(value.uses()), value.is_graph_output()
        local = op(value)
        total = op.Sqrt(all_reduce(local * local)) if node.op_type == "ReduceL2" else all_reduce(local)
        new = total.like(value).value
        for user, at in uses:
            user.replace_input_with(at, new)
        if is_output and value.graph is not None:
            outputs = value.graph.outputs
            outputs[:] = [new if output is value else output for output in outputs]
            new.name, value.name = value.name, op.names.fresh(f"{value.name}/local")
