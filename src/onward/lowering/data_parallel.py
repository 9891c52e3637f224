"""The step of one of several processes, each of which has a share of every batch.

Together they compute what one process would from the whole batch. What is summed up over all samples is summed over all
processes, by `AllReduce` nodes: the loss with what it is divided by, statistics of BatchNormalization, gradients. All
that follows from these is the same everywhere: clipping, accumulation, the update.

The derivative of an AllReduce is an AllReduce. If each process differentiates the loss of all, its gradients are such
that their *mean* over processes is the gradient: what DDP and FSDP of PyTorch make of them, too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import DOMAIN, Builder, Expr
from onward.constants import constant_ints
from onward.errors import UnsupportedError
from onward.lowering.standard_operators import expand
from onward.lowering.step_graph import StepGraph
from onward.model import Model
from onward.model.core import string, values
from onward.model.walk import ancestors, nested_graphs, read_by, source_of
from onward.standard import IR_VERSION, is_standard

ALL_REDUCE = "AllReduce"
_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_SUMS = ("ReduceSum", "ReduceSumSquare", "ReduceL1")


class DataParallel(NamedTuple):
    """Which of how many processes this is, and what they have in common."""

    rank: int = 0
    size: int = 1
    batch_norm: bool = True
    """Whether BatchNormalization has the statistics of the whole batch, or each process its own."""
    gradients: bool = True
    """Whether the step averages gradients. If not, whoever drives it does."""


def is_all_reduce(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == ALL_REDUCE


def make_data_parallel(step_graph: StepGraph, options: DataParallel) -> None:
    """Make a step one of several that are run at once, in place."""
    if options.size == 1:
        return
    step_graph.context.fill_in_types()
    sharing = _Sharing(step_graph, options)
    if options.batch_norm:
        sharing.normalize_together()
    sharing.apply()
    step_graph.graph.sort()


class _Sharing:
    def __init__(self, step_graph: StepGraph, options: DataParallel):
        self._step_graph, self._options = step_graph, options
        self._op = step_graph.context.builder()

    def normalize_together(self) -> None:
        nodes = [n for n in self._step_graph.graph if n.op_type == "BatchNormalization" and _is_training(n)]
        for user, at in [use for node in nodes for output in node.outputs[2:] for use in output.uses()]:
            if user.op_type == "CastLike" and at == 1:  # the number of samples, for what is divided by one less
                self._replace(user.outputs[0], all_reduce)
        expand(self._step_graph.context, {("", "BatchNormalization"): _batch_normalization}, _is_training)
        self._step_graph.known.update({value.name: value for value in values(self._step_graph.graph)})

    def apply(self) -> None:
        self._draw_apart()
        local = self._sum_up()
        for gradient in self._step_graph.last_gradients():
            if self._step_graph.value(string(gradient, "y")) in local:
                raise UnsupportedError(
                    "the loss is no sum or mean over all samples of a batch, as far as its graph tells",
                    hint="end it with a ReduceMean or ReduceSum over all axes, or train it in one process",
                )
        if self._options.gradients:
            for _, output in self._step_graph.results():
                self._replace(output, lambda local: all_reduce(local, mean=True))

    def _draw_apart(self) -> None:
        """Let each process draw random numbers of its own; the generator goes on as one, the same for all."""
        step_graph = self._step_graph
        for name in [name for name, value in step_graph.state.items() if value in step_graph.random]:
            _, onwards = ancestors([step_graph.value(step_graph.bindings[name])] if name in step_graph.bindings else [])
            drawing = [(node, i) for node, i in step_graph.state[name].uses() if node.outputs[0] not in onwards]
            own = self._op.BitwiseXor(step_graph.state[name], np.array([0, self._options.rank], np.uint32))
            for node, i in drawing:
                node.replace_input_with(i, own.value)

    def _sum_up(self) -> set[ir.Value]:
        """Sum over all processes what is summed over all samples on the way to losses and other metrics; what else
        depends on the samples of this process."""
        step_graph = self._step_graph
        wanted = [step_graph.value(name) for name in step_graph.metrics]
        wanted += [step_graph.value(string(node, "y")) for node in step_graph.last_gradients()]
        nodes, _ = ancestors(wanted)
        state = set(step_graph.state.values())
        local = {value for value in step_graph.graph.inputs if value not in state}
        for node in list(step_graph.graph):
            read = list(read_by(node))[: 1 if node.op_type == "CastLike" else None]  # of the other, only the type
            if is_all_reduce(node) or local.isdisjoint(read):
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
            count = all_reduce(self._counted(node))
            self._replace(node.outputs[0], lambda local: all_reduce(local / op.CastLike(count, local), common=True))
        elif node.op_type in (*_SUMS, *_LOSSES):
            self._replace(node.outputs[0], lambda local: all_reduce(local, common=True))
        elif node.op_type == "ReduceMean":
            count = op.Cast(op.Size(x), to=ir.DataType.FLOAT)
            part = count / all_reduce(count)
            self._replace(node.outputs[0], lambda local: all_reduce(local * op.CastLike(part, local), common=True))
        else:
            raise UnsupportedError(
                f"the loss depends on the {node.op_type} `{node.name or node.outputs[0].name}` over the samples of a "
                "batch, which is not a sum of shares",
                hint="train it in one process, or take a loss that is a sum or a mean over samples",
            )

    def _counted(self, node: ir.Node) -> Expr:
        """What a mean of losses is divided by: the weights of the labels that take part."""
        op, (_, labels, *rest) = self._op, node.inputs
        assert labels is not None
        weights, ignored = rest[0] if rest else None, node.attributes.get("ignore_index")
        if weights is None and ignored is None:
            return op.Cast(op.Size(labels), to=ir.DataType.FLOAT)
        kept = op.Not(op.Equal(labels, ignored.as_int())) if ignored is not None else None
        if weights is None:
            return op.ReduceSum(op.Cast(kept, to=ir.DataType.FLOAT), keepdims=0)
        weight = op.Cast(op.Gather(weights, op.Where(kept, labels, 0) if kept else labels), to=ir.DataType.FLOAT)
        return op.ReduceSum(op.Where(kept, weight, 0.0) if kept else weight, keepdims=0)

    def _replace(self, value: ir.Value, change: Any) -> None:
        """Let all read something else in the place of a value, under its name."""
        name, uses = value.name or "", list(value.uses())
        is_output = value.is_graph_output()
        new = change(self._op(value)).like(value).value
        for node, i in uses:
            node.replace_input_with(i, new)
        if is_output:
            outputs = self._step_graph.graph.outputs
            outputs[:] = [new if output is value else output for output in outputs]
        value.name = self._op.names.fresh(f"{name}/local")
        new.name = name
        self._step_graph.known[name] = new


def _is_training(node: ir.Node) -> bool:
    return node.attributes.get_int("training_mode", 0) == 1


def reads_statistics(model: Model, loss: str) -> bool:
    """Whether a loss depends on statistics that BatchNormalization has returned."""
    _, needed = ancestors(value for value in model.graph.outputs if value.name == loss)
    nodes = (node for node in model.graph if node.op_type == "BatchNormalization")
    return any(value in needed for node in nodes for value in node.outputs[1:])


def all_reduce(x: Expr, *, mean: bool = False, common: bool = False) -> Expr:
    """The sum over all shares of a batch, or the mean over all processes: where some have the same share, it counts
    once in a sum. It is `common` if what follows from it is the same in all, and so is its derivative."""
    made: Expr = x.op.node(DOMAIN, ALL_REDUCE, x, mean=int(mean), common=int(common))
    return made.like(x.value)


def is_common(node: ir.Node) -> bool:
    """Whether what follows from an AllReduce is the same in all processes."""
    return node.attributes.get_int("common", 0) == 1


def is_mean(node: ir.Node) -> bool:
    """Whether an AllReduce makes the mean."""
    return node.attributes.get_int("mean", 0) == 1


def reduces_all(node: ir.Node) -> bool:
    """Whether a node makes one number of a tensor."""
    if not is_standard(node):
        return False
    if node.op_type in _LOSSES:
        return node.attributes.get_string("reduction", "mean") != "none"
    if node.op_type == "Size":
        return False
    x = node.inputs[0]
    if not node.op_type.startswith("Reduce") or x is None or not (x.dtype is None or x.dtype.is_floating_point()):
        return False
    given = node.inputs[1] if len(node.inputs) > 1 else None
    axes = tuple(node.attributes.get_ints("axes", ())) if given is None else constant_ints(source_of(given))
    if axes is None:  # nobody knows
        return False
    if not axes:
        return node.attributes.get_int("noop_with_empty_axes", 0) == 0
    return x.shape is not None and len(x.shape) == len(axes)


# ---- statistics of the whole batch -----------------------------------------------------------------------------------


def _batch_normalization(
    op: Builder, inputs: list[Expr | None], attributes: dict[str, Any], outputs: int
) -> tuple[Expr, ...]:
    """BatchNormalization in training mode, whose mean and variance are those of all processes."""
    x, scale, bias, mean, variance = inputs
    assert x is not None and scale is not None and bias is not None and mean is not None and variance is not None
    rows = op.Reshape(x, np.array([0, 0, -1], np.int64))  # whatever the number of axes: samples, channels, the rest
    count = all_reduce(_count(op, x))
    batch_mean = all_reduce(op.ReduceSum(rows, [0, 2], keepdims=1)) / count
    centred = rows - batch_mean
    batch_variance = all_reduce(op.ReduceSum(centred * centred, [0, 2], keepdims=1)) / count
    along = np.array([1, -1, 1], np.int64)
    scaled = centred / op.Sqrt(batch_variance + attributes["epsilon"]) * op.Reshape(scale, along)
    y = op.Reshape(scaled + op.Reshape(bias, along), op.Shape(x))
    running = [
        _follow(op, old, op.Squeeze(new, [0, 2]), attributes["momentum"])
        for old, new in ((mean, batch_mean), (variance, batch_variance))
    ]
    return (y.like(x.value), *running)[:outputs]


def _count(op: Builder, x: Expr) -> Expr:
    """How many numbers of each channel there are."""
    return op.CastLike(op.Div(op.Size(x), op.Gather(op.Shape(x), np.int64(1))), x)


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
    """Let an update compute shards of these inputs, in place; raise if it needs whole tensors.

    Elementwise operators stay as they are. Sums over a tensor, such as norms of gradients, go over all processes.
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
                    made
                    for nested in inner
                    for made, result in zip(node.outputs, nested.outputs, strict=True)
                    if result in shards
                )
            elif node.op_type == "Shape" and all(user.op_type in _FILL for user in node.outputs[0].consumers()):
                continue  # what is made of it is as large as the shard
            elif is_standard(node) and node.op_type in _ELEMENTWISE:
                shards.update(node.outputs)
            elif reduces_all(node) and node.op_type in (*_SUMS, "ReduceL2"):
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


# ---- sums that nothing waits for -------------------------------------------------------------------------------------
#
# They are under way while something else is computed. What follows from the batch alone, such as how many labels
# count, is summed up during the forward pass. What nothing in the graph reads, such as the loss, is summed up while the
# forward pass is differentiated, which needs no more than to know that it is a sum.


_FEW = 20
"""Nodes that may well be computed once more."""


def split_off_first_sums(model: Model, batch: Collection[str]) -> Model | None:
    """A model that makes this process's part of the sums which follow from its batch alone, under the names that sums
    have as inputs of the given model, which is changed."""
    graph = model.graph
    sums = [node for node in graph if is_all_reduce(node) and not node.outputs[0].is_graph_output()]
    found = [node for node in sums if _follows_from(batch, node)]
    if not found:
        return None
    parts = [value for node in found for value in read_by(node)]
    first = extract(model, parts)
    for node, own in zip(found, first.graph.outputs, strict=True):
        total = node.outputs[0]
        own.name = total.name
        given = ir.Value(name=total.name, type=total.type, shape=total.shape)
        total.replace_all_uses_with(given)
        graph.inputs.append(given)
        graph.remove(node, safe=True)
    return first


def extract(model: Model, outputs: list[ir.Value]) -> Model:
    """A model of its own for some values of a graph, which stays as it is."""
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
    """Whether what a node reads takes no more than the batch, and little time."""
    nodes, reached = ancestors(read_by(node))
    given = [value for value in reached if value.producer() is None and not value.is_initializer()]
    return len(nodes) <= _FEW and not any(map(is_all_reduce, nodes)) and all(value.name in batch for value in given)


def leave_last_sums(model: Model) -> list[str]:
    """Let outputs be this process's part of sums that nothing reads, in place of the sums; which these are."""
    outputs = model.graph.outputs
    left = []
    for node in [node for node in model.graph if is_all_reduce(node) and is_common(node)]:
        local, total = node.inputs[0], node.outputs[0]
        if local is None or local.producer() is None or local in outputs or total not in outputs or total.uses():
            continue
        outputs[:] = [local if output is total else output for output in outputs]
        model.graph.remove(node, safe=True)
        local.name = total.name
        left.append(local.name or "")
    return left
