"""Training models from TensorFlow functions and modules."""

from __future__ import annotations

import contextlib
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
from onward.frameworks.randomness import refuse_random_draws
from onward.frameworks.tensorflow.graph import Resource, Translator, dtype_of, unwrapped
from onward.frameworks.tensorflow.probe import confirm
from onward.frameworks.tensorflow.program import is_training_module, restore, restore_model
from onward.frameworks.tensorflow.running_averages import keep_averages
from onward.model import Model
from onward.recipe import Recipe, prepare
from onward.transform.training import remove_unused
from onward.vocabulary.keras import Refused

BATCH = "N"  # name of the first dimension


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
    """Return a training model of a `tf.function`, a `tf.Module` (its `__call__`) or any function of
    tensors.

        training = onward.from_tensorflow(module, images, loss="cross_entropy", optimizer="adamw:lr=1e-3")

    - `module`: the function; its trainable variables are trained, others are frozen
    - `example_inputs`: its arguments: a tuple, a mapping by name, or one tensor. The first axis
      of arrays and tensors is the batch, of any size; a `tf.TensorSpec` overrides this. Other
      values, such as `training=True`, are passed to the function unchanged. A function with an
      `input_signature` needs no example
    - `loss`, `optimizer`, `recipe`: as for `prepare`: `loss="cross_entropy"` for an output,
      `loss="value:NAME"` for a loss that the function computes
    - `probe`: compare both sides on the example (default: True)

    A module that `to_tensorflow` returned, or the folder of its SavedModel, gives its training
    model with the current values of the variables.
    """
    if isinstance(module, str | os.PathLike):
        return restore(Path(module))
    if is_training_module(module):
        return restore_model(module)
    if loss is None and recipe.get("teacher") is None:
        raise RecipeError("no `loss` is given", hint='give a `loss`, such as "cross_entropy"')
    if optimizer is None:
        raise RecipeError("no `optimizer` is given", hint='give an `optimizer`, such as "adamw:lr=1e-3"')
    _refuse_objects(loss, optimizer)
    model, trainable, variance = export(module, example_inputs, probe=probe)
    chosen = recipe.pop("trainable", [glob.escape(name) for name in trainable])
    return prepare(model, loss=loss, optimizer=optimizer, trainable=chosen, variance=variance, **recipe)


def _refuse_objects(loss: Any, optimizer: Any) -> None:
    """Refuse objects of Keras, with a hint that has the optimizer as a string."""
    for name, value, text in (("optimizer", optimizer, "adamw:lr=1e-3"), ("loss", loss, "cross_entropy")):
        if not any(base.__module__.startswith("keras.") for base in type(value).__mro__):
            continue
        if name == "optimizer":
            from onward.frameworks.keras.optimizer import read_optimizer
            from onward.frameworks.keras.schedule import read_schedule

            with contextlib.suppress(Refused):
                text = str(read_optimizer(value, read_schedule(value).lr))
        raise RecipeError(
            f"`{name}` is an object of Keras ({type(value).__name__}), not a string",
            hint=f'write `{name}="{text}"`; a compiled Keras model goes through `onward.from_keras(model)`',
        )


def export(
    module: Any, example_inputs: Any, *, probe: bool = True
) -> tuple[Model, list[str], Literal["population", "sample"]]:
    """Return the model of a function, its trainable variables, and the variance it averages."""
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
    """Return the graph of a function of tensors with these shapes; it returns a list."""
    specs = [tf.TensorSpec(example.shape, example.dtype) for example in examples]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    named = [(variable, f"variable{i}") for i, variable in enumerate(_variables(concrete))]
    return _finish(*_write_graph(concrete, named))


def _finish(op: Builder, translator: Translator) -> Model:
    """Return the model of a graph; raise an error that lists the missing values that it needs."""
    op.graph.sort()
    if obstacles := translator.obstacles(op.graph.outputs):
        raise UnsupportedError(
            "the function cannot be carried over:\n" + "\n".join(f"- {reason}" for reason in obstacles),
            hint="write it with other operations, or carry over the part before them",
        )
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
    captured: list[Any] = []
    for tensor in function.captured_inputs:
        if tensor.dtype != tf.resource:
            captured.append(op.constant(tensor.numpy()))
        elif id(tensor) in weights:
            captured.append(Resource(weights[id(tensor)]))
        else:
            raise UnsupportedError("the function reads a table or a queue, which ONNX does not have")
    outputs = translator.inline(op, function.graph, [*map(op, fed), *captured])
    for name, result in zip(results, outputs, strict=True):
        put_out(op, op(unwrapped(result).value), name)
    return op, translator


def _arguments(example_inputs: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if example_inputs is None:
        return (), {}
    return example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,), {}


def _concrete(module: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    if hasattr(module, "captured_inputs"):  # a concrete function
        return module
    function = module.__call__ if isinstance(module, tf.Module) else module
    if not callable(function):
        raise UnsupportedError(f"{module!r} is not a function of tensors", hint="give a `tf.function` or a `tf.Module`")
    if not hasattr(function, "get_concrete_function"):
        function = tf.function(function)
    specs = {name: _spec(x, name) for name, x in named.items()}
    try:
        with refuse_random_draws("the function"):
            return function.get_concrete_function(*map(_spec, arguments), **specs)
    except (TypeError, ValueError, LookupError, tf.errors.OpError) as error:
        raise DataError(
            f"the function fails with the example: {str(error).strip().splitlines()[-1].strip()}",
            hint="check names, shapes and types of the example; only the batch axis may differ from it",
        ) from error


def _spec(example: Any, name: str | None = None) -> Any:
    if not isinstance(example, np.ndarray | tf.Tensor):
        return example
    sizes = list(example.shape)
    return tf.TensorSpec([None, *sizes[1:]] if sizes else [], example.dtype, name)


def _input(tensor: Any) -> ir.Value:
    if tensor.shape.rank is None:
        raise UnsupportedError(f"the rank of `{tensor.op.name}` is unknown", hint="give a `tf.TensorSpec` with a shape")
    name, sizes = tensor.op.name, enumerate(tensor.shape.as_list())
    shape = [(f"{name}_{axis}" if axis else BATCH) if size is None else size for axis, size in sizes]
    return ir.Value(name=name, type=ir.TensorType(dtype_of(tensor.dtype)), shape=ir.Shape(shape))


def _paths(results: Any, path: str = "") -> Iterator[str]:
    """Return a name for each tensor that a function returns, in TensorFlow's order."""
    if isinstance(results, Mapping):
        for key in sorted(results):
            yield from _paths(results[key], f"{path}/{key}" if path else str(key))
    elif isinstance(results, Sequence):
        for i, result in enumerate(results):
            yield from _paths(result, f"{path}/{i}" if path else f"output_{i}")
    elif results is not None:
        yield path or "output"


def _variables(function: Any) -> list[Any]:
    """Return the variables in the order in which the function reads them."""
    by_handle = {id(variable.handle): variable for variable in function.graph.variables}
    return [by_handle[id(tensor)] for tensor in function.captured_inputs if id(tensor) in by_handle]


def _names(module: Any, variables: Sequence[Any]) -> dict[int, str]:
    """Return the names of variables, or their paths in the module if names repeat."""
    own_names = [variable.name.partition(":")[0] for variable in variables]
    if len(set(own_names)) == len(own_names):
        return {id(variable): name for variable, name in zip(variables, own_names, strict=True)}
    paths = {}
    if isinstance(module, tf.Module):
        members = module._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
        paths = {id(variable): ".".join(map(str, path)) for path, variable in members}
    names, pairs = Names(), zip(variables, own_names, strict=True)
    return {id(variable): names.fresh(paths.get(id(variable), name)) for variable, name in pairs}
