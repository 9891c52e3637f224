"""Training models from TensorFlow functions and modules."""

from __future__ import annotations

import functools
import glob
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.standard import COMMON_OPSET

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.arguments import checked
from onward.build import Builder, Names
from onward.errors import DataError, RecipeError, UnsupportedError, list_names
from onward.frameworks.formulas.graph_building import initializer, model_of, put_out
from onward.frameworks.randomness import refuse_random_draws
from onward.frameworks.tensorflow.graph import Resource, Translator, dtype_of, unwrapped
from onward.frameworks.tensorflow.probe import call_with, confirm, example_feeds, try_steps
from onward.frameworks.tensorflow.program import is_training_module, restore, restore_model
from onward.frameworks.tensorflow.running_averages import keep_averages
from onward.model import Model
from onward.options import Variance
from onward.recipe.prepare import Recipe, prepare
from onward.run_state.state import RunState
from onward.run_state.training_models import to_training_model
from onward.transform.training import remove_unused
from onward.vocabulary.keras import Refused

BATCH = "N"  # name of the first dimension


@checked(rest=Recipe, types=False)
def from_tensorflow(
    module: Any,
    example_inputs: Any = None,
    *,
    loss: Any = None,
    example_targets: Any = None,
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
    - `loss`: as for `prepare`: `"cross_entropy"` for an output, `"value:NAME"` for a loss that the
      function computes. Or any function of targets and outputs that returns a scalar, such as
      `keras.losses.Huber()`
    - `example_targets`: targets for a loss that is a function: a tensor, or a mapping by name. The
      function gets them first, as in Keras; without targets, it gets the outputs only
    - `optimizer`: as for `prepare`, or an optimizer of Keras for these variables, with its state
    - `recipe`: as for `prepare`
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
    function = module
    if is_function := callable(loss):
        function, example_inputs = with_loss(module, example_inputs, loss, example_targets)
        loss = "value:loss"
    elif example_targets is not None:
        raise RecipeError(
            f"`example_targets` are for a loss that is a function, not `{loss}`", hint="leave out `example_targets`"
        )
    exported = export(function, example_inputs, owner=module, probe=probe)
    shape = next((value.shape for value in exported.model.outputs if value.name == "loss"), None)
    if is_function and shape is not None and shape.rank():
        raise DataError(
            f"the loss has the shape {shape}, and must be a scalar",
            hint="use its mean: `lambda y, p: tf.reduce_mean(loss(y, p))`",
        )
    if not hasattr(optimizer, "apply_gradients"):
        chosen = recipe.pop("trainable", [glob.escape(name) for name in exported.trainable])
        return prepare(
            exported.model, loss=loss, optimizer=optimizer, trainable=chosen, variance=exported.variance, **recipe
        )
    if unused := [name for name in recipe if name != "seed"]:
        raise RecipeError(
            f"the optimizer of Keras has its own settings, and `{unused[0]}` is not one",
            hint=f"leave out `{unused[0]}`, or write the optimizer as a string",
        )
    run = read_run(exported, loss, optimizer, recipe)
    if probe and is_function:
        try_steps(run, exported, optimizer)
    return to_training_model(run)


class Exported(NamedTuple):
    """Model of a function, and what it was made of."""

    model: Model
    trainable: list[str]
    """Trainable variables that results depend on."""
    variance: Variance
    """Variance that running averages keep."""
    variables: dict[str, Any]
    """All variables that the function reads, by name."""
    call: Callable[[], Any]
    """Call of the function with the example."""
    feeds: dict[str, np.ndarray]
    """Example by the names of inputs; empty with specs."""


def read_run(exported: Exported, loss: Any, optimizer: Any, recipe: Mapping[str, Any]) -> RunState:
    """Return the run of a function and an optimizer of Keras, with its state."""
    from onward.frameworks.keras.optimizer import clip_of, groups_of, recipe_of, state_of
    from onward.frameworks.keras.schedule import read_schedule

    names = {id(variable): name for name, variable in exported.variables.items()}
    variables = [exported.variables[name] for name in exported.trainable]
    if optimizer.built:
        members = {id(variable) for variable in optimizer._trainable_variables}
        if strange := [name for name in exported.trainable if id(exported.variables[name]) not in members]:
            raise UnsupportedError(
                f"the optimizer was built without {list_names(strange, 3)}",
                hint="freeze them with `tf.Variable(..., trainable=False)`, or build it with all variables",
            )
    try:
        rate = read_schedule(optimizer)
        return RunState(
            model=exported.model,
            loss=loss,
            groups=groups_of(optimizer, rate.lr, variables, names),
            state=state_of(optimizer, names, variables),
            step=int(optimizer.iterations),
            schedule=rate.schedule,
            clip=clip_of(optimizer),
            statistics=exported.variance,
            recipe={**recipe, **recipe_of(optimizer)},
        )
    except Refused as reason:
        raise UnsupportedError(
            f"the {reason}", hint='write the optimizer as a string, such as `optimizer="adamw:lr=1e-3"`'
        ) from reason


def with_loss(module: Any, example_inputs: Any, loss: Callable[..., Any], targets: Any) -> tuple[Any, dict[str, Any]]:
    """Return a function of inputs and targets by name, whose results are `loss` and the outputs."""
    arguments, named = _arguments(example_inputs)
    call = module.__call__ if isinstance(module, tf.Module) else module
    try:
        bound = inspect.signature(getattr(call, "python_function", call)).bind(*arguments, **named).arguments
        inputs = {name: value for name, value in bound.items() if name not in ("args", "kwargs")} | named
    except (TypeError, ValueError):
        inputs = {}
    if len(inputs) != len(arguments) + len(named):
        inputs = {**{f"input_{i}": value for i, value in enumerate(arguments)}, **named}
        call = functools.partial(_by_position, call, len(arguments))
    if targets is not None and not isinstance(targets, Mapping):
        array = np.asarray(targets) if not isinstance(targets, tf.TensorSpec) else targets
        targets = {"labels" if np.dtype(array.dtype).kind in "iu" else "target": targets}
    labels = dict(targets or {})
    if clashes := [name for name in labels if name in inputs]:
        raise DataError(f"`{clashes[0]}` is an input and a target", hint="give the targets other names")

    def computed(**values: Any) -> dict[str, Any]:
        results = call(**{name: value for name, value in values.items() if name not in labels})
        given = {name: values[name] for name in labels}
        targets = [next(iter(given.values())) if len(given) == 1 else given] if given else []
        return {"loss": loss(*targets, results), "output": results}

    return computed, {**inputs, **labels}


def _by_position(call: Callable[..., Any], count: int, **values: Any) -> Any:
    """Call a function with its first arguments by position: `input_0`, `input_1`."""
    first = [values.pop(f"input_{i}") for i in range(count)]
    return call(*first, **values)


def export(function: Any, example_inputs: Any, *, owner: Any, probe: bool = True) -> Exported:
    """Return the model of a function. Variables are named as in their owner."""
    arguments, named = _arguments(example_inputs)
    function = _concrete(function, arguments, named)
    variables = _variables(function)
    names = names_of(owner, variables)
    op, translator = _write_graph(function, [(v, names[id(v)]) for v in variables])
    variance = keep_averages(op, translator)
    model = _finish(op, translator)
    if probe:
        trained = {names[id(v)]: v for v in variables if v.trainable} if translator.own_gradients else {}
        confirm(model, function, arguments, named, trained)
    used = model.graph.initializers
    trainable = [names[id(v)] for v in variables if v.trainable and names[id(v)] in used]
    by_name = {names[id(v)]: v for v in variables}
    feeds = example_feeds(function, arguments, named, model)
    call = functools.partial(call_with, function, arguments, named)
    return Exported(model, trainable, variance, by_name, call, feeds)


def export_function(function: Callable[..., Any], examples: Sequence[np.ndarray]) -> Model:
    """Return the graph of a function of tensors with these shapes; it returns a list."""
    specs = [tf.TensorSpec(example.shape, example.dtype) for example in examples]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    named = [(variable, f"variable{i}") for i, variable in enumerate(_variables(concrete))]
    model = _finish(*_write_graph(concrete, named))
    for name, value in list(model.graph.initializers.items()):
        if not value.uses():  # a variable that is assigned before it is read
            del model.graph.initializers[name]
    return model


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


def names_of(module: Any, variables: Sequence[Any]) -> dict[int, str]:
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
