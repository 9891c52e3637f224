"""Running sums, products and the like."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.frameworks.jax.jaxpr.emitter import declare_value
from onward.frameworks.jax.jaxpr.values import extreme, fill, widely

primitives = Operators()


@widely
def _cumsum(op, x, axis, reverse):
    return op.CumSum(x, op.constant(np.int64(axis)), reverse=int(reverse))


primitives(cumsum=lambda op, x, *, axis, reverse: _cumsum(op, x, axis, reverse))


def _scan_rule(combine, start):
    """A Scan along the axis that combines what was with what comes; `start(dtype)` changes nothing."""

    def scanned(op, x, *, axis, reverse, ins):
        rest = [size for i, size in enumerate(ins[0].shape) if i != axis]
        sort = ir.TensorType(x.dtype)

        def step(inner, before, item):
            after = combine(inner, before, item)
            return after, after

        shape = ir.Shape([size if isinstance(size, int) else str(size) for size in rest])
        body = op.subgraph(step, [ir.Value(name=name, type=sort, shape=shape) for name in ("before", "item")])
        first = fill(op, rest, start(ins[0].dtype), ins[0].dtype)
        way = [int(reverse)]
        _, result = op.Scan(
            first,
            x,
            outputs=2,
            body=body,
            num_scan_inputs=1,
            scan_input_axes=[axis],
            scan_output_axes=[axis],
            scan_input_directions=way,
            scan_output_directions=way,
        )
        return result.like(declare_value(ins[0]))

    return scanned


def _log_of_sum(op, a, b):
    largest = op.Max(a, b)
    return largest + op.Log(op.Exp(a - largest) + op.Exp(b - largest))


primitives(
    cumprod=_scan_rule(lambda op, a, b: a * b, lambda dtype: 1),
    cummax=_scan_rule(lambda op, a, b: op.Max(a, b), lambda dtype: extreme(dtype, largest=False)),
    cummin=_scan_rule(lambda op, a, b: op.Min(a, b), lambda dtype: extreme(dtype, largest=True)),
    cumlogsumexp=_scan_rule(_log_of_sum, lambda dtype: np.finfo(dtype).min),
)
