"""Orders."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import cast

primitives = Operators()


@primitives.define("sort")
def sort(op, *xs, dimension, num_keys, ins):
    """By the last key first: TopK leaves what is equal in its order, so that earlier keys count for more."""
    size = op.shape([ins[0].shape[dimension]])
    for key in reversed(range(num_keys)):
        _, order = op.TopK(_comparable(op, xs[key]), size, axis=dimension, largest=0, sorted=1, outputs=2)
        xs = tuple(op.GatherElements(x, order, axis=dimension) for x in xs)
    return xs


@primitives.define("top_k")
def top_k(op, x, *, k, axis):
    _, places = op.TopK(_comparable(op, x), op.shape([k]), axis=axis, largest=1, sorted=1, outputs=2)
    return op.GatherElements(x, places, axis=axis), cast(op, places, np.int32)


def _comparable(op, x):
    """In a type that ONNX Runtime sorts."""
    if x.dtype is ir.DataType.UINT64:
        raise UnsupportedError("unsigned numbers of 64 bits have no order in ONNX Runtime")
    return x if x.dtype.is_floating_point() or x.dtype is ir.DataType.INT32 else cast(op, x, np.int64)
