"""Operators that read and write elements at places that are computed."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.reference import from_reference
from onward.engines.shared.indexing import along, places_of, unique_elements

operators = Operators()

operators(Gather=lambda x, indices, *, axis: np.take(x, indices, axis))


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    return _scatter(x, along(indices, axis), updates, reduction)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return _scatter(x, places_of(indices), updates, reduction)


operators(
    Compress=lambda x, condition, *, axis: np.compress(condition, x, axis),
    NonZero=lambda x: np.argwhere(x).T,
    Unique=lambda x, *, axis, sorted: unique_elements(x, axis, sorted),
    NonMaxSuppression=from_reference("NonMaxSuppression"),
)


_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(x, places, updates, reduction):
    result = x.copy()
    if reduction == "none":
        result[places] = updates
    else:
        _REDUCTIONS[reduction].at(result, places, updates)
    return result
