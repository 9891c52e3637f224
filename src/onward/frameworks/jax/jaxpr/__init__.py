"""Export of JAX functions as models: `export(apply, params, x)`.

The function is traced to a jaxpr, whose primitives become ONNX operators, with one file per family.
Parameters become initializers named by their path, `dense/kernel`. Inputs keep a dynamic batch
size, which JAX traces as a symbol. Calls (jit, remat, custom derivatives) are inlined, so the model
does not contain custom derivatives; it contains `jax.lax.stop_gradient`.
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
    """Return the model that computes `function(params, *inputs)`.

    Arrays in `params`, any tree, become initializers. Those in `inputs`, arrays or
    `jax.ShapeDtypeStruct`s, become inputs, named `input_names` or after the arguments of the
    function. Results are named `names`, in the order of their tree. Inputs as long as the first one
    along the first axis get the dynamic dimension `batch` there; None leaves all shapes fixed. If
    JAX cannot trace a dynamic size, it is fixed, with a warning.
    """
    fixed = jax.tree.map(shape_of, inputs)
    free = with_free_size(fixed, batch)
    if free is fixed:
        return _export(function, params, fixed, names, input_names)
    try:
        return _export(function, params, free, names, input_names)
    except UnsupportedError:
        raise
    except Exception as error:  # JAX raises different errors where the value of a dynamic size is needed
        model = _export(function, params, fixed, names, input_names)
        reason = f"the batch size is fixed, because JAX cannot trace a dynamic one: {first_line(error)}"
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
    arrays = ((name, leaf) for name, leaf in leaves(params) if hasattr(leaf, "dtype"))
    weights = [initializer(taken.fresh(name), data_of(jax.numpy.asarray(leaf))) for name, leaf in arrays]
    fed_names = _unique_names(taken, "inputs", input_names, _argument_names(function, inputs))
    fed = [
        declare_value(var.aval, name) for var, name in zip(jaxpr.jaxpr.invars[len(weights) :], fed_names, strict=True)
    ]
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    default = [f"output_{name}" if name[:1].isdigit() else name for name in paths]
    if len(paths) == 1 and (not paths[0] or paths[0].isdigit()):
        default = ["output"]
    result_names = _unique_names(taken, "results", names, default)
    name = getattr(function, "__name__", "function")
    graph = ir.Graph(fed, [], nodes=[], initializers=weights, opset_imports={"": COMMON_OPSET}, name=name)
    op = JaxprBuilder.of(graph, COMMON_OPSET, taken)
    results = op.inline(jaxpr, *map(op, [*weights, *fed]))
    op.check()
    for result, result_name in zip(results, result_names, strict=True):
        put_out(op, result, result_name)
    return model_of(remove_unused(graph), op.functions.values())


def _argument_names(function: Callable[..., Any], inputs: Sequence[Any]) -> list[str]:
    """Return a name for each input array: that of its argument, and its path in that."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except ValueError:  # of some builtins
        parameters = []
    argument_names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    argument_names += [f"input_{i}" for i in range(len(argument_names), len(inputs))]
    trees = zip(argument_names, inputs, strict=False)
    return [f"{name}/{path}" if path else name for name, tree in trees for path, _ in leaves(tree, empty="")]


def _unique_names(taken: Names, what: str, requested: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Return the requested names, or fresh default names."""
    if requested is None:
        return [taken.fresh(name) for name in default]
    if len(requested) != len(default):
        raise UnsupportedError(
            f"the function has {len(default)} {what}, not {len(requested)}",
            hint=f"name these: {', '.join(default)}",
        )
    clashes = [name for name in requested if taken.fresh(name) != name]
    if clashes:
        raise UnsupportedError(f"these names are used twice: {', '.join(clashes)}", hint="choose other names")
    return list(requested)


def trace(function: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of a function of the arrays in its arguments, and its result shapes."""
    flat, tree = jax.tree.flatten((params, inputs))
    # Python numbers among parameters stay what they are: Equinox has flags and rates there.
    own = len(jax.tree.leaves(params))
    traced = [i for i, leaf in enumerate(flat) if hasattr(leaf, "dtype") or (i >= own and _is_array(leaf))]

    def call(arrays: Sequence[Any]) -> Any:
        whole = list(flat)
        for i, array in zip(traced, arrays, strict=True):
            whole[i] = array
        first, arguments = jax.tree.unflatten(tree, whole)
        return function(first, *arguments)

    return jax.make_jaxpr(call, return_shape=True)([flat[i] for i in traced])


def with_free_size(inputs: Sequence[Any], batch: str | None) -> Sequence[Any]:
    """Replace the length of the first axis by a symbol, in all inputs that have it."""
    first = next((leaf.shape[0] for leaf in jax.tree.leaves(inputs) if getattr(leaf, "shape", ())), None)
    if batch is None or not isinstance(first, int):
        return inputs
    symbol = jax.export.symbolic_shape(batch)

    def freed(leaf: Any) -> Any:
        if getattr(leaf, "shape", ())[:1] != (first,):
            return leaf
        return jax.ShapeDtypeStruct((*symbol, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(freed, inputs)


def array_like(shape: Sequence[Any], dtype: Any) -> Any:
    """Return an array without numbers, for a trace; its sizes may be symbols."""
    return jax.ShapeDtypeStruct(shape, dtype)


def shape_of(leaf: Any) -> Any:
    """Return an array's shape and type; other leaves unchanged."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float)


def leaves(tree: Any, empty: str = "params") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree with their paths; `empty` for a tree that is an array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _is_array(leaf):
            yield path_of(path) or empty, leaf


def path_of(path: Any) -> str:
    """Return a path in a tree, such as `dense/kernel`, without Flax's wrapper of an array."""
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")
