"""A function of JAX as a model: `export(apply, params, x)`.

The function is traced to a jaxpr, whose primitives become standard operators one by one; a file per family has them.
Parameters become initializers under their place in the tree, `dense/kernel`, and inputs keep a free batch size, since
JAX traces shapes with symbols. Calls (jit, remat, custom derivatives) are written out, so that a derivative that a
function was given by hand is not known to the model; `jax.lax.stop_gradient` is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import onnx_ir as ir

from onward.build import Names, uncollected
from onward.convert.jax.jaxpr.emitter import Emitter, declared
from onward.convert.jax.jaxpr.trace import Traced, leaves, path_of, trace
from onward.errors import UnsupportedError
from onward.model import Model
from onward.transform.unused import remove_unused

OPSET = 21
_IR_VERSION = 10

__all__ = ["export"]


@uncollected()
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
    traced = trace(function, params, inputs, batch)
    known = {name: _array(leaf) for name, leaf in leaves(params)}
    argument_names = list(input_names or _argument_names(function, inputs))
    result_names = list(names or _result_names(traced.results))
    _check_count("inputs", argument_names, len(traced.jaxpr.jaxpr.invars) - len(known))
    _check_count("results", result_names, len(traced.jaxpr.jaxpr.outvars))
    return _model(traced, known, argument_names, result_names, getattr(function, "__name__", "function"))


def _model(
    traced: Traced, params: dict[str, np.ndarray], input_names: list[str], result_names: list[str], name: str
) -> Model:
    names = Names([*params, *input_names, *result_names])
    variables = traced.jaxpr.jaxpr.invars
    weights = [_initializer(name, array) for name, array in params.items()]
    fed = [declared(var.aval, name) for var, name in zip(variables[len(weights) :], input_names, strict=True)]
    graph = ir.Graph(fed, [], nodes=[], initializers=weights, opset_imports={"": OPSET}, name=name)
    op = Emitter.of(graph, OPSET, names, traced.sizes(fed))
    results = op.inline(traced.jaxpr, *map(op, [*weights, *fed]))
    op.check()
    for result, wanted in zip(results, result_names, strict=True):
        made_here = result.value.producer() is not None and not result.value.is_graph_output()
        output = result.value if made_here else op.Identity(result).like(result.value).value
        output.name = wanted
        graph.outputs.append(output)
    functions = list(op.functions.values())
    return Model(ir.Model(remove_unused(graph), ir_version=_IR_VERSION, producer_name="onward", functions=functions))


def _array(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf if hasattr(leaf, "dtype") else jax.numpy.asarray(leaf))


def _initializer(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)


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


def _result_names(results: Any) -> list[str]:
    places = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(results)]
    if len(places) == 1:
        return [places[0] if places[0] and not places[0].isdigit() else "output"]
    return [f"output_{place}" if place[:1].isdigit() else place for place in places]


def _check_count(what: str, names: Sequence[str], count: int) -> None:
    if len(names) != count:
        raise UnsupportedError(f"{len(names)} names were given for {count} {what}", hint=f"they are: {list(names)}")
