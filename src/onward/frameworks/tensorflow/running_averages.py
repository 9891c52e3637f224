"""Running averages of batch statistics, however a function computes them.

A training model keeps them in BatchNormalization, whose `momentum` is the weight of the old
average.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import permute
from onward.frameworks.tensorflow.graph import Statistics, Translator

Coefficients = dict[ir.Value | None, float]  # of a sum of values; that of None is a constant term


def keep_averages(op: Builder, translator: Translator) -> Literal["population", "sample"]:
    """Let batch normalizations update the averages that a function assigns to variables.

    Return the kind of their variance. An assignment is such as `mean.assign(0.9 * mean + 0.1 *
    batch_mean)`.
    """
    averages = {variable: _average(variable, update.value) for variable, update in translator.updates.items()}
    strange = [f"`{variable.name}`" for variable, average in averages.items() if average is None]
    by_statistic = {average.of: average for average in averages.values() if average is not None}
    normalizations = [*translator.statistics, *replace_written_out(op, by_statistic)]
    for statistics in normalizations:
        momenta = []
        for index, batch in zip((3, 4), statistics.batch, strict=True):
            if (average := by_statistic.pop(batch, None)) is not None:
                statistics.node.replace_input_with(index, average.variable)
                momenta.append(average.momentum)
        if len(momenta) == 2:
            _set_momentum(statistics.node, momenta)
    strange += [f"`{average.variable.name}`" for average in by_statistic.values()]
    if strange:
        raise UnsupportedError(
            f"the function assigns variables, but not running averages of a batch normalization: {', '.join(strange)}",
            hint="`tf.compat.v1.nn.fused_batch_norm`, and `tf.nn.batch_normalization` with `tf.nn.moments`, are known",
        )
    return _variance(normalizations)


class RunningAverage(NamedTuple):
    """Variable that averages a statistic."""

    variable: ir.Value
    of: ir.Value
    momentum: float  # weight of the old average


def _average(variable: ir.Value, update: ir.Value) -> RunningAverage | None:
    terms = {value: number for value, number in (_coefficients(update) or {}).items() if number}
    momentum = terms.pop(variable, 0.0)
    of, new = next(iter(terms.items()), (None, 0.0))
    is_average = of and len(terms) == 1 and math.isclose(momentum + new, 1, abs_tol=1e-6)
    return RunningAverage(variable, of, momentum) if of and is_average else None


def _coefficients(value: ir.Value) -> Coefficients | None:
    """Return a value as a linear combination of others; None if a constant is not one number."""
    node = value.producer()
    if node is None:
        return {value: 1.0}
    if node.op_type == "Constant":
        array = node.attributes["value"].as_tensor().numpy()
        return {None: float(array.reshape(-1)[0])} if array.size and (array == array.reshape(-1)[0]).all() else None
    if node.op_type not in ("Add", "Sub", "Mul", "Neg", "Identity"):
        return {value: 1.0}
    terms = [_coefficients(x) for x in node.inputs if x is not None]
    a, b = terms[0], terms[-1]
    if a is None or b is None:
        return None
    if node.op_type == "Mul":
        factor, combination = (a, b) if a.keys() == {None} else (b, a)
        return _scale(combination, factor[None]) if factor.keys() == {None} else {value: 1.0}
    if len(terms) == 1:
        return _scale(a, -1.0) if node.op_type == "Neg" else a
    b = _scale(b, -1.0) if node.op_type == "Sub" else b
    return {x: a.get(x, 0.0) + b.get(x, 0.0) for x in {**a, **b}}


def _scale(terms: Coefficients, factor: float) -> Coefficients:
    return {value: number * factor for value, number in terms.items()}


def _set_momentum(node: ir.Node, momenta: list[float]) -> None:
    mean, variance = momenta
    if not math.isclose(mean, variance, abs_tol=1e-6):
        raise UnsupportedError(
            f"a batch normalization keeps {mean:.4g} of its mean, but {variance:.4g} of its variance",
            hint="use one momentum for both",
        )
    node.attributes["momentum"] = ir.AttrFloat32("momentum", float(np.float32(mean)))


def _variance(normalizations: list[Statistics]) -> Literal["population", "sample"]:
    is_sample = {statistics.sample for statistics in normalizations}
    if len(is_sample) > 1:
        raise UnsupportedError(
            "some batch normalizations average the variance of the batch, others that of a sample",
            hint="use `tf.compat.v1.nn.fused_batch_norm` for all of them, or for none",
        )
    return "sample" if is_sample == {True} else "population"


def replace_written_out(op: Builder, averaged: Collection[ir.Value]) -> list[Statistics]:
    """Replace `tf.nn.batch_normalization`, which TensorFlow computes by elementwise operations."""
    roots = [node for node in op.graph if node.op_type == "Add"]
    return [_replace(op, root.outputs[0], m) for root in roots if (m := _match(root, averaged)) is not None]


class _Match(NamedTuple):
    x: ir.Value
    scale: ir.Value
    bias: ir.Value
    mean: ir.Value
    variance: ir.Value
    epsilon: float
    axis: int  # of the channels


def _match(root: ir.Node, averaged: Collection[ir.Value]) -> _Match | None:
    """Match `x * k + (bias - mean * k)`, where k is `rsqrt(variance + epsilon) * scale`."""
    product, rest = (_producer(x, op_type) for x, op_type in zip(root.inputs, ("Mul", "Sub"), strict=True))
    shift = rest and _producer(rest.inputs[1], "Mul")
    if not (product and rest and shift) or product.inputs[1] is not shift.inputs[1]:
        return None
    slope = _producer(shift.inputs[1], "Mul")
    inverse = slope and _producer(slope.inputs[0], "Reciprocal")
    root_of = inverse and _producer(inverse.inputs[0], "Sqrt")
    widened = root_of and _producer(root_of.inputs[0], "Add")
    epsilon = widened and _producer(widened.inputs[1], "Constant")
    if not (slope and widened and epsilon):
        return None
    vectors = (slope.inputs[1], rest.inputs[0], shift.inputs[0], widened.inputs[0])
    scale, bias, mean, variance = (_vector(value) for value in vectors)
    x, axis = product.inputs[0], _channels(slope.outputs[0])
    if not (x and scale and bias and mean and variance) or axis is None or not {mean, variance} <= set(averaged):
        return None
    number = float(epsilon.attributes["value"].as_tensor().numpy())
    return _Match(x, scale, bias, mean, variance, number, axis)


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _vector(value: ir.Value | None) -> ir.Value | None:
    """Return a value of rank 1, without a Reshape that adds axes of size 1."""
    node = _producer(value, "Reshape")
    value = value if node is None else node.inputs[0]
    return value if value is not None and value.shape is not None and value.shape.rank() == 1 else None


def _channels(slope: ir.Value) -> int | None:
    """Return the axis of the channels, from the end."""
    sizes = [] if slope.shape is None else list(slope.shape)
    wide = [axis - len(sizes) for axis, size in enumerate(sizes) if size != 1]
    return wide[0] if len(wide) == 1 else -1 if sizes and not wide else None


def _replace(op: Builder, y: ir.Value, match: _Match) -> Statistics:
    assert y.shape is not None
    rank, unknown = y.shape.rank(), op.constant(np.zeros(1, np.float32))  # replaced by the averages
    order = list(range(rank))
    order.insert(1, order.pop(match.axis))
    images = permute(op, op(match.x), order)
    normalized = op.BatchNormalization(images, match.scale, match.bias, unknown, unknown, epsilon=match.epsilon)
    result = permute(op, normalized, [order.index(axis) for axis in range(rank)])
    y.replace_all_uses_with(result.like(y).value, replace_graph_outputs=True)
    node = normalized.value.producer()
    assert node is not None
    return Statistics(node, (match.mean, match.variance), sample=False)
