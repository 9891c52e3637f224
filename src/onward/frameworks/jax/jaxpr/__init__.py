"""A function of JAX as a model: `export(apply, params, x)`.

The function is traced to a jaxpr, whose primitives become standard operators one by one; a file per family has them.
Parameters become initializers under their place in the tree, `dense/kernel`, and inputs keep a free batch size, since
JAX traces shapes with symbols. Calls (jit, remat, custom derivatives) are written out, so that a derivative that a
function was given by hand is not known to the model; `jax.lax.stop_gradient` is.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
import onnx_ir as ir
from jax.extend.core import ClosedJaxpr

from onward.build import Names
from onward.errors import UnsupportedError, first_line
from onward.frameworks.formulas.graph_building import initializer, model_of, put_out
from onward.frameworks.jax.jaxpr.builder import JaxprBuilder, data_of, declare_value
from onward.model import Model
from onward.standard import COMMON_OPSET
from onward.transform.training import remove_unused

__all__ = ["export"]


def export(
    function: Callable[..., Any],
    params: Any,
    *inputs: Any,
    names: Sequence[str] | None = None,
    input_names: Sequence[str] | None = None,
    batch: str | None = "batch",
) -> Model:
    """The model that computes `function(params, *inputs)`.

    Arrays in `params`, any tree, become initializers; those in `inputs`, arrays or `jax.ShapeDtypeStruct`s, become
    inputs, called `input_names` or after the arguments of the function; results are called `names`, in the order of
    their tree. What has the length of the first input along its first axis gets the free dimension `batch` there; None
    leaves all shapes as they are. Where JAX cannot trace a free size there is a warning, and the size is fixed.
    """
    fixed = jax.tree.map(shape_of, inputs)
    free = with_free_size(fixed, batch)
    if free is fixed:
        return _export(function, params, fixed, names, input_names)
    try:
        return _export(function, params, free, names, input_names)
    except UnsupportedError:
        raise
    except Exception as error:  # what JAX, or the function, raises where it asks how large a symbol is
        model = _export(function, params, fixed, names, input_names)
        reason = f"the batch size is fixed, since JAX cannot trace a free one: {first_line(error)}"
        warnings.warn(reason, stacklevel=3)
        return model


def _export(
    function: Callable[..., Any],
    params: Any,
    inputs: Sequence[Any],
    names: Sequence[str] | None,
    input_names: Sequence[str] | None,
) -> Model:
    jaxpr, shapes = trace(function, params, inputs)
    taken = Names()
    weights = [initializer(taken.fresh(name), data_of(jax.numpy.asarray(leaf))) for name, leaf in leaves(params)]
    called = _input_names(taken, "inputs", input_names, _argument_names(function, inputs))
    fed = [declare_value(var.aval, name) for var, name in zip(jaxpr.jaxpr.invars[len(weights) :], called, strict=True)]
    found = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    default = [f"output_{place}" if place[:1].isdigit() else place for place in found]
    if len(found) == 1 and (not found[0] or found[0].isdigit()):
        default = ["output"]
    result_names = _input_names(taken, "results", names, default)
    name = getattr(function, "__name__", "function")
    graph = ir.Graph(fed, [], nodes=[], initializers=weights, opset_imports={"": COMMON_OPSET}, name=name)
    op = JaxprBuilder.of(graph, COMMON_OPSET, taken)
    results = op.inline(jaxpr, *map(op, [*weights, *fed]))
    op.check()
    for result, wanted in zip(results, result_names, strict=True):
        put_out(op, result, wanted)
    return model_of(remove_unused(graph), op.functions.values())


def _argument_names(function: Callable[..., Any], inputs: Sequence[Any]) -> list[str]:
    """The names of the function's arguments, followed by the place in the tree where an argument is one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except ValueError:  # some that are built in do not tell
        parameters = []
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known += [f"input_{i}" for i in range(len(known), len(inputs))]
    trees = zip(known, inputs, strict=False)
    return [f"{name}/{place}" if place else name for name, tree in trees for place, _ in leaves(tree, empty="")]


def _input_names(taken: Names, what: str, given: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """The names that were given, or else such as nothing has yet."""
    if given is None:
        return [taken.fresh(name) for name in default]
    if len(given) != len(default):
        raise UnsupportedError(
            f"there are {len(default)} {what}, and names for {len(given)}",
            hint=f"otherwise called {', '.join(default)}",
        )
    clashes = [name for name in given if taken.fresh(name) != name]
    if clashes:
        raise UnsupportedError(f"more than one value would be called {', '.join(clashes)}", hint="choose other names")
    return list(given)


# ---- tracing ---------------------------------------------------------------------------------------------------------


def trace(function: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of a function of the arrays in `params` and `inputs`, and the tree of shapes of its results.

    Other leaves, such as functions and names, belong to the function.
    """
    flat, tree = jax.tree.flatten((params, inputs))
    traced = [i for i, leaf in enumerate(flat) if _is_array(leaf)]

    def of_arrays(arrays: Sequence[Any]) -> Any:
        whole = list(flat)
        for i, array in zip(traced, arrays, strict=True):
            whole[i] = array
        given, arguments = jax.tree.unflatten(tree, whole)
        return function(given, *arguments)

    return jax.make_jaxpr(of_arrays, return_shape=True)([flat[i] for i in traced])


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
