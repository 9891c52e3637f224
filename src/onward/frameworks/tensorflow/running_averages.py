"""Running averages of the statistics of batch normalizations, in whatever way a function writes them.

A training model keeps them in each BatchNormalization, whose `momentum` says how much of the old is kept.
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

# ---- `mean.assign(0.9 * mean + 0.1 * batch_mean)` --------------------------------------------------------------------


Coefficients = dict[ir.Value | None, float]
"""Of a sum of values; that of None is the number that is added."""


def keep_averages(op: Builder, translator: Translator) -> Literal["population", "sample"]:
    """Let batch normalizations keep the averages that variables are assigned; which variance that is."""
    averages = {variable: _average(variable, update.value) for variable, update in translator.updates.items()}
    strange = [f"`{variable.name}`" for variable, average in averages.items() if average is None]
    by_statistic = {average.of: average for average in averages.values() if average is not None}
    found = [*translator.statistics, *replace_written_out(op, by_statistic)]
    for statistics in found:
        momenta = []
        for place, batch in zip((3, 4), statistics.batch, strict=True):
            if (average := by_statistic.pop(batch, None)) is not None:
                statistics.node.replace_input_with(place, average.variable)
                momenta.append(average.momentum)
        if len(momenta) == 2:
            _set_momentum(statistics.node, momenta)
    strange += [f"`{average.variable.name}`" for average in by_statistic.values()]
    if strange:
        raise UnsupportedError(
            f"the function assigns variables, but not running averages of a batch normalization: {', '.join(strange)}",
            hint="`tf.compat.v1.nn.fused_batch_norm`, and `tf.nn.batch_normalization` with `tf.nn.moments`, are known",
        )
    return _variance(found)


class Average(NamedTuple):
    """A variable that follows a statistic."""

    variable: ir.Value
    of: ir.Value
    momentum: float
    """How much is kept of the old average."""


def _average(variable: ir.Value, update: ir.Value) -> Average | None:
    terms = {value: number for value, number in (_coefficients(update) or {}).items() if number}
    kept = terms.pop(variable, 0.0)
    of, new = next(iter(terms.items()), (None, 0.0))
    return Average(variable, of, kept) if of and len(terms) == 1 and math.isclose(kept + new, 1, abs_tol=1e-6) else None


def _coefficients(value: ir.Value) -> Coefficients | None:
    """A value as a sum of others with coefficients, as far down as it is one."""
    node = value.producer()
    if node is None:
        return {value: 1.0}
    if node.op_type == "Constant":
        array = node.attributes["value"].as_tensor().numpy()
        return {None: float(array.reshape(-1)[0])} if array.size and (array == array.reshape(-1)[0]).all() else None
    if node.op_type not in ("Add", "Sub", "Mul", "Neg", "Identity"):
        return {value: 1.0}
    terms = [_coefficients(x) for x in node.inputs if x is not None]
    known = [term for term in terms if term is not None]
    if len(known) < len(terms):
        return None
    first, *others = known
    if node.op_type == "Mul":
        number, sum_of = (first, others[0]) if first.keys() == {None} else (others[0], first)
        return _scale_terms(sum_of, number[None]) if number.keys() == {None} else {value: 1.0}
    if node.op_type == "Neg":
        return _scale_terms(first, -1.0)
    if others:
        return _sum(first, _scale_terms(others[0], -1.0 if node.op_type == "Sub" else 1.0))
    return first


def _scale_terms(terms: Coefficients, factor: float) -> Coefficients:
    return {value: number * factor for value, number in terms.items()}


def _sum(a: Coefficients, b: Coefficients) -> Coefficients:
    return {value: a.get(value, 0.0) + b.get(value, 0.0) for value in {**a, **b}}


def _set_momentum(node: ir.Node, momenta: list[float]) -> None:
    mean, variance = momenta
    if not math.isclose(mean, variance, abs_tol=1e-6):
        raise UnsupportedError(
            f"a batch normalization keeps {mean:.4g} of its mean, but {variance:.4g} of its variance",
            hint="use one momentum for both",
        )
    node.attributes["momentum"] = ir.AttrFloat32("momentum", float(np.float32(mean)))


def _variance(found: list[Statistics]) -> Literal["population", "sample"]:
    kinds = {statistics.sample for statistics in found}
    if len(kinds) > 1:
        raise UnsupportedError(
            "some batch normalizations average the variance of the batch, others that of a sample",
            hint="use `tf.compat.v1.nn.fused_batch_norm` for all of them, or for none",
        )
    return "sample" if kinds == {True} else "population"


# ---- `tf.nn.batch_normalization` with `tf.nn.moments`, which TensorFlow writes out -----------------------------------


def replace_written_out(op: Builder, averaged: Collection[ir.Value]) -> list[Statistics]:
    """Replace batch normalizations that are written out and whose statistics are averaged."""
    found = []
    for root in [node for node in op.graph if node.op_type == "Add"]:
        match = _match(root, averaged)
        if match is not None:
            found.append(_replace(op, root.outputs[0], match))
    return found


class _Parts(NamedTuple):
    x: ir.Value
    scale: ir.Value
    bias: ir.Value
    mean: ir.Value
    variance: ir.Value
    epsilon: float
    axis: int
    """Where the channels are."""


def _match(root: ir.Node, averaged: Collection[ir.Value]) -> _Parts | None:
    """The parts of `x * k + (bias - mean * k)`, where k is `rsqrt(variance + epsilon) * scale`."""
    product, rest = (_producer(x, kind) for x, kind in zip(root.inputs, ("Mul", "Sub"), strict=True))
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
    return _Parts(x, scale, bias, mean, variance, number, axis)


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _vector(value: ir.Value | None) -> ir.Value | None:
    """A number for each channel, which may have got axes of size 1 to fit images."""
    node = _producer(value, "Reshape")
    value = value if node is None else node.inputs[0]
    return value if value is not None and value.shape is not None and value.shape.rank() == 1 else None


def _channels(slope: ir.Value) -> int | None:
    """The axis, from the end, along which there is a number for each channel."""
    sizes = [] if slope.shape is None else list(slope.shape)
    wide = [axis - len(sizes) for axis, size in enumerate(sizes) if size != 1]
    return wide[0] if len(wide) == 1 else -1 if sizes and not wide else None


def _replace(op: Builder, y: ir.Value, parts: _Parts) -> Statistics:
    assert y.shape is not None
    rank, unknown = y.shape.rank(), op.constant(np.zeros(1, np.float32))  # until it is known what averages it
    order = list(range(rank))
    order.insert(1, order.pop(parts.axis))
    images = permute(op, op(parts.x), order)
    made = op.BatchNormalization(images, parts.scale, parts.bias, unknown, unknown, epsilon=parts.epsilon)
    result = permute(op, made, [order.index(axis) for axis in range(rank)])
    y.replace_all_uses_with(result.like(y).value, replace_graph_outputs=True)
    node = made.value.producer()
    assert node is not None
    return Statistics(node, (parts.mean, parts.variance), sample=False)
