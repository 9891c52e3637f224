"""Functions of JAX against their models: what JAX computes, and what engines compute from a model that was exported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import onward
from onward.engines import function as function_of
from onward.frameworks.jax.jaxpr import export
from onward.model import Model

BOTH = ("numpy", "onnxruntime")


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0, low: float = -2, high: float = 2) -> np.ndarray:
    """Numbers of any type, integers from `low` to `high` too."""
    random = np.random.default_rng([seed, *shape])
    if np.dtype(dtype) == bool:
        return random.random(shape) < 0.5
    if np.dtype(dtype).kind in "iu":
        return random.integers(int(low), int(high), shape, endpoint=True).astype(dtype)
    return random.uniform(low, high, shape).astype(dtype)


def weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """A tree of weights, `dense__kernel=(3, 4)` at dense/kernel."""
    made: dict[str, Any] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        *path, last = name.split("__")
        place = made
        for part in path:
            place = place.setdefault(part, {})
        place[last] = jnp.asarray(numbers(*shape, seed=i, low=-1, high=1))
    return made


def results(model: Model, inputs: Sequence[Any], engine: str) -> list[np.ndarray]:
    fed = {value.name: np.asarray(x) for value, x in zip(model.inputs, inputs, strict=True)}
    computed = function_of(model, engine=engine)(fed)
    return [np.asarray(computed[value.name]) for value in model.outputs]


def same(found: Sequence[np.ndarray], expected: Any, tolerance: float = 2e-6, sizes: Any = None) -> None:
    """The same types and shapes, and numbers as far apart as parts of themselves, or of the largest beside them.

    With `sizes`: as parts of these, which is all that can be said of sums whose terms may cancel.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(expected)]
    assert len(found) == len(leaves)
    for i, (ours, theirs) in enumerate(zip(found, leaves, strict=True)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        a, b = (x if x.dtype.kind in "biuf" else x.astype(np.float32) for x in (ours, theirs))
        if sizes is not None:
            difference = np.abs(a.astype(np.float64) - b)
            assert (difference <= tolerance * np.asarray(jax.tree.leaves(sizes)[i])).all(), difference.max()
            continue
        largest = np.abs(b, where=np.isfinite(b), out=np.zeros(b.shape)).max(initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)


def agrees(
    function: Callable[..., Any],
    *inputs: Any,
    engines: Sequence[str] = BOTH,
    tolerance: float = 2e-6,
    batch: str | None = "batch",
    sizes: Callable[..., Any] | None = None,
) -> Model:
    """The model of a function without parameters, which computes the same, and the same of twice as large a batch.

    `sizes` is a function of the same inputs: to what the terms of each result add up if all are positive.
    """
    model = export(lambda _, *xs: function(*xs), {}, *inputs, batch=batch)
    assert onward.check(model) == []
    cases = [inputs]
    free = [x.shape is not None and len(x.shape) > 0 and not isinstance(x.shape[0], int) for x in model.inputs]
    if any(free):
        cases.append([np.concatenate([x, x]) if of_batch else x for x, of_batch in zip(inputs, free, strict=True)])
    for case in cases:
        expected, largest = jax.jit(function)(*case), sizes and sizes(*case)
        for engine in engines:
            same(results(model, case, engine), expected, tolerance, largest)
    return model


def operators_of(model: Model) -> set[str]:
    return {node.op_type for node in model.graph.all_nodes()}
