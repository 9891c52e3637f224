"""Running averages of statistics: `mean.assign(0.9 * mean + 0.1 * batch_mean)`, in whatever way it is written.

A training model keeps them beside each BatchNormalization, whose `momentum` says how much of the old is kept.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.frameworks.tensorflow.graph import Statistics, Walk
from onward.frameworks.tensorflow.moments import replace_written_out

Coefficients = dict[ir.Value | None, float]
"""Of a sum of values; that of None is the number that is added."""


def keep_averages(op: Builder, walk: Walk) -> Literal["population", "sample"]:
    """Let batch normalizations keep the averages that variables are assigned; which variance that is."""
    averages = {variable: _average(variable, update.value) for variable, update in walk.updates.items()}
    strange = [f"`{variable.name}`" for variable, average in averages.items() if average is None]
    by_statistic = {average.of: average for average in averages.values() if average is not None}
    found = [*walk.statistics, *replace_written_out(op, by_statistic)]
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
