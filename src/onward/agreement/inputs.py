"""Inputs for comparisons: the user's, and random ones for the rest."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import DataError, InvalidModelError, UnknownNameError, UnsupportedError, suggest
from onward.inspect.formatting import shape as shown_shape
from onward.inspect.summary import port
from onward.model import Model
from onward.model.core import values
from onward.model.storage.containers import read_npz
from onward.model.storage.files import reason
from onward.run_state.reading import number
from onward.transform.declare import declare_hint
from onward.transform.float_type import FLOATS
from onward.transform.inline import inline
from onward.transform.types import fill_in_types

Given = Mapping[str, Any] | str | Path | None

GIVE = "pass inputs for which the model runs: `inputs={...}`, or `--inputs inputs.npz` on the command line"

_SIZES = (2, 8, 32, 1, 256)
"""Sizes to try for dynamic dimensions: some models need large ones, others fail with them."""
_LARGEST_BATCH = 32
"""Size up to which batches are tried; some models take only one sample."""


def generator(seed: int) -> np.random.Generator:
    """Return a generator that never repeats the numbers of a weight drawn with the same seed."""
    return np.random.default_rng([seed, *b"onward"])


def fit_inputs(given: Given, declared: Mapping[str, ir.Value], spare: Container[str] = ()) -> dict[str, np.ndarray]:
    """Return the user's arrays in the declared types; those for `spare` inputs are ignored."""
    arrays = {}
    for name, array in _read(given).items():
        if name in declared:
            arrays[name] = _fitting(declared[name], array)
        elif name not in spare:
            hint = suggest(name, declared) or f"it has {', '.join(f'`{name}`' for name in declared) or 'none'}"
            raise UnknownNameError(f"the model has no input `{name}`", hint=hint)
    return arrays


def _read(given: Given) -> dict[str, np.ndarray]:
    if isinstance(given, str | Path):
        try:
            return read_npz(given)
        except OSError as error:
            raise DataError(
                f"cannot read `{given}`: {reason(error)}", hint="check the path; it is relative to the current folder"
            ) from error
        except ValueError as error:
            raise DataError(f"`{given}` is not an .npz file: {error}", hint="write one with `numpy.savez`") from error
    return {name: np.asarray(array) for name, array in (given or {}).items()}


def candidate_inputs(model: Model, given: Mapping[str, np.ndarray], seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield random values for the inputs not given, of several sizes: use the first for which the model runs."""
    missing = [value for value in model.inputs if value.name not in given]
    sizes = _sizes(model, given)
    limits = _index_limits(model, missing)
    for positive in (False, True):
        for size in _SIZES:
            rng = generator(seed)
            yield {v.name or "": _random(v, _shape(v, sizes, size), limits, positive, rng) for v in missing}
            if all(_shape(value, sizes, 0) == _shape(value, sizes, 1) for value in missing):
                break


def _fitting(value: ir.Value, array: np.ndarray) -> np.ndarray:
    dtype = value.dtype.numpy() if value.dtype is not None else array.dtype
    kinds = "fiu" if value.dtype in FLOATS else "iu" if np.issubdtype(dtype, np.integer) else dtype.kind
    expected = f"`{value.name}` must be {port(value).type} {shown_shape(port(value).shape)}"
    fits = value.shape is None or (
        value.shape.rank() == array.ndim
        and all(not isinstance(d, int) or d == n for d, n in zip(value.shape, array.shape, strict=True))
    )
    if not fits or (array.dtype.kind not in kinds and array.dtype != dtype):
        raise InvalidModelError(f"{expected}, not {array.dtype} {list(array.shape)}", hint="pass such an array")
    if array.size and dtype.kind in "iu" and array.dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise InvalidModelError(
                f"{expected}: values range from {array.min()} to {array.max()}", hint="pass smaller values"
            )
    return array.astype(dtype)


def _sizes(model: Model, given: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the sizes of named dimensions, by the arrays given."""
    sizes: dict[str, int] = {}
    for value in model.inputs:
        array = given.get(value.name or "")
        if array is not None and value.shape is not None:
            pairs = zip(value.shape, array.shape, strict=True)
            sizes |= {d.value: n for d, n in pairs if isinstance(d, ir.SymbolicDim) and d.value is not None}
    return sizes


def _shape(value: ir.Value, sizes: Mapping[str, int], otherwise: int) -> tuple[int, ...]:
    if not isinstance(value.type, ir.TensorType) or value.shape is None or value.dtype == ir.DataType.STRING:
        type_ = port(value).type
        hint = f"{GIVE}; or {declare_hint(value.name or '')}" if value.shape is None else GIVE
        raise UnsupportedError(f"cannot draw a random value for `{value.name}` ({type_} of unknown shape)", hint=hint)
    usual = [1 if axis == 0 and otherwise > _LARGEST_BATCH else otherwise for axis in range(len(value.shape))]
    return tuple(
        d if isinstance(d, int) else sizes.get(d.value or "", size) for d, size in zip(value.shape, usual, strict=True)
    )


def _random(
    value: ir.Value, shape: tuple[int, ...], limits: Mapping[str, int], positive: bool, rng: np.random.Generator
) -> np.ndarray:
    """Return normal floats, or floats between 0.1 and 0.9 if `positive`, or integers below the limit."""
    assert value.dtype is not None
    if value.dtype in FLOATS:
        return rng.uniform(0.1, 0.9, shape) if positive else rng.standard_normal(shape)
    if value.dtype == ir.DataType.BOOL:
        return rng.random(shape) < 0.5
    usual = 256 if value.dtype == ir.DataType.UINT8 else 2  # bytes are images: two values would show little
    return rng.integers(0, limits.get(value.name or "") or usual, shape).astype(value.dtype.numpy())


# ---- where integers go -----------------------------------------------------------------------------------------------

_KEEPS_INDICES = {
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose",
    "Unsqueeze", "Where",
}  # fmt: skip
"""Operators that pass integers on unchanged."""


def _index_limits(model: Model, inputs: list[ir.Value]) -> dict[str, int]:
    """Return the exclusive upper limit of each integer input that is an index."""
    integers = {value.name for value in inputs if value.dtype is not None and value.dtype.is_integer()}
    if not integers:
        return {}
    model = inline(model)
    fill_in_types(model, values(model.graph))
    limits_by_name = {}
    for value in model.inputs:
        limits = list(_limits(value)) if value.name in integers else []
        if value.name and limits:
            limits_by_name[value.name] = min(limits)
    return limits_by_name


def _limits(value: ir.Value) -> Iterator[int]:
    pending, seen = [value], {value}
    while pending:
        for node, index in pending.pop().uses():
            limit = _limit(node, index)
            if limit is not None:
                yield limit
            elif node.op_type in _KEEPS_INDICES:
                fresh = [output for output in node.outputs if output not in seen]
                seen.update(fresh)
                pending += fresh


def _limit(node: ir.Node, index: int) -> int | None:
    """Return the limit of an input of a node; None if it indexes nothing or the size is unknown."""
    match node.op_type, index:
        case "Gather" | "GatherElements" | "ScatterElements", 1:
            axis = node.attributes.get_int("axis", 0)
        case "SoftmaxCrossEntropyLoss" | "NegativeLogLikelihoodLoss", 1:
            axis = 1
        case "GatherND" | "ScatterND", 1:
            axis = 0
        case "OneHot", 0:
            depth = number(node.inputs[1])
            return depth if isinstance(depth, int) else None
        case _:
            return None
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    size = shape[axis] if shape is not None else None
    return size if isinstance(size, int) else None


def example_inputs(model: Model, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Yield inputs of several sizes: use the first for which everything runs."""
    smallest, *larger = itertools.islice(inputs_of_type(model, {}, seed), len(_SIZES))
    yield from (*larger, smallest)  # a BatchNorm of two samples returns only signs


def inputs_of_type(model: Model, given: Mapping[str, np.ndarray], seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield `candidate_inputs` in the types that the model takes."""
    types = {value.name or "": value.dtype.numpy() for value in model.inputs if value.dtype is not None}
    for arrays in candidate_inputs(model, given, seed):
        yield {name: array.astype(types.get(name, array.dtype)) for name, array in arrays.items()}
