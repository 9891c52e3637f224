"""Numbers, types and names as source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.frameworks.program import literals, names
from onward.frameworks.program.names import Identifiers, quote

MENTIONED = (
    "np", "jnp", "jax", "lax", "params", "state", "batch", "inputs", "gradients", "lr", "t", "constants", "at_once",
    "several", "known_array", "exact", "metrics", "changed", "count", "exact_clip", "transformation", "joint", "i",
    "statistics", "random",
)  # fmt: skip
"""What a function mentions beside its own variables."""

_FEW = 8
"""Up to so many numbers are written out."""


def identifier(name: str) -> str:
    """A name of the graph as one of Python."""
    return names.identifier(name.lower())  # operators are written with capitals


def variables(names: Iterable[str]) -> dict[str, str]:
    """A variable for each name of a graph."""
    taken = Identifiers(MENTIONED)
    return {name: taken.fresh(identifier(name)) for name in names}


def pairs(values: Mapping[str, str]) -> str:
    """The inside of a dictionary."""
    return ", ".join(f"{quote(name)}: {text}" for name, text in values.items())


def literal(array: np.ndarray) -> str | None:
    """Few numbers as they are written."""
    dtype = _numpy_type(array.dtype)
    if dtype is None:
        return None
    if array.size > _FEW:
        is_one = bool((array == array.flat[0]).all())
        return f"np.full({array.shape}, {write_literal(array.flat[0])}, {dtype})" if is_one else None
    if array.ndim == 0:
        return f"{dtype}({write_literal(array)})"
    if array.size == 0:
        return f"np.zeros({array.shape}, {dtype})"
    return f"np.array({write_literal(array)}, {dtype})"


def write_literal(value: Any) -> str:
    return literals.literal(value, "np")


# ---- types -----------------------------------------------------------------------------------------------------------

_NAME_A_TYPE = ("to", "dtype", "stash_type", "softmax_precision", "output_dtype", "precision", "output_datatype")
"""Attributes that do."""


def type_name(dtype: np.dtype) -> str:
    """How a type is written."""
    return _numpy_type(dtype) or f"jnp.{dtype.name}"


def _numpy_type(dtype: np.dtype) -> str | None:
    """The same if numpy has it."""
    if dtype.kind == "b":
        return "np.bool_"
    return f"np.{dtype.name}" if dtype.kind in "iuf" and hasattr(np, dtype.name) else None


def plain_type(number: int) -> str | None:
    """A type that every number can be converted to in one way."""
    dtype = ir.DataType(number)
    if dtype is ir.DataType.BFLOAT16:
        return "jnp.bfloat16"
    return None if dtype is ir.DataType.STRING else _numpy_type(dtype.numpy())


def attribute(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"np.array({write_literal(value)}, {type_name(value.dtype)})"
    if name in _NAME_A_TYPE and isinstance(value, int) and value:
        return quote(str(ir.DataType(value).numpy()))
    return write_literal(list(value) if isinstance(value, tuple) else value)


def type_literal(value: ir.Value) -> str:
    """Type and shape of a value, with None for what is not known."""
    sizes = None if value.shape is None else [size if isinstance(size, int) else None for size in value.shape]
    return f"({None if value.dtype is None else quote(str(value.dtype.numpy()))}, {sizes})"
