"""Reductions along axes."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import cast
from onward.frameworks.jax.jaxpr.values import widely

primitives = Operators()


def _reduction_rule(operator):
    """A reduction. Truth values and small integers are counted in 64 bits."""

    @widely
    def reduced(op, x, axes):
        return getattr(op, operator)(x, axes, keepdims=0) if axes else x

    return lambda op, x, *, axes: reduced(op, x, list(axes))


primitives(
    reduce_sum=_reduction_rule("ReduceSum"),
    reduce_prod=_reduction_rule("ReduceProd"),
    reduce_max=_reduction_rule("ReduceMax"),
    reduce_min=_reduction_rule("ReduceMin"),
    reduce_or=_reduction_rule("ReduceMax"),
    reduce_and=_reduction_rule("ReduceMin"),
)


def _collective_rule(operator):
    """A reduction over an axis that `vmap` gave a name; nothing here lives on several devices."""
    reduced = _reduction_rule(operator)

    def collected(op, *xs, axes, axis_index_groups):
        if axis_index_groups is not None or any(isinstance(axis, str) for axis in axes):
            raise UnsupportedError("it is about several devices, or groups of them")
        return [reduced(op, x, axes=axes) for x in xs]

    return collected


primitives(psum=_collective_rule("ReduceSum"), pmax=_collective_rule("ReduceMax"), pmin=_collective_rule("ReduceMin"))


@primitives.define("reduce_xor")
def reduce_xor(op, x, *, axes):
    """Of truth values: whether an odd number of them is true."""
    count = op.ReduceSum(cast(op, x, np.int64), list(axes), keepdims=0)
    return op.Equal(op.Mod(count, 2), 1)


def _position(operator):
    def position(op, x, *, axes, index_dtype):
        wide = x if x.dtype.is_floating_point() else cast(op, x, np.int64)
        return cast(op, getattr(op, operator)(wide, axis=axes[0], keepdims=0), index_dtype)

    return position


primitives(argmax=_position("ArgMax"), argmin=_position("ArgMin"))
