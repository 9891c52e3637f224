"""Functions and modules of TensorFlow as training models."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward.standard import COMMON_OPSET

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.arguments import checked
from onward.build import Builder, Names
from onward.errors import DataError, RecipeError, UnsupportedError
from onward.frameworks.formulas.graph_building import initializer, model_of, put_out
from onward.frameworks.randomness import no_chance
from onward.frameworks.tensorflow.graph import Resource, Translator, dtype_of
from onward.frameworks.tensorflow.probe import confirm
from onward.frameworks.tensorflow.program import is_training_module, restore, restore_model
from onward.frameworks.tensorflow.running_averages import keep_averages
from onward.model import Model
from onward.recipe import Recipe, prepare
from onward.transform.training import remove_unused
from onward.vocabulary.keras import Refused

BATCH = "N"
"""What the size of the first axis is called."""


@checked(rest=Recipe, types=False)
def from_tensorflow(
    module: Any,
    example_inputs: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
    probe: bool = True,
    **recipe: Any,
) -> Model:
    """Make a training model of a `tf.function`, a `tf.Module` (its `__call__`) or any function of tensors.

        training = onward.from_tensorflow(module, images, loss="cross_entropy", optimizer="adamw:lr=1e-3")

    - `module`: what computes; its trainable variables are trained, others are not
    - `example_inputs`: its arguments: a tuple, a mapping by name, or one tensor. Of arrays and tensors the first axis
      is taken to be that of the batch, of any size; a `tf.TensorSpec` says it otherwise; all else is handed to the
      function as it is, such as `training=True`. A function with an `input_signature` needs none
    - `loss`, `optimizer`, `recipe`: as for `prepare`: `loss="cross_entropy"` for an output, `loss="value:NAME"` for one
      that the function computes itself
    - `probe`: run both sides on the example, and compare

    A module that `to_tensorflow` made, or the folder of a SavedModel of one, is the training model that it was made
    of, with the values that its variables have now.
    """
    if isinstance(module, str | os.PathLike):
        return restore(Path(module))
    if is_training_module(module):
        return restore_model(module)
    if loss is None and recipe.get("teacher") is None:
        raise RecipeError("there is nothing to learn from", hint='give a `loss`, such as "cross_entropy"')
    if optimizer is None:
        raise RecipeError("it is not said how to learn", hint='give an `optimizer`, such as "adamw:lr=1e-3"')
    _refuse_objects(loss, optimizer)
    model, trainable, variance = export(module, example_inputs, probe=probe)
    chosen = recipe.pop("trainable", [glob.escape(name) for name in trainable])
    return prepare(model, loss=loss, optimizer=optimizer, trainable=chosen, variance=variance, **recipe)


def _refuse_objects(loss: Any, optimizer: Any) -> None:
    """Refuse objects of Keras, with the words for an optimizer if there are any."""
    if _is_of_keras(optimizer):
        from onward.frameworks.keras.optimizer import read_optimizer
        from onward.frameworks.keras.schedule import read_schedule

        try:
            words = str(read_optimizer(optimizer, read_schedule(optimizer).lr))
        except Refused:
            words = "adamw:lr=1e-3"
        raise RecipeError(
            f"`optimizer` is an object of Keras ({type(optimizer).__name__}), not words",
            hint=f'write `optimizer="{words}"`; a compiled Keras model goes through `onward.from_keras(model)`',
        )
    if _is_of_keras(loss):
        raise RecipeError(
            f"`loss` is an object of Keras ({type(loss).__name__}), not words",
            hint='write `loss="cross_entropy"`; a compiled Keras model goes through `onward.from_keras(model)`',
        )


def _is_of_keras(given: Any) -> bool:
    return any(kind.__module__.startswith("keras.") for kind in type(given).__mro__)


def export(
    module: Any, example_inputs: Any, *, probe: bool = True
) -> tuple[Model, list[str], Literal["population", "sample"]]:
    """The inference model of a function, the names of its trainable variables, and which variance it averages."""
    arguments, named = _arguments(example_inputs)
    function = _concrete(module, arguments, named)
    variables = _variables(function)
    names = _names(module, variables)
    op, translator = _write_graph(function, [(v, names[id(v)]) for v in variables])
    variance = keep_averages(op, translator)
    model = _finish(op, translator)
    if probe:
        trained = {names[id(v)]: v for v in variables if v.trainable} if translator.own_gradients else {}
        confirm(model, function, arguments, named, trained)
    used = model.graph.initializers
    return model, [names[id(v)] for v in variables if v.trainable and names[id(v)] in used], variance


def export_function(function: Callable[..., Any], examples: Sequence[np.ndarray]) -> Model:
    """The graph of a function of tensors that have these shapes; results are in the order of its list."""
    specs = [tf.TensorSpec(example.shape, example.dtype) for example in examples]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    named = [(variable, f"variable{i}") for i, variable in enumerate(_variables(concrete))]
    return _finish(*_write_graph(concrete, named))


def _finish(op: Builder, translator: Translator) -> Model:
    op.graph.sort()
    _check(op.graph, translator)
    return model_of(remove_unused(op.graph), op.functions.values())


def _write_graph(function: Any, variables: Sequence[tuple[Any, str]]) -> tuple[Builder, Translator]:
    count = len(function.inputs) - len(function.captured_inputs)
    results = list(_paths(function.structured_outputs))
    weights = {id(variable.handle): initializer(name, variable.numpy()) for variable, name in variables}
    fed = [_input(x) for x in function.inputs[:count]]
    taken = Names([*(name for _, name in variables), *(value.name or "" for value in fed), *results])
    graph = ir.Graph(
        fed, [], nodes=[], initializers=list(weights.values()), opset_imports={"": COMMON_OPSET}, name="function"
    )
    op, translator = Builder(graph, opset=COMMON_OPSET, names=taken, share=True), Translator()
    captured = [_captured_value(op, tensor, weights) for tensor in function.captured_inputs]
    outputs = translator.inline(op, function.graph, [*map(op, fed), *captured])
    for name, result in zip(results, outputs, strict=True):
        put_out(op, op(result.value), name)
    return op, translator


def _check(graph: ir.Graph, translator: Translator) -> None:
    obstacles = translator.obstacles(graph.outputs)
    if obstacles:
        raise UnsupportedError(
            "the function cannot be carried over:\n" + "\n".join(f"- {reason}" for reason in obstacles),
            hint="write it with other operations, or carry over the part before them",
        )


# ---- the function ----------------------------------------------------------------------------------------------------


def _arguments(example_inputs: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if example_inputs is None:
        return (), {}
    return example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,), {}


def _concrete(module: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    if hasattr(module, "captured_inputs"):  # it is one already
        return module
    function = module.__call__ if isinstance(module, tf.Module) else module
    if not callable(function):
        raise UnsupportedError(f"{module!r} is no function of tensors", hint="give a `tf.function` or a `tf.Module`")
    if not hasattr(function, "get_concrete_function"):
        function = tf.function(function)
    specs = {name: _spec(x, name) for name, x in named.items()}
    try:
        with no_chance("the function"):
            return function.get_concrete_function(*map(_spec, arguments), **specs)
    except (TypeError, ValueError, LookupError, tf.errors.OpError) as error:
        raise DataError(
            f"the function fails with the example: {str(error).strip().splitlines()[-1].strip()}",
            hint="check names, shapes and types of the example; axes that are not of the batch are as large as there",
        ) from error


def _spec(example: Any, name: str | None = None) -> Any:
    if not isinstance(example, np.ndarray | tf.Tensor):
        return example
    sizes = list(example.shape)
    return tf.TensorSpec([None, *sizes[1:]] if sizes else [], example.dtype, name)


def _input(tensor: Any) -> ir.Value:
    if tensor.shape.rank is None:
        raise UnsupportedError(
            f"nobody knows how many axes `{tensor.op.name}` has", hint="give a `tf.TensorSpec` with a shape"
        )
    sizes = [_size(tensor.op.name, axis) if size is None else size for axis, size in enumerate(tensor.shape.as_list())]
    return ir.Value(name=tensor.op.name, type=ir.TensorType(dtype_of(tensor.dtype)), shape=ir.Shape(sizes))


def _size(name: str, axis: int) -> str:
    return f"{name}_{axis}" if axis else BATCH


def _paths(results: Any, path: str = "") -> Iterator[str]:
    """A name for each tensor of what a function returns, in the order in which TensorFlow has them."""
    if isinstance(results, Mapping):
        for key in sorted(results):
            yield from _paths(results[key], f"{path}/{key}" if path else str(key))
    elif isinstance(results, Sequence):
        for i, result in enumerate(results):
            yield from _paths(result, f"{path}/{i}" if path else f"output_{i}")
    elif results is not None:
        yield path or "output"


# ---- variables -------------------------------------------------------------------------------------------------------


def _variables(function: Any) -> list[Any]:
    """In the order in which the function reads them."""
    known = {id(variable.handle): variable for variable in function.graph.variables}
    return [known[id(tensor)] for tensor in function.captured_inputs if id(tensor) in known]


def _names(module: Any, variables: Sequence[Any]) -> dict[int, str]:
    """What variables are called: as they were named, or if that is not clear after their place in the module."""
    given = [variable.name.partition(":")[0] for variable in variables]
    if len(set(given)) == len(given):
        return {id(variable): name for variable, name in zip(variables, given, strict=True)}
    places = {}
    if isinstance(module, tf.Module):
        found = module._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
        places = {id(variable): ".".join(map(str, path)) for path, variable in found}
    names = Names()
    return {
        id(variable): names.fresh(places.get(id(variable), name))
        for variable, name in zip(variables, given, strict=True)
    }


def _captured_value(op: Builder, tensor: Any, weights: Mapping[int, ir.Value]) -> Any:
    """A variable, or a tensor that the function found around it."""
    if tensor.dtype == tf.resource:
        if id(tensor) not in weights:
            raise UnsupportedError("the function reads a table or a queue, which ONNX does not have")
        return Resource(weights[id(tensor)])
    return op.constant(tensor.numpy())
