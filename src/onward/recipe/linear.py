"""Linear models of `ai.onnx.ml` in a form that can be trained: what are attributes there become initializers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import add_initializer
from onward.differentiate.expand import replace_node
from onward.model import Model
from onward.rules.classical import classify, post_transform_scores
from onward.rules.registry import make_rewrite
from onward.transform.context import Context
from onward.transform.linear import DOMAIN, ORIGIN_KEY, PART_KEY


def open_linear(model: Model) -> None:
    """Replace LinearRegressor and LinearClassifier by standard operators that compute the same, in place.

    Their weights are `NODE.coefficients` and `NODE.intercepts`, their scores `NODE.scores`. `strip` makes them what
    they were.
    """
    context = Context(model)
    for node in [node for node in model.graph if node.domain == DOMAIN and node.op_type in _OPENED]:
        results = [value.name for value in node.outputs]
        replace_node(context, node, make_rewrite((DOMAIN, node.op_type), _OPENED[node.op_type]))
        for value in [output for made in model.graph for output in made.outputs if output.name in results]:
            value.producer().metadata_props[PART_KEY] = str(results.index(value.name))  # type: ignore[union-attr]


def _regressor(
    op: Builder, x: Expr, *, coefficients: Any, intercepts: Any, targets: int = 1, post_transform: Any, node: ir.Node
) -> Expr:
    scores = _scores(op, x, coefficients, intercepts, targets, node)
    result: Expr = post_transform_scores(op, scores, post_transform)  # type: ignore[no-untyped-call]
    return result


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
    result: tuple[Expr, Expr] = classify(op, scores, intercepts, labels, post_transform, node)  # type: ignore[no-untyped-call]
    return result


_OPENED: Mapping[str, Callable[..., Any]] = {"LinearRegressor": _regressor, "LinearClassifier": _classifier}


def _scores(op: Builder, x: Expr, coefficients: Any, intercepts: Any, rows: int, node: ir.Node) -> Expr:
    owner = node.name or node.op_type
    matrix = np.array(coefficients, np.float32).reshape(rows, -1)
    weight = add_initializer(op.graph, op.names.fresh(f"{owner}.coefficients"), matrix)
    offsets = np.array(intercepts, np.float32)
    bias = [add_initializer(op.graph, op.names.fresh(f"{owner}.intercepts"), offsets)] if intercepts else []
    made = op.Gemm(_rows(op, x, matrix.shape[1]), weight, *bias, transB=1).named(f"{owner}.scores")
    gemm = made.value.producer()
    assert gemm is not None
    kept = {name: attribute.value for name, attribute in node.attributes.items()}
    origin = {
        "operator": node.op_type,
        "name": node.name or "",
        "version": op.imports[DOMAIN],
        "shape": matrix.shape,
        "outputs": len(node.outputs),
        "attributes": {k: v for k, v in kept.items() if k not in ("coefficients", "intercepts") and v not in ((), [])},
    }
    gemm.metadata_props[ORIGIN_KEY] = json.dumps(origin)
    return made


def _rows(op: Builder, x: Expr, width: int) -> Expr:
    """Examples in rows, as float32; one example may come as a vector."""
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
