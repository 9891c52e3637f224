"""Inputs at which models are run for a comparison: those that are given, and made-up ones for the rest."""

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

GIVE = (
    "give inputs for which the model runs: `inputs=` a dict of arrays or an .npz file, `--inputs` on the command line"
)

_SIZES = (2, 8, 32, 1)
"""What to try for dimensions that the model leaves open; too small is as wrong for some as too large is for others."""


def generator(seed: int) -> np.random.Generator:
    """Random numbers that are not those of a weight which somebody drew with the same seed."""
    return np.random.default_rng([seed, *b"onward"])


def fit_inputs(given: Given, known: Mapping[str, ir.Value], spare: Container[str] = ()) -> dict[str, np.ndarray]:
    """What the user gives, as arrays that fit inputs that are known; those that are to spare are left out."""
    found = {}
    for name, array in _read(given).items():
        if name in known:
            found[name] = _fitting(known[name], array)
        elif name not in spare:
            hint = suggest(name, known) or f"it has {', '.join(f'`{name}`' for name in known) or 'none'}"
            raise UnknownNameError(f"the model has no input `{name}`", hint=hint)
    return found


def _read(given: Given) -> dict[str, np.ndarray]:
    """Arrays by name, from a file if need be."""
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
    """Ever other values for the inputs that are not given: the caller takes the first with which the model runs."""
    missing = [value for value in model.inputs if value.name not in given]
    sizes = _sizes(model, given)
    limits = _index_limits(model, missing)
    for positive in (False, True):
        for size in _SIZES:
            rng = generator(seed)
            yield {
                value.name or "": _random(
                    value, _shape(value, sizes, size), limits.get(value.name or ""), positive, rng
                )
                for value in missing
            }
            if all(_shape(value, sizes, 0) == _shape(value, sizes, 1) for value in missing):
                break


def _fitting(value: ir.Value, array: np.ndarray) -> np.ndarray:
    wanted = value.dtype.numpy() if value.dtype is not None else array.dtype
    kinds = "fiu" if value.dtype in FLOATS else "iu" if np.issubdtype(wanted, np.integer) else wanted.kind
    expected = f"`{value.name}` must be {port(value).type} {shown_shape(port(value).shape)}"
    fits = value.shape is None or (
        value.shape.rank() == array.ndim
        and all(not isinstance(d, int) or d == n for d, n in zip(value.shape, array.shape, strict=True))
    )
    if not fits or (array.dtype.kind not in kinds and array.dtype != wanted):
        raise InvalidModelError(f"{expected}, not {array.dtype} {list(array.shape)}", hint="give an array like that")
    if array.size and wanted.kind in "iu" and array.dtype.kind in "iu":
        limits = np.iinfo(wanted)
        if array.min() < limits.min or array.max() > limits.max:
            raise InvalidModelError(f"{expected}, and some of the numbers are too large for that")
    return array.astype(wanted)


def _sizes(model: Model, given: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The dimensions that what is given settles, by their names."""
    found: dict[str, int] = {}
    for value in model.inputs:
        array = given.get(value.name or "")
        if array is not None and value.shape is not None:
            pairs = zip(value.shape, array.shape, strict=True)
            found |= {d.value: n for d, n in pairs if isinstance(d, ir.SymbolicDim) and d.value is not None}
    return found


def _shape(value: ir.Value, sizes: Mapping[str, int], otherwise: int) -> tuple[int, ...]:
    if not isinstance(value.type, ir.TensorType) or value.shape is None or value.dtype == ir.DataType.STRING:
        kind = port(value).type
        hint = f"{GIVE}; or {declare_hint(value.name or '')}" if value.shape is None else GIVE
        raise UnsupportedError(f"cannot make up a value for `{value.name}` ({kind} of unknown shape)", hint=hint)
    return tuple(d if isinstance(d, int) else sizes.get(d.value or "", otherwise) for d in value.shape)


def _random(
    value: ir.Value, shape: tuple[int, ...], limit: int | None, positive: bool, rng: np.random.Generator
) -> np.ndarray:
    """Normal floats, or some between 0 and 1 where only they will do; integers below a limit."""
    assert value.dtype is not None
    if value.dtype in FLOATS:
        return rng.uniform(0.1, 0.9, shape) if positive else rng.standard_normal(shape)
    if value.dtype == ir.DataType.BOOL:
        return rng.random(shape) < 0.5
    usual = 256 if value.dtype == ir.DataType.UINT8 else 2  # bytes are pictures, of which two colours show little
    return rng.integers(0, limit or usual, shape).astype(value.dtype.numpy())


# ---- where integers go -----------------------------------------------------------------------------------------------

_HANDS_ON = {
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose",
    "Unsqueeze", "Where",
}  # fmt: skip
"""Operators whose output holds the same integers."""


def _index_limits(model: Model, inputs: list[ir.Value]) -> dict[str, int]:
    """For each integer input that picks something, how many there are to pick from."""
    integers = {value.name for value in inputs if value.dtype is not None and value.dtype.is_integer()}
    if not integers:
        return {}
    model = inline(model)
    fill_in_types(model, values(model.graph))
    found = {}
    for value in model.inputs:
        limits = list(_limits(value)) if value.name in integers else []
        if value.name and limits:
            found[value.name] = min(limits)
    return found


def _limits(value: ir.Value) -> Iterator[int]:
    pending, seen = [value], {value}
    while pending:
        for node, index in pending.pop().uses():
            limit = _limit(node, index)
            if limit is not None:
                yield limit
            elif node.op_type in _HANDS_ON:
                fresh = [output for output in node.outputs if output not in seen]
                seen.update(fresh)
                pending += fresh


def _limit(node: ir.Node, index: int) -> int | None:
    """How many things an input of a node chooses from; None if it does not choose, or nobody knows."""
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
