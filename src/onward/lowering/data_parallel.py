"""Step of one of several processes, each of which has a share of every batch.

Together they compute what one process would from the whole batch. Sums over all samples become sums
over all processes, by `AllReduce` nodes: the loss and its divisor, statistics of
BatchNormalization, gradients. Everything after these is the same in all processes: clipping,
accumulation, the update.

The derivative of an AllReduce is an AllReduce. If each process differentiates the common loss, the
*mean* of its gradients over processes is the gradient, as in DDP and FSDP of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import DOMAIN, Builder, Expr
from onward.constants import constant_ints
from onward.errors import UnsupportedError
from onward.lowering.standard_operators import Attributes, Inputs, Results, expand
from onward.lowering.step_graph import StepGraph
from onward.model import Model
from onward.model.core import string, values
from onward.model.walk import ancestors, nested_graphs, read_by, source_of
from onward.standard import IR_VERSION, is_standard

ALL_REDUCE = "AllReduce"
_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_SUMS = ("ReduceSum", "ReduceSumSquare", "ReduceL1")


class DataParallel(NamedTuple):
    """Rank and number of processes, and the work they share."""

    rank: int = 0
    size: int = 1
    batch_norm: bool = True
    """True if BatchNormalization uses the statistics of the whole batch, not of the process."""
    gradients: bool = True
    """True if the step averages gradients; otherwise the caller does."""


def is_all_reduce(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == ALL_REDUCE


def make_data_parallel(step_graph: StepGraph, options: DataParallel) -> None:
    """Make a step one of several that run at once, in place."""
    if options.size == 1:
        return
    step_graph.context.fill_in_types()
    sharing = _DataParallelPass(step_graph, options)
    if options.batch_norm:
        sharing.normalize_together()
    sharing.apply()
    step_graph.graph.sort()


class _DataParallelPass:
    def __init__(self, step_graph: StepGraph, options: DataParallel):
        self._step_graph, self._options = step_graph, options
        self._op = step_graph.context.builder()

    def normalize_together(self) -> None:
        nodes = [n for n in self._step_graph.graph if n.op_type == "BatchNormalization" and _is_training(n)]
        for user, i in [use for node in nodes for output in node.outputs[2:] for use in output.uses()]:
            if user.op_type == "CastLike" and i == 1:  # the number of samples, for the unbiased variance
                self._replace(user.outputs[0], all_reduce)
        expand(self._step_graph.context, {("", "BatchNormalization"): _batch_normalization}, _is_training)
        self._step_graph.by_name.update({value.name: value for value in values(self._step_graph.graph)})

    def apply(self) -> None:
        self._draw_own_numbers()
        local = self._reduce_over_samples()
        for gradient in self._step_graph.last_gradients():
            if self._step_graph.value(string(gradient, "y")) in local:
                raise UnsupportedError(
                    "the graph of the loss does not end with a sum or mean over all samples",
                    hint="end it with a ReduceMean or ReduceSum over all axes, or train in one process",
                )
        if self._options.gradients:
            for _, output in self._step_graph.results():
                self._replace(output, lambda local: all_reduce(local, mean=True))

    def _draw_own_numbers(self) -> None:
        """Let each process draw its own random numbers; the generator stays the same in all."""
        step_graph = self._step_graph
        for name in [name for name, value in step_graph.state.items() if value in step_graph.random]:
            _, onwards = ancestors([step_graph.value(step_graph.bindings[name])] if name in step_graph.bindings else [])
            drawing = [(node, i) for node, i in step_graph.state[name].uses() if node.outputs[0] not in onwards]
            own = self._op.BitwiseXor(step_graph.state[name], np.array([0, self._options.rank], np.uint32))
            for node, i in drawing:
                node.replace_input_with(i, own.value)

    def _reduce_over_samples(self) -> set[ir.Value]:
        """All-reduce sums over samples before metrics; return the values that stay local."""
        step_graph = self._step_graph
        targets = [step_graph.value(name) for name in step_graph.metrics]
        targets += [step_graph.value(string(node, "y")) for node in step_graph.last_gradients()]
        nodes, _ = ancestors(targets)
        state = set(step_graph.state.values())
        local = {value for value in step_graph.graph.inputs if value not in state}
        for node in list(step_graph.graph):
            inputs = list(read_by(node))[: 1 if node.op_type == "CastLike" else None]  # the second gives only the type
            if is_all_reduce(node) or local.isdisjoint(inputs):
                continue
            if node in nodes and reduces_all(node):
                self._reduce(node)
            else:
                local.update(node.outputs)
        return local

    def _reduce(self, node: ir.Node) -> None:
        op, (x, *_) = self._op, node.inputs
        assert x is not None
        if node.op_type in _LOSSES and node.attributes.get_string("reduction", "mean") == "mean":
            node.attributes["reduction"] = ir.AttrString("reduction", "sum")
            count = all_reduce(self._divisor(node))
            self._replace(node.outputs[0], lambda local: all_reduce(local / op.CastLike(count, local), common=True))
        elif node.op_type in (*_SUMS, *_LOSSES):
            self._replace(node.outputs[0], lambda local: all_reduce(local, common=True))
        elif node.op_type == "ReduceMean":
            count = op.Cast(op.Size(x), to=ir.DataType.FLOAT)
            share = count / all_reduce(count)
            self._replace(node.outputs[0], lambda local: all_reduce(local * op.CastLike(share, local), common=True))
        else:
            raise UnsupportedError(
                f"the {node.op_type} `{node.name or node.outputs[0].name}` over the samples of a batch is not a sum",
                hint="train in one process, or use a loss that is a sum or a mean over samples",
            )

    def _divisor(self, node: ir.Node) -> Expr:
        """Return the divisor of a mean of losses: the sum of the weights of the counted labels."""
        op, (_, labels, *rest) = self._op, node.inputs
        assert labels is not None
        weights, ignored = rest[0] if rest else None, node.attributes.get("ignore_index")
        if weights is None and ignored is None:
            return op.Cast(op.Size(labels), to=ir.DataType.FLOAT)
        counted = op.Not(op.Equal(labels, ignored.as_int())) if ignored is not None else None
        if weights is None:
            return op.ReduceSum(op.Cast(counted, to=ir.DataType.FLOAT), keepdims=0)
        weight = op.Cast(op.Gather(weights, op.Where(counted, labels, 0) if counted else labels), to=ir.DataType.FLOAT)
        return op.ReduceSum(op.Where(counted, weight, 0.0) if counted else weight, keepdims=0)

    def _replace(self, value: ir.Value, change: Callable[[Expr], Expr]) -> None:
        name = value.name or ""
        self._step_graph.by_name[name] = _replace_by_common(self._op, value, change)


def _replace_by_common(op: Builder, value: ir.Value, change: Callable[[Expr], Expr]) -> ir.Value:
    """Replace a value of one process by a function of it, under its name."""
    name, uses, graph = value.name or "", list(value.uses()), value.graph
    is_output = value.is_graph_output()
    new = change(op(value)).like(value).value
    for node, i in uses:
        node.replace_input_with(i, new)
    if is_output and graph is not None:
        graph.outputs[:] = [new if output is value else output for output in graph.outputs]
    value.name = op.names.fresh(f"{name}/local")
    new.name = name
    return new


def _is_training(node: ir.Node) -> bool:
    return node.attributes.get_int("training_mode", 0) == 1


def reads_statistics(model: Model, loss: str) -> bool:
    """True if a loss depends on running statistics that BatchNormalization returns."""
    _, needed = ancestors(value for value in model.graph.outputs if value.name == loss)
    nodes = (node for node in model.graph if node.op_type == "BatchNormalization")
    return any(value in needed for node in nodes for value in node.outputs[1:])


def all_reduce(x: Expr, *, mean: bool = False, common: bool = False) -> Expr:
    """Return the sum over all shares of a batch, or the mean over all processes.

    Processes with the same share count once in a sum. With `common`, all that follows is the same
    in all processes, and so is its derivative.
    """
    reduced: Expr = x.op.node(DOMAIN, ALL_REDUCE, x, mean=int(mean), common=int(common))
    return reduced.like(x.value)


def is_common(node: ir.Node) -> bool:
    """True if all that follows an AllReduce is the same in all processes."""
    return node.attributes.get_int("common", 0) == 1


def is_mean(node: ir.Node) -> bool:
    """True if an AllReduce computes the mean."""
    return node.attributes.get_int("mean", 0) == 1


def reduces_all(node: ir.Node) -> bool:
    """True if a node reduces a tensor to one number."""
    if not is_standard(node):
        return False
    if node.op_type in _LOSSES:
        return node.attributes.get_string("reduction", "mean") != "none"
    if node.op_type == "Size":
        return False
    x = node.inputs[0]
    if not node.op_type.startswith("Reduce") or x is None or not (x.dtype is None or x.dtype.is_floating_point()):
        return False
    axes_input = node.inputs[1] if len(node.inputs) > 1 else None
    axes = tuple(node.attributes.get_ints("axes", ())) if axes_input is None else constant_ints(source_of(axes_input))
    if axes is None:
        return False
    if not axes:
        return node.attributes.get_int("noop_with_empty_axes", 0) == 0
    return x.shape is not None and len(x.shape) == len(axes)


# ---- statistics of the whole batch -----------------------------------------------------------------------------------


def _batch_normalization(op: Builder, inputs: Inputs, attributes: Attributes, outputs: int) -> Results:
    """Return BatchNormalization in training mode, with mean and variance over all processes."""
    x, scale, bias, mean, variance = (value for value in inputs if value is not None)
    rows = op.Reshape(x, np.array([0, 0, -1], np.int64))  # whatever the number of axes: samples, channels, the rest
    count = all_reduce(op.CastLike(op.Div(op.Size(x), op.Gather(op.Shape(x), np.int64(1))), x))  # per channel
    batch_mean = all_reduce(op.ReduceSum(rows, [0, 2], keepdims=1)) / count
    centered = rows - batch_mean
    batch_variance = all_reduce(op.ReduceSum(centered * centered, [0, 2], keepdims=1)) / count
    along = np.array([1, -1, 1], np.int64)
    scaled = centered / op.Sqrt(batch_variance + attributes["epsilon"]) * op.Reshape(scale, along)
    y = op.Reshape(scaled + op.Reshape(bias, along), op.Shape(x))
    running = [
        _follow(op, old, op.Squeeze(new, [0, 2]), attributes["momentum"])
        for old, new in ((mean, batch_mean), (variance, batch_variance))
    ]
    return (y.like(x.value), *running)[:outputs]


def _follow(op: Builder, old: Expr, new: Expr, momentum: float) -> Expr:
    new = op.CastLike(new, old)
    return new.like(old.value) if momentum == 0 else (old * momentum + new * (1 - momentum)).like(old.value)


# ---- updates of shards -----------------------------------------------------------------------------------------------


_FILL = {"ConstantOfShape", "Expand"}
_ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Div", "Equal", "Erf", "Exp", "Floor", "Greater",
    "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Not",
    "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "Where",
    "Xor",
}  # fmt: skip


def split_update(model: Model, sharded: Collection[str]) -> None:
    """Let an update compute shards of the inputs named in `sharded`, in place; raise if it needs
    whole tensors.

    Elementwise operators stay. Sums over a tensor, such as norms of gradients, are all-reduced.
    """
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
                    output
                    for nested in inner
                    for output, result in zip(node.outputs, nested.outputs, strict=True)
                    if result in shards
                )
            elif node.op_type == "Shape" and all(user.op_type in _FILL for user in node.outputs[0].consumers()):
                continue  # a tensor of this shape is as large as the shard
            elif is_standard(node) and node.op_type in _ELEMENTWISE:
                shards.update(node.outputs)
            elif reduces_all(node) and node.op_type in (*_SUMS, "ReduceL2"):
                self._sum_over_all(op, node)
            else:
                raise UnsupportedError(
                    f"the {node.op_type} `{node.outputs[0].name}` of the update needs whole tensors, not shards",
                    hint='use an elementwise optimizer, or `strategy="ddp"` (`--strategy ddp`)',
                )
        graph.sort()

    def _sum_over_all(self, op: Builder, node: ir.Node) -> None:
        def total(local: Expr) -> Expr:
            return op.Sqrt(all_reduce(local * local)) if node.op_type == "ReduceL2" else all_reduce(local)

        _replace_by_common(op, node.outputs[0], total)


# ---- overlapped sums -------------------------------------------------------------------------------------------------
#
# Values of the batch alone, such as the number of counted labels, are summed during the forward pass. Values that
# nothing in the graph reads, such as the loss, are summed during the backward pass.


_MOST_NODES = 20
"""Largest number of nodes that are computed twice."""


def split_off_first_sums(model: Model, batch: Collection[str]) -> Model | None:
    """Move sums that follow from the batch alone to a new model; return it.

    It computes the local terms, under the names of the sums, which become inputs of the given
    model.
    """
    graph = model.graph
    sums = [node for node in graph if is_all_reduce(node) and not node.outputs[0].is_graph_output()]
    early_sums = [node for node in sums if _follows_from(batch, node)]
    if not early_sums:
        return None
    first = extract_values(model, [value for node in early_sums for value in read_by(node)])
    for node, term in zip(early_sums, first.graph.outputs, strict=True):
        total = node.outputs[0]
        term.name = total.name
        input_ = ir.Value(name=total.name, type=total.type, shape=total.shape)
        total.replace_all_uses_with(input_)
        graph.inputs.append(input_)
        graph.remove(node, safe=True)
    return first


def extract_values(model: Model, outputs: list[ir.Value]) -> Model:
    """Return a model of its own for some values of a graph."""
    nodes, reached = ancestors(outputs)
    view = ir.GraphView(
        [value for value in model.graph.inputs if value in reached],
        outputs,
        nodes=[node for node in model.graph if node in nodes],
        initializers=[value for value in reached if value.is_initializer()],
        opset_imports=dict(model.ir.opset_imports),
    )
    functions = [function.clone() for function in model.functions.values()]
    return Model(ir.Model(view.clone(), ir_version=model.ir.ir_version or IR_VERSION, functions=functions))


def _follows_from(batch: Collection[str], node: ir.Node) -> bool:
    """True if the inputs of a node need no more than the batch, and few nodes."""
    nodes, reached = ancestors(read_by(node))
    sources = [value for value in reached if value.producer() is None and not value.is_initializer()]
    return (
        len(nodes) <= _MOST_NODES
        and not any(map(is_all_reduce, nodes))
        and all(value.name in batch for value in sources)
    )


def leave_last_sums(model: Model) -> list[str]:
    """Replace sums that are outputs, and that no node reads, by their local terms; return their names."""
    outputs = model.graph.outputs
    names = []
    for node in [node for node in model.graph if is_all_reduce(node) and is_common(node)]:
        local, total = node.inputs[0], node.outputs[0]
        if local is None or local.producer() is None or local in outputs or total not in outputs or total.uses():
            continue
        outputs[:] = [local if output is total else output for output in outputs]
        model.graph.remove(node, safe=True)
        local.name = total.name
        names.append(local.name or "")
    return names
