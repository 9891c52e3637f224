"""The forward pass in training mode.

The inference graph stays in inference mode. For Dropout, BatchNormalization, random numbers and
observed QuantizeLinear, the algorithm gets a copy in training mode, and of all nodes from there to
the loss; weights are shared by name. A call of `onward.InTraining` becomes its second input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import add_initializer, constant_tensor
from onward.differentiate.expand import replace_node
from onward.errors import UnsupportedError
from onward.model import Model
from onward.model.core import values
from onward.model.walk import ancestors, read_by
from onward.options import Variance
from onward.recipe import random
from onward.recipe.quantize.ranges import is_observed, observe
from onward.recipe.step_builder import StepBuilder, in_training, moving_average
from onward.recipe.trainable import Choice
from onward.rules.classical import classify, post_transform_scores
from onward.rules.registry import make_rewrite
from onward.standard import ML_DOMAIN, is_standard
from onward.transform.context import Context
from onward.transform.quantized import RANGE_KEY, STORED_KEY
from onward.transform.training import FIXED_KEY, ORIGIN_KEY, PART_KEY

NEXT_KEY = "train.next"
"""Mark of values that replace statistics: a step computes them in training mode, as what its loss reads."""
SWITCHED = {"Dropout", "BatchNormalization"}
"""Operators that compute something else in training than in inference."""


def training_forward(
    builder: StepBuilder,
    outputs: Iterable[ir.Value],
    choices: Iterable[Choice],
    variance: Variance,
    changed: Mapping[ir.Value, ir.Value],
) -> dict[ir.Value, ir.Value]:
    """Add the training-mode part of the forward pass; return a map of inference to training values.

    `changed` holds augmented values. A BatchNormalization with a frozen scale stays in inference
    mode. `variance` selects the running variance: of the population (ONNX), or of the sample with n
    - 1 (PyTorch).
    """
    frozen = {choice.name for choice in choices if choice.role == "frozen"}
    needed, _ = ancestors(outputs, reads=_read_in_training)
    new = dict(changed)
    for node in list(builder.model.graph):
        if node not in needed:
            continue
        if node.op_type == "BatchNormalization" and is_switchable(node, frozen):
            _batch_normalization(builder, node, new, variance)
        elif RANGE_KEY in node.metadata_props and is_observed(node) and STORED_KEY not in node.metadata_props:
            observe(builder, node, new)
        elif node.op_type == "Dropout" and (ratio := _dropout_ratio(node)) != 0.0:
            if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
                raise UnsupportedError(
                    f"other nodes read the mask of Dropout `{node.name}`", hint="remove them from the inference graph"
                )
            op = builder.op.scoped(f"train/{node.name or node.op_type}")
            x = node.inputs[0]
            assert x is not None
            if ratio is None:
                raise UnsupportedError(f"the ratio of Dropout `{node.name}` is computed", hint="make it a constant")
            key = builder.random_key(node.name or node.outputs[0].name or "Dropout")
            y = random.dropout(op, op(new.get(x, x)), ratio, key)
            new[node.outputs[0]] = _like(y, node.outputs[0], builder)
        elif node.op_type in _DRAWS and is_standard(node):
            new[node.outputs[0]] = _like(_draw(builder, node, new), node.outputs[0], builder)
        elif node.op_type == in_training.name and not is_standard(node):
            (value,) = _read_in_training(node)
            new[node.outputs[0]] = new.get(value, value)
        elif any(value in new for value in read_by(node)):
            _copy(builder, node, new)
    return new


def _read_in_training(node: ir.Node) -> list[ir.Value]:
    values = list(read_by(node))
    return values[1:] if node.op_type == in_training.name and not is_standard(node) else values


_DRAWS = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def _draw(builder: StepBuilder, node: ir.Node, new: Mapping[ir.Value, ir.Value]) -> Expr:
    """Draw the random numbers of a node from the generator of the step."""
    op = builder.op.scoped(f"train/{node.name or node.op_type}")
    like = node.inputs[0] if node.inputs else None
    shape = op.constant(np.array(node.attributes.get_ints("shape", []), np.int64))
    if like is not None:
        shape = op.Shape(new.get(like, like))
    dtype = node.outputs[0].dtype or ir.DataType.FLOAT
    drawn = ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    key = builder.random_key(node.name or node.outputs[0].name or node.op_type)
    if "Normal" in node.op_type:
        scale, offset = node.attributes.get_float("scale", 1.0), node.attributes.get_float("mean", 0.0)
        numbers = random.normal(op, key, shape, drawn)
    else:
        offset = node.attributes.get_float("low", 0.0)
        scale = node.attributes.get_float("high", 1.0) - offset
        numbers = random.uniform(op, key, shape, drawn)
    numbers = numbers if scale == 1.0 else numbers * scale
    numbers = numbers if offset == 0.0 else numbers + offset
    return numbers if dtype == drawn else op.Cast(numbers, to=dtype)


def functions_to_inline(model: Model) -> list[str]:
    """Return functions that contain operators with a training mode; inline them to switch these."""
    return [
        f"{function.domain}.{function.name}"
        for function in model.functions.values()
        if any(node.op_type in SWITCHED and is_standard(node) for node in function.all_nodes())
    ]


def is_switchable(node: ir.Node, frozen: Collection[str]) -> bool:
    """True if training lets a BatchNormalization use the statistics of the batch."""
    if any(value is None or not value.is_initializer() for value in node.inputs[3:5]):
        return False  # computed statistics cannot be updated
    is_frozen = FIXED_KEY in node.metadata_props or (node.inputs[1] is not None and node.inputs[1].name in frozen)
    return not is_frozen


def fix_statistics(graph: ir.Graph) -> None:
    """Let each BatchNormalization keep its statistics in training."""
    for node in graph:
        if node.op_type == "BatchNormalization" and is_switchable(node, ()):
            node.metadata_props[FIXED_KEY] = "1"


def _batch_normalization(
    builder: StepBuilder, node: ir.Node, new: dict[ir.Value, ir.Value], variance: Variance
) -> None:
    """Normalize with the statistics of the batch, and update the running ones.

    With momentum 0 the operator returns the statistics of the batch. The running ones are averaged
    outside: ONNX Runtime lets the operator overwrite its inputs while other nodes read them.
    """
    op = builder.op.scoped(f"train/{node.name or node.op_type}")
    x, scale, bias, mean, var = (op(new.get(value, value)) for value in node.inputs if value is not None)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    y, batch_mean, batch_var = op.BatchNormalization(
        x, scale, bias, mean * 0.0, var * 0.0, outputs=3, epsilon=epsilon, momentum=0.0, training_mode=1
    )
    if variance == "sample":
        batch_var = _sample_variance(x, batch_var)
    new[node.outputs[0]] = _like(y, node.outputs[0], builder)
    momentum = float(str(np.float32(node.attributes.get_float("momentum", 0.9))))  # 0.9, not 0.8999999761581421
    for old, running, batch in zip(node.inputs[3:5], (mean, var), (batch_mean, batch_var), strict=True):
        assert old is not None
        # A second normalization with the same statistics continues from here.
        new[old] = op.call(moving_average, running, batch, op.constant(np.float64(momentum))).like(old).value


def _sample_variance(x: Expr, population: Expr) -> Expr:
    op = x.op
    shape = op.Shape(x)
    n = op.CastLike(op.Div(op.ReduceProd(shape, keepdims=0), op.Gather(shape, np.int64(1))), population)
    return population * (n / op.Max(n - 1, 1))


def bind_statistics(builder: StepBuilder, new: dict[ir.Value, ir.Value]) -> list[ir.Value]:
    """Bind the running statistics to the step's new values; return them."""
    bound = builder.step.update
    statistics = [v for v in values(builder.model.graph) if v.is_initializer() and v in new and v.name not in bound]
    for value in statistics:
        assert value.name is not None and value.const_value is not None
        if value in builder.model.graph.inputs:
            builder.model.graph.inputs.remove(value)
        builder.update(value.name, builder.op(new[value]))
    return statistics


def _dropout_ratio(node: ir.Node) -> float | None:
    """Return the ratio of a Dropout; None if it is computed."""
    if len(node.inputs) < 2 or (value := node.inputs[1]) is None:
        return 0.5  # the operator's default
    tensor = constant_tensor(value)
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None else None


def _copy(builder: StepBuilder, node: ir.Node, new: dict[ir.Value, ir.Value]) -> None:
    inputs = [new.get(value, value) if value is not None else None for value in node.inputs]
    attributes = [_copied_attribute(attribute, new) for attribute in node.attributes.values()]
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        attributes,
        overload=node.overload,
        num_outputs=len(node.outputs),
        metadata_props=dict(node.metadata_props),
    )
    for old, output in zip(node.outputs, copy.outputs, strict=True):
        if old.name:
            output.name = builder.op.names.fresh(f"train/{old.name}")
            output.type, output.shape = old.type, old.shape
            new[old] = output
        else:
            output.name = ""
    # After those of values: names of values matter more and take the fresh ones first.
    copy.name = builder.op.names.fresh(f"train/{node.name or node.op_type}")
    builder.step.algorithm.append(copy)


def _copied_attribute(attribute: ir.Attr, new: dict[ir.Value, ir.Value]) -> ir.Attr:
    if attribute.type != ir.AttributeType.GRAPH or attribute.is_ref():
        return attribute
    graph = attribute.as_graph().clone(allow_outer_scope_values=True)
    for inner in graph.all_nodes():
        for i, value in enumerate(inner.inputs):
            if value in new:
                inner.replace_input_with(i, new[value])
    return ir.AttrGraph(attribute.name, graph)


def _like(expr: Expr, old: ir.Value, builder: StepBuilder) -> ir.Value:
    return expr.named(f"train/{old.name}").like(old).value


# ---- linear models of ai.onnx.ml -------------------------------------------------------------------------------------


def open_linear(model: Model) -> None:
    """Replace LinearRegressor and LinearClassifier by equivalent standard operators, in place.

    Weights are `NODE.coefficients` and `NODE.intercepts`, scores `NODE.scores`. `strip` reverts
    this.
    """
    context = Context(model)
    for node in [node for node in model.graph if node.domain == ML_DOMAIN and node.op_type in _OPENED]:
        results = [value.name for value in node.outputs]
        replace_node(context, node, make_rewrite((ML_DOMAIN, node.op_type), _OPENED[node.op_type]))
        for value in [output for producer in model.graph for output in producer.outputs if output.name in results]:
            value.producer().metadata_props[PART_KEY] = str(results.index(value.name))  # type: ignore[union-attr]
    for node in model.graph:
        if node.domain == ML_DOMAIN and node.op_type in _KEEPING and node.outputs[0].type is None and node.inputs[0]:
            node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), node.inputs[0].shape


_KEEPING = ("Normalizer", "Scaler")
"""Operators that return floats in the shape of their input; onnx does not infer their types."""


def _regressor(
    op: Builder, x: Expr, *, coefficients: Any, intercepts: Any, targets: int = 1, post_transform: Any, node: ir.Node
) -> Expr:
    scores = _scores(op, x, coefficients, intercepts, targets, node)
    return post_transform_scores(op, scores, post_transform)  # type: ignore[no-untyped-call]


def _classifier(
    op: Builder,
    x: Expr,
    *,
    coefficients: Any,
    intercepts: Any,
    classlabels_ints: Any,
    classlabels_strings: Any,
    post_transform: Any,
    node: ir.Node,
) -> tuple[Expr, Expr]:
    labels = classlabels_ints or classlabels_strings or ()
    scores = _scores(op, x, coefficients, intercepts, len(intercepts or labels), node)
    return classify(op, scores, intercepts, labels, post_transform, node)  # type: ignore[no-untyped-call]


_OPENED: Mapping[str, Callable[..., Any]] = {"LinearRegressor": _regressor, "LinearClassifier": _classifier}


def _scores(op: Builder, x: Expr, coefficients: Any, intercepts: Any, rows: int, node: ir.Node) -> Expr:
    owner = node.name or node.op_type
    matrix = np.array(coefficients, np.float32).reshape(rows, -1)
    weight = add_initializer(op.graph, op.names.fresh(f"{owner}.coefficients"), matrix)
    offsets = np.array(intercepts, np.float32)
    bias = [add_initializer(op.graph, op.names.fresh(f"{owner}.intercepts"), offsets)] if intercepts else []
    scores = op.Gemm(_rows(op, x, matrix.shape[1]), weight, *bias, transB=1).named(f"{owner}.scores")
    gemm = scores.value.producer()
    assert gemm is not None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    origin = {
        "operator": node.op_type,
        "name": node.name or "",
        "version": op.imports[ML_DOMAIN],
        "shape": matrix.shape,
        "outputs": len(node.outputs),
        "attributes": {
            k: v for k, v in attributes.items() if k not in ("coefficients", "intercepts") and v not in ((), [])
        },
    }
    gemm.metadata_props[ORIGIN_KEY] = json.dumps(origin)
    return scores


def _rows(op: Builder, x: Expr, width: int) -> Expr:
    """Return examples in rows, as float32; one example may come as a vector."""
    shape = x.value.shape
    if shape is not None and shape.rank() == 2 and isinstance(shape[1], int) and shape[1] != width:
        raise UnsupportedError(f"a linear model has coefficients for {width} features, and gets {shape[1]}")
    before = x
    x = x if x.dtype == ir.DataType.FLOAT else op.Cast(x, to=ir.DataType.FLOAT)
    x = x if x.value.shape is not None and x.value.shape.rank() == 2 else op.Reshape(x, [-1, width])
    value = x.value
    while value is not before.value:
        producer = value.producer()
        assert producer is not None and producer.inputs[0] is not None
        producer.metadata_props[PART_KEY] = "x"
        value = producer.inputs[0]
    return x
