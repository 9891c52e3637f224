"""Inputs that are made up, where nobody gives any."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from onward.agreement.gradcheck.inputs import candidate_inputs
from onward.model import Model

_CANDIDATES = 4


def example_inputs(model: Model, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Inputs of several sizes: the caller takes the first with which everything runs."""
    smallest, *larger = itertools.islice(inputs_of_type(model, {}, seed), _CANDIDATES)
    yield from (*larger, smallest)  # a BatchNorm of two samples gives nothing but signs


def inputs_of_type(model: Model, given: Mapping[str, np.ndarray], seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Ever other values for the inputs that are not given, in the types that the model takes."""
    types = {value.name or "": value.dtype.numpy() for value in model.inputs if value.dtype is not None}
    for arrays in candidate_inputs(model, given, seed):
        yield {name: array.astype(types.get(name, array.dtype)) for name, array in arrays.items()}
