"""From a function to a jaxpr whose shapes may have symbols in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
import onnx_ir as ir
from jax.extend.core import ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class Traced:
    jaxpr: ClosedJaxpr
    results: Any
    """The tree that the function returns, of shapes."""

    @property
    def variables(self) -> list[Any]:
        """The parameters and inputs."""
        return list(self.jaxpr.jaxpr.invars)

    def sizes(self, inputs: Iterable[ir.Value]) -> dict[str, tuple[ir.Value, int]]:
        """Where each symbol can be read: an input, and an axis of it."""
        found: dict[str, tuple[ir.Value, int]] = {}
        for value in inputs:
            assert value.shape is not None
            for axis, size in enumerate(value.shape):
                if isinstance(size, ir.SymbolicDim) and size.value is not None:
                    found.setdefault(size.value, (value, axis))
        return found


def trace(function: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> Traced:
    """The jaxpr of a function of the arrays in `params` and `inputs`; other leaves (functions, names) belong to it."""
    flat, tree = jax.tree.flatten((params, inputs))
    traced = [i for i, leaf in enumerate(flat) if _is_array(leaf)]

    def of_arrays(arrays: Sequence[Any]) -> Any:
        whole = list(flat)
        for i, array in zip(traced, arrays, strict=True):
            whole[i] = array
        given, arguments = jax.tree.unflatten(tree, whole)
        return function(given, *arguments)

    jaxpr, results = jax.make_jaxpr(of_arrays, return_shape=True)([flat[i] for i in traced])
    return Traced(jaxpr, results)


def with_free_size(inputs: Sequence[Any], batch: str | None) -> Sequence[Any]:
    """The same shapes with a symbol for the first size, where there is one to set free."""
    first = next((leaf.shape[0] for leaf in jax.tree.leaves(inputs) if getattr(leaf, "shape", ())), None)
    if batch is None or not isinstance(first, int):
        return inputs
    symbol = jax.export.symbolic_shape(batch)

    def freed(leaf: Any) -> Any:
        if getattr(leaf, "shape", ())[:1] != (first,):
            return leaf
        return jax.ShapeDtypeStruct((*symbol, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(freed, inputs)


def shape_of(leaf: Any) -> Any:
    """An array as its shape and type; what is none stays itself."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float)


def leaves(tree: Any, empty: str = "params") -> Iterator[tuple[str, Any]]:
    """The arrays of a tree with their places; that of a tree which is an array is `empty`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _is_array(leaf):
            yield path_of(path) or empty, leaf


def path_of(path: Any) -> str:
    """A place in a tree, such as `dense/kernel`. The variable that Flax wraps an array in has no place of its own."""
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")
