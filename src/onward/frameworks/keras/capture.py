"""Training models from compiled Keras models, and from their configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from onward.arguments import checked
from onward.errors import DataError, UnsupportedError, first_line
from onward.frameworks.keras.layer_graph import REGULARIZATION, LayerGraph, has_call, is_functional
from onward.frameworks.keras.loss import Summand, read_loss
from onward.frameworks.keras.optimizer import (
    clip_of,
    groups_of,
    recipe_of,
    row_of,
    state_of,
)
from onward.frameworks.keras.probe import try_steps
from onward.frameworks.keras.schedule import read_schedule
from onward.frameworks.keras.traced import as_tensors, build, has_own_step
from onward.model import Model
from onward.run_state.state import RunState
from onward.run_state.training_models import to_training_model
from onward.vocabulary.keras import Rate, Refused


@checked(types=False)
def from_keras(
    model: Any, example_inputs: Any = None, *, example_targets: Any = None, approx: bool = False, probe: bool = True
) -> Model:
    """Return the training model that continues the run of a compiled Keras model.

        training = onward.from_keras(model)

    Works on any Keras backend. Initializers are the variables of the model, named by their paths
    and in their layouts.

    - `model`: a compiled model, with its loss and its optimizer
    - `example_inputs`, `example_targets`: a batch as `fit` takes it, for a model that is not made of
      layers but has its own `call`; it is traced
    - `approx`: on TensorFlow, most Keras optimizers square the gradients of an Embedding row by
      row, before those of the same token are summed. True sums them first, as on all other
      backends. False refuses such a model (default: False)
    - `probe`: compare three steps of both sides on random data, without dropout (default: True)
    """
    if hasattr(model, "to_training_model"):
        restored: Model = model.to_training_model()
        return restored
    _check_kind(model, example_inputs, example_targets)
    graph = LayerGraph(model, example_inputs, example_targets)
    problems = [*graph.problems, *_types(model)]
    terms: list[Summand] = []
    if graph.updates:
        optimizers = [update.optimizer for update in graph.updates]
    else:
        optimizers = [model.optimizer]
        terms = _gather(problems, lambda: read_loss(model, graph, example_targets), [])
    if not approx and not problems:
        problems = [problem for optimizer in optimizers for problem in _sparse(model, optimizer, graph)]
    rates = [_gather(problems, functools.partial(read_schedule, o), Rate(0.0)) for o in optimizers]
    recipes = [_gather(problems, functools.partial(recipe_of, o), {}) for o in optimizers]
    for optimizer in optimizers:
        _gather(problems, functools.partial(row_of, optimizer), None)
    if problems:
        raise UnsupportedError(
            f"the model `{model.name}` cannot be carried exactly: " + "; ".join(dict.fromkeys(problems)),
            hint="replace what is named, or export the forward pass and `onward.prepare` it",
        )
    loss: list[Any] = [*(term.spec for term in terms), *([f"value:{REGULARIZATION}"] if graph.is_regularized else [])]
    inference, training = graph.model(), None
    for number, (optimizer, rate, recipe) in enumerate(zip(optimizers, rates, recipes, strict=True)):
        learned = graph.updates[number].variables if graph.updates else model.trainable_variables
        variables = [v for v in learned if graph.is_used(v)]
        several = {"name": f"step{number + 1}", "append": bool(number)} if len(optimizers) > 1 else {}
        run = RunState(
            model=inference if training is None else training,
            loss=[f"value:{graph.losses[graph.updates[number].loss]}"] if graph.updates else loss,
            groups=groups_of(optimizer, rate.lr, variables, graph.names),
            state=state_of(optimizer, graph.names, variables),
            step=int(optimizer.iterations),
            schedule=rate.schedule,
            clip=clip_of(optimizer),
            recipe={**recipe, **several},
        )
        if probe and len(optimizers) == 1:
            try_steps(run, model, graph, terms, example_inputs, example_targets)
        training = to_training_model(run)
    assert training is not None
    return training


def _check_kind(model: Any, example_inputs: Any, example_targets: Any) -> None:
    if not isinstance(model, keras.Model) or getattr(model, "optimizer", None) is None:
        raise UnsupportedError("this is not a compiled Keras model", hint="call `model.compile(...)` first")
    own_step = has_own_step(model)
    if is_functional(model) and not own_step:
        return
    if example_inputs is None:
        raise UnsupportedError(
            f"the model `{model.name}` has Python code of its own, and no example is given",
            hint="give a batch: `onward.from_keras(model, images, example_targets=labels)`",
        )
    if has_call(model):
        model(as_tensors(example_inputs))  # creates the variables
    if own_step:
        try:
            build(model, example_inputs, example_targets)
        except Refused as reason:
            raise UnsupportedError(
                f"the model `{model.name}` cannot be carried exactly: its `train_step` {reason}",
                hint="write it with `tf.GradientTape` and `optimizer.apply_gradients`",
            ) from reason
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"the `train_step` of `{model.name}` fails with the example: {first_line(error)}",
                hint="give a batch as `fit` takes it: `onward.from_keras(model, images, example_targets=labels)`",
            ) from error


def _types(model: Any) -> list[str]:
    """Return a problem if types differ from Keras's default type, in which it computes losses."""
    dtypes = {str(keras.backend.standardize_dtype(v.dtype)) for v in model.trainable_variables}
    dtypes |= {layer.compute_dtype for layer in model._flatten_layers() if layer.variables}
    other = sorted(dtypes - {keras.config.floatx()})
    return [f"layers compute in {', '.join(other)}, and losses in {keras.config.floatx()}"] if other else []


def _sparse(model: Any, optimizer: Any, graph: LayerGraph) -> list[str]:
    """Return a problem if the optimizer is not linear in gradients of an Embedding, whose rows repeat."""
    name = type(optimizer).__name__
    tables = [layer for layer in model._flatten_layers() if type(layer).__name__ == "Embedding" and layer.trainable]
    repeating = [layer.name for layer in tables if graph.may_repeat(layer.embeddings)]
    is_linear = name in ("SGD", "Lion") and clip_of(optimizer) is None
    if not repeating or is_linear or keras.backend.backend() != "tensorflow":
        return []
    return [
        f"{name} on TensorFlow squares or clips gradients of `{repeating[0]}` token by token (`approx=True` adds up)"
    ]


def _gather(problems: list[str], read: Callable[[], Any], default: Any) -> Any:
    try:
        return read()
    except Refused as reason:
        problems.append(f"the {reason}")
        return default


def from_configuration(config: Mapping[str, Any], names: Sequence[tuple[str, tuple[int, ...]]]) -> Model:
    """Return a training model with the layers and the loss of a configuration, and SGD as optimizer.

    `names` are the names and shapes of the variables in Keras's order. Only classes of Keras are
    created.
    """
    sgd: dict[str, Any] = {"module": "keras.optimizers", "class_name": "SGD", "config": {}, "registered_name": None}
    compiled = {**config.get("compile_config", {}), "optimizer": sgd, "metrics": None, "run_eagerly": False}
    if not compiled.get("loss"):
        raise UnsupportedError("the model was saved without its loss", hint="give a training model with `--like`")
    try:
        model = keras.saving.deserialize_keras_object({**config, "compile_config": compiled}, safe_mode=True)
    except Exception as error:  # layers of Keras raise errors of all types
        raise UnsupportedError(
            f"Keras cannot make the layers of the file: {first_line(error)}", hint="give the ONNX model with `--like`"
        ) from error
    variables = [variable for variable in model.variables if "seed_generator" not in variable.path]
    shapes = [tuple(variable.shape) for variable in variables]
    if shapes != [shape for _, shape in names]:
        raise UnsupportedError(
            "the layers of the file have other variables than are stored", hint="give the ONNX model with `--like`"
        )
    for variable, (name, _) in zip(variables, names, strict=True):
        variable._path = name  # a loaded layer lacks the names of the models around it
    return from_keras(model, probe=False, approx=True)
