"""Replacement of operators by others: losses and optimizers of the standard, and operators that a
runtime lacks.

The standard defines losses by function bodies; these need half the nodes, and never transpose the
scores.

Optimizers (domain `ai.onnx.preview.training`) take `R` (learning rate), `T` (updates so far), then
all parameters, all gradients, and all tensors of each state. They return all new parameters, then
the new states. A float32 attribute means exactly the number it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.differentiate.expand import replace_node
from onward.errors import Error, InvalidModelError
from onward.model import TRAINING_DOMAIN, Model
from onward.model.core import all_names
from onward.model.walk import attributes, graphs_in, graphs_of
from onward.recipe.optimizers.arithmetic import (
    adam_rate,
    coupled_decay,
    descend,
    double,
    ema,
    over_root,
    scaled,
    trace,
    typed,
)
from onward.rules.registry import lookup_body
from onward.transform.context import Context
from onward.transform.inline import has_body, inline_operators

Inputs = list[Expr | None]
Attributes = dict[str, Any]
Results = tuple[Expr, ...]
Lowering = Callable[[Builder, Inputs, Attributes, int], Results]
"""`(op, inputs, attributes, outputs) -> results`: omitted inputs are None, attributes have the schema's defaults."""


def softmax_cross_entropy_loss(op: Builder, inputs: Inputs, attributes: Attributes, outputs: int) -> Results:
    """Return the loss of softmax(`scores [N, C, d...]`) at `labels [N, d...]`, and log-softmax."""
    scores, labels, *weights = inputs
    log_prob = op.LogSoftmax(scores, axis=1)
    loss = negative_log_likelihood_loss(op, [log_prob, labels, *weights], attributes, 1)
    return (*loss, log_prob)[:outputs]


def negative_log_likelihood_loss(op: Builder, inputs: Inputs, attributes: Attributes, outputs: int) -> Results:
    """Return -weight[target] · input[n, target, d...]; the mean divides by the counted weights."""
    log_prob, labels, *rest = inputs
    weights = rest[0] if rest else None
    reduction, ignore_index = attributes["reduction"], attributes.get("ignore_index")

    counted = None
    if ignore_index is not None:
        counted = op.Not(op.Equal(labels, ignore_index))
        labels = op.Where(counted, labels, 0)
    loss = -op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(labels, [1]), axis=1), [1])
    weight = None if weights is None else op.Gather(weights, labels)
    if weight is not None:
        loss = loss * weight
    if counted is not None:
        loss = op.Where(counted, loss, 0)
        weight = op.CastLike(counted, loss) if weight is None else op.Where(counted, weight, 0)

    if reduction == "none":
        return (loss,)
    if reduction == "mean" and weight is None:
        return (op.ReduceMean(loss, keepdims=0),)
    total = op.ReduceSum(loss, keepdims=0)
    return (total / op.ReduceSum(weight, keepdims=0) if reduction == "mean" else total,)


LOSSES: dict[tuple[str, str], Lowering] = {
    ("", "SoftmaxCrossEntropyLoss"): softmax_cross_entropy_loss,
    ("", "NegativeLogLikelihoodLoss"): negative_log_likelihood_loss,
}


def momentum(op: Builder, a: Attributes, r: Expr, t: Expr, x: Expr, g: Expr, v: Expr) -> Results:
    """G += norm·X;  V' = α·V + (T > 0 ? β : 1)·G;  X' = X − R·V', or by Nesterov X − R·(G + α·V')."""
    g = _regularize(a, x, g)
    new = g if a["beta"] == 1 else g * op.Where(t > 0, typed(a["beta"], g), 1.0)
    v = trace(v, new, a["alpha"])
    if a["mode"] not in ("standard", "nesterov"):
        raise InvalidModelError(f"Momentum has no mode `{a['mode']}`", hint="modes: `standard`, `nesterov`")
    return descend(x, r, trace(v, g, a["alpha"]) if a["mode"] == "nesterov" else v), v


def adagrad(op: Builder, a: Attributes, r: Expr, t: Expr, x: Expr, g: Expr, h: Expr) -> Results:
    """G += norm·X;  H' = H + G²;  X' = X − R / (1 + T·decay) · G / (√H' + ε)."""
    g = _regularize(a, x, g)
    h = h + g * g
    rate = r / (1.0 + double(t) * a["decay_factor"]) if a["decay_factor"] else r
    return descend(x, rate, over_root(g, h, a["epsilon"])), h


def adam(op: Builder, a: Attributes, r: Expr, t: Expr, x: Expr, g: Expr, v: Expr, h: Expr) -> Results:
    """G += norm·X;  V' = α·V + (1−α)·G;  H' = β·H + (1−β)·G²;  R' = T > 0 ? R·√(1−βᵀ) / (1−αᵀ) : R;

    X' = (1 − norm_post)·(X − R'·V' / (√H' + ε)).
    """
    g = _regularize(a, x, g)
    v, h = ema(v, g, a["alpha"]), ema(h, g * g, a["beta"])
    rate = op.Where(t > 0, adam_rate(r, t, a["alpha"], a["beta"]), r)
    x = descend(x, rate, over_root(v, h, a["epsilon"]))
    return scaled(1 - a["norm_coefficient_post"], x) if a["norm_coefficient_post"] else x, v, h


def _regularize(a: Attributes, x: Expr, g: Expr) -> Expr:
    return coupled_decay(x, g, a["norm_coefficient"]) if a["norm_coefficient"] else g


def _for_each_tensor(step: Callable[..., Results], *, kinds: int) -> Lowering:
    """Return a lowering for operators whose inputs after R and T are `kinds` equal lists."""

    def lower(op: Builder, inputs: Inputs, attributes: Attributes, outputs: int) -> Results:
        r, t, *tensors = inputs
        count = len(tensors) // kinds
        if r is None or t is None or None in tensors or not count or len(tensors) != count * kinds:
            raise InvalidModelError(f"an optimizer has {len(tensors)} inputs after R and T, not {kinds} per parameter")
        rate = double(r)
        results = [step(op, attributes, rate, t, *tensors[i::count]) for i in range(count)]
        return tuple(result for column in zip(*results, strict=True) for result in column)[:outputs]

    return lower


OPTIMIZERS: dict[tuple[str, str], Lowering] = {
    (TRAINING_DOMAIN, "Momentum"): _for_each_tensor(momentum, kinds=3),
    (TRAINING_DOMAIN, "Adagrad"): _for_each_tensor(adagrad, kinds=3),
    (TRAINING_DOMAIN, "Adam"): _for_each_tensor(adam, kinds=4),
}

LOWERINGS = {**LOSSES, **OPTIMIZERS}


# ---- replacing operators ---------------------------------------------------------------------------------------------


def expand(
    context: Context,
    lowerings: Mapping[tuple[str, str], Lowering] = LOWERINGS,
    is_selected: Callable[[ir.Node], bool] = lambda node: True,
) -> None:
    """Replace selected nodes that have a lowering, also in nested graphs and functions, in place."""
    model = context.model

    def has_matches(graph: ir.Graph | ir.Function) -> bool:
        return any((node.domain, node.op_type) in lowerings and is_selected(node) for node in graph.all_nodes())

    for key in [key for key, function in model.functions.items() if has_matches(function)]:
        model.functions[key] = model.functions[key].clone()  # other models may share it
        context.names.take(all_names(model.functions[key].graph))
    for graph in [inner for outer in graphs_of(model) for inner in graphs_in(outer)]:
        for node in list(graph):
            if (lowering := lowerings.get((node.domain, node.op_type))) and is_selected(node):
                _replace(context, graph, node, lowering)


def _replace(context: Context, graph: ir.Graph, node: ir.Node, lowering: Lowering) -> None:
    with context.before(node) as op:
        inputs = [op(value) if value is not None else None for value in node.inputs]
        results = lowering(op, inputs, attributes(node, op.opset), len(node.outputs))
    for old, new in zip(node.outputs, results, strict=False):
        if old.name:
            context.replace(old, new)
    graph.remove(node, safe=True)


# ---- operators that a runtime lacks ----------------------------------------------------------------------------------


def replace_unknown(
    model: Model, unknown_in: Callable[[Model], list[ir.Node]], refusal: Callable[[list[ir.Node]], Error]
) -> Model:
    """Return the model without unknown nodes; raise an error with all that cannot be expressed."""
    while unknown := unknown_in(model):
        for replaced in (_by_lowerings, _by_rewrites, _by_functions):
            if (result := replaced(model, unknown)) is not None:
                model = result
                break
        else:
            raise refusal(unknown)
    return model


def _by_lowerings(model: Model, unknown: list[ir.Node]) -> Model | None:
    lowerings = {key: LOWERINGS[key] for node in unknown if (key := (node.domain, node.op_type)) in LOWERINGS}
    if not lowerings:
        return None
    expand(Context(model), lowerings)
    return model


def _by_rewrites(model: Model, unknown: list[ir.Node]) -> Model | None:
    bodies = {node: body for node in unknown if (body := lookup_body(node)) is not None}
    if not bodies:
        return None
    context = Context(model)
    context.fill_in_types()
    replaced = [replace_node(context, node, rule) for node, rule in bodies.items()]
    return model if any(replaced) else None


def _by_functions(model: Model, unknown: list[ir.Node]) -> Model | None:
    """Inline the bodies that the standard or the model defines."""
    imports = {**model.graph.opset_imports, "": model.opset, "ai.onnx": model.opset}
    bodies = (node for node in unknown if has_body(node.op_type, imports.get(node.domain, 1), node.domain))
    calls = {(node.domain, node.op_type) for node in bodies}
    if not calls:
        return None
    result = inline_operators(model, calls)
    remaining = {(node.domain, node.op_type) for node in result.graph.all_nodes()}
    return None if calls <= remaining else result  # some bodies need a newer operator set than the model's


# ---- BatchNormalization in forms that all engines compute ------------------------------------------------------------


_KEY = ("", "BatchNormalization")


def add_channel_axes(context: Context) -> None:
    """Add a channel axis to one-axis inputs of BatchNormalization, which frameworks do not take."""
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


def _add_channel(op: Builder, inputs: Inputs, attributes: Attributes, outputs: int) -> Results:
    x, *others = inputs
    normalized = op.BatchNormalization(op.Unsqueeze(x, [1]), *others, outputs=outputs, **attributes)
    y, *statistics = (normalized,) if outputs == 1 else normalized
    return op.Squeeze(y, [1]), *statistics


def write_out_unsafe(context: Context) -> None:
    """Write BatchNormalization in plain operators where ONNX Runtime computes it wrongly.

    Unless both running statistics are outputs of the graph, it overwrites those that it reads, even
    constants and tensors of the caller.
    """
    expand(context, {_KEY: _write_out}, lambda node: _is_unsafe(node, context.graph))


def _is_unsafe(node: ir.Node, graph: ir.Graph) -> bool:
    if not node.attributes.get_int("training_mode", 0):
        return False
    returned = [output for output in node.outputs[1:] if output.is_graph_output()]
    return (len(returned) < 2 or node.graph is not graph) and not all(map(_may_be_overwritten, node.inputs[3:]))


def _may_be_overwritten(value: ir.Value | None) -> bool:
    """True if a value may be overwritten: computed, and read once."""
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type != "Constant" and value is not None and len(value.uses()) == 1


def _write_out(op: Builder, inputs: Inputs, attributes: Attributes, outputs: int) -> Results:
    x, scale, bias, old_mean, old_variance = (value for value in inputs if value is not None)
    wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    x3, *vectors = (
        op.Cast(value, to=wide.value) for value in (op.Reshape(x, [0, 0, -1]), scale, bias, old_mean, old_variance)
    )
    mean = op.ReduceMean(x3, [0, 2], keepdims=1)
    centered = x3 - mean
    variance = op.ReduceMean(centered * centered, [0, 2], keepdims=1)
    factor, offset = (op.Unsqueeze(vector, [1]) for vector in vectors[:2])
    y = centered / op.Sqrt(variance + attributes["epsilon"]) * factor + offset
    share = attributes["momentum"]
    running = (
        op.CastLike(old * share + op.Squeeze(new, [0, 2]) * (1 - share), like)
        for old, new, like in zip(vectors[2:], (mean, variance), (old_mean, old_variance), strict=True)
    )
    return (op.CastLike(op.Reshape(y, op.Shape(x)), x), *running)[:outputs]
