"""Runs as a `.keras` file, with the module that Keras needs to load it, and back."""

from __future__ import annotations

import contextlib
import math
import mmap
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from onward.agreement.inputs import example_inputs
from onward.agreement.steps import epsilon_in, types_in
from onward.agreement.tolerance import Sides, Tolerance
from onward.engines.framework_engine import array_function
from onward.engines.keras.types import available
from onward.errors import Error, UnsupportedError
from onward.frameworks.inference import try_outputs
from onward.frameworks.keras.forward import GraphOptimizer, TrainingModel, to_keras
from onward.frameworks.keras.optimizer import array_of, copy_optimizer
from onward.frameworks.keras.program import trial_script
from onward.frameworks.keras.program.source import LayerClass, Source, write_layers, write_program
from onward.frameworks.program.source_text import program_beside
from onward.frameworks.program.trial import step_trial, try_out
from onward.frameworks.run_files import OTHER, with_state
from onward.inspect import describe
from onward.model import Model
from onward.model.storage.containers import BAD_ZIP, Stored, stored_range
from onward.model.storage.files import blame_file
from onward.model.storage.hdf5 import DAMAGED, read_hdf5
from onward.model.storage.transaction import replacing
from onward.run_state.problems import Problems
from onward.run_state.training_models import step_of
from onward.transform import strip
from onward.transform.declare import require_shapes


def write(model: Model, path: Path) -> list[Path]:
    """Write the run, or the model, to `path` and the module with its classes; return both paths."""
    if not model.steps:
        return _write_layers(model, path)
    require_shapes(model, step_of(model), "a program of Keras")
    live, program = to_keras(model), program_beside(path)
    source = write_program(model, live, program.stem, path.name)
    with replacing(path.parent, path) as folder:
        (folder / program.name).write_text(source.text, encoding="utf-8")
        model_with_state(source, live).save(folder / path.name)
        try_files(folder / program.name, folder / path.name, live)
    return [path, program]


def _write_layers(model: Model, path: Path) -> list[Path]:
    live, program = to_keras(model), program_beside(path)
    text, classes = write_layers(live, program.stem, path.name)
    with replacing(path.parent, path) as folder:
        (folder / program.name).write_text(text, encoding="utf-8")
        _with_classes(live, program.stem, classes).save(folder / path.name)
        names = [value.name or "" for value in model.outputs]

        def compute(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            with tempfile.TemporaryDirectory() as directory:
                examples, results = Path(directory, "examples.npz"), Path(directory, "results.npz")
                arrays = [inputs[value.name or ""] for value in model.inputs]
                np.savez(examples, **{str(i): array for i, array in enumerate(arrays)})  # type: ignore[arg-type]
                environment = {"KERAS_BACKEND": keras.backend.backend()}
                files = folder / program.name, folder / path.name, examples, results
                if not try_out(trial_script.__file__, *files, environment=environment):
                    return {}
                with np.load(results) as stored:
                    return {name: stored[str(i)] for i, name in enumerate(names)}

        try_outputs(model, compute, "keras")
    return [path, program]


def _with_classes(live: Any, package: str, classes: Mapping[str, LayerClass]) -> Any:
    """Return a copy of a functional model in which `Operations` layers are of the classes of a program."""

    def clone(layer: Any) -> Any:
        if layer.name not in classes:
            return layer.__class__.from_config(layer.get_config())
        variables = classes[layer.name].variables

        def initialize(self: Any, **options: Any) -> None:
            keras.layers.Layer.__init__(self, **options)
            for attribute, array, trainable in variables.values():
                options = {"shape": array.shape, "dtype": available(str(array.dtype)), "trainable": trainable}
                setattr(self, attribute, self.add_weight(name=attribute, initializer="zeros", **options))
            self.built = True

        def call(self: Any, inputs: Any) -> Any:
            return layer.call(inputs)

        layer_class = type(classes[layer.name].name, (keras.layers.Layer,), {"__init__": initialize, "call": call})
        layer_class = keras.saving.register_keras_serializable(package=package)(layer_class)
        return layer_class(name=layer.name, autocast=False)

    copy = keras.models.clone_model(live, clone_function=clone)
    for layer in live.layers:
        if layer.name in classes:
            own = copy.get_layer(layer.name)
            for attribute, array, _ in classes[layer.name].variables.values():
                getattr(own, attribute).assign(array)
        else:
            copy.get_layer(layer.name).set_weights(layer.get_weights())
    return copy


def restore(path: Path, like: Model) -> Model:
    """Return the training model `like` with the state of a file, which is not executed."""
    if not like.steps:
        raise UnsupportedError(
            "the layers of a Keras model have their own names and layouts",
            hint="load the model, compile it and convert it: `onward.from_keras(model)`",
        )
    live = to_keras(like)
    variables = sorted(live.variables_by_name.values(), key=lambda variable: not variable.trainable)
    groups = {"vars": variables, "optimizer/vars": live.optimizer.variables}
    arrays = read_weights(path, groups)
    problems = Problems(f"the state of `{path}`")
    for group, variables in groups.items():
        if (count := len(arrays[group])) < len(variables):
            problems.add(f"`{group}` has {count} arrays, where the training model has {len(variables)}", OTHER)
        for variable, array in zip(variables, arrays[group], strict=False):
            dtype = array_of(variable).dtype
            if tuple(variable.shape) != array.shape:
                shapes = f"{list(array.shape)}, where the training model has {list(variable.shape)}"
                problems.add(f"`{variable.path}` is {shapes}", OTHER)
            # Backends store numbers in other sizes, but floats as floats. Kind "V" is bfloat16.
            elif (array.dtype.kind in "fV", array.dtype.kind == "b") != (dtype.kind in "fV", dtype.kind == "b"):
                problems.add(f"`{variable.path}` is of {array.dtype}, not {dtype}", OTHER)
    problems.refuse()
    for group, variables in groups.items():
        for variable, array in zip(variables, arrays[group], strict=False):
            variable.assign(array.astype(array_of(variable).dtype))
    return with_state(like, live.state(), str(path))


def read_weights(path: Path, groups: Iterable[str]) -> dict[str, list[np.ndarray]]:
    """Return the arrays of groups, in their order; an empty list for a missing group.

    The file may be hostile: only data inside the file is read.
    """
    sentence = f"`{path}` is not a file of Keras with weights and an optimizer"
    with (
        blame_file(sentence, *BAD_ZIP, *DAMAGED, KeyError, hint="write it with `model.save`"),
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        zipfile.ZipFile(file) as archive,
    ):
        stored = read_hdf5(data, *stored_range(archive, archive.getinfo("model.weights.h5")))
        return {name: [_copy(data, array) for array in _in_order(stored, name)] for name in groups}


def _in_order(groups: Mapping[str, Mapping[str, Any]], name: str) -> list[Stored | np.ndarray]:
    if inner := next((other for other in groups if other.startswith(f"{name}/")), None):
        raise ValueError(f"`{inner}` is a group, not an array")
    arrays = groups.get(name, {}).get("arrays", {})
    return [arrays[key] for key in sorted(arrays, key=int)]


def _copy(data: mmap.mmap, array: Stored | np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    return np.frombuffer(data, array.dtype, math.prod(array.shape), array.offset).reshape(array.shape).copy()


def model_with_state(source: Source, live: TrainingModel) -> Any:
    """Return a compiled model with the classes, variables and state of the program.

    Keras saves it as it would save the model of the program, which is not executed.
    """

    def initialize(self: Any, **options: Any) -> None:
        keras.Model.__init__(self, **options)
        for name, array, trainable in source.model:
            dtype, shape = available(str(array.dtype)), array.shape
            weight = self.add_weight(name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=trainable)
            setattr(self, name, weight)
        self.built = True

    model = _register(source, source.class_name, keras.Model, __init__=initialize)(name=live.name)
    for stored in source.model:
        getattr(model, stored.attribute).assign(stored.array)
    model.compile(optimizer=_optimizer(model, live, source), **live.losses_given)
    return model


def _optimizer(model: Any, live: TrainingModel, source: Source) -> Any:
    if not isinstance(live.optimizer, GraphOptimizer):
        pairs = zip(live.trainable_variables, model.trainable_variables, strict=True)
        return copy_optimizer(live.optimizer, list(pairs))

    def build(self: Any, variables: Any) -> None:
        if not self.built:
            keras.optimizers.Optimizer.build(self, variables)
            for name, array, _ in source.optimizer:
                setattr(self, name, self.add_variable(array.shape, dtype=available(str(array.dtype)), name=name))

    update = _register(source, "Update", keras.optimizers.Optimizer, build=build)
    optimizer = update(learning_rate=float(live.optimizer.learning_rate), name="update")
    optimizer.build(model.trainable_variables)
    for stored in source.optimizer:
        getattr(optimizer, stored.attribute).assign(stored.array)
    optimizer.iterations.assign(live.optimizer.iterations.value)
    return optimizer


def _register(source: Source, name: str, base: Any, **methods: Any) -> Any:
    return keras.saving.register_keras_serializable(package=source.package)(type(name, (base,), methods))


def try_files(program: Path, file: Path, live: TrainingModel) -> None:
    """Compare outputs and losses of the program, in a separate process, with the live model."""
    inputs, expected = _example(live)
    trial, targets = step_trial(live.source), _targets(live)
    if trial is not None and not {*live.input_names, *targets} <= trial.batch.keys():
        trial = None  # a step takes more than inputs and targets
    with tempfile.TemporaryDirectory() as folder:
        examples, results = Path(folder, "examples.npz"), Path(folder, "results.npz")
        np.savez(examples, **{str(i): array for i, array in enumerate(inputs)})  # type: ignore[arg-type]
        environment = {"KERAS_BACKEND": keras.backend.backend()}
        batch = [] if trial is None else [trial.save(Path(folder), inputs=live.input_names, targets=targets)]
        if not try_out(trial_script.__file__, program, file, examples, results, *batch, environment=environment):
            return
        with np.load(results) as arrays:
            outputs, losses = [arrays[str(i)] for i in range(len(arrays) - 1)], arrays["losses"]
    names = [value.name or "" for value in live.source.outputs]
    tolerance = Tolerance(epsilon=epsilon_in(types_in(live.source)), least=0.0, equal_nan=True)
    hint = "please report the model; the live model is `onward.to_keras(training)`"
    compare = Sides("that of the live model", hint, tolerance, "`{}` of the program".format)
    compare(dict(zip(names, outputs, strict=bool(inputs))), dict(zip(names, expected, strict=bool(inputs))))
    if trial is not None:
        trial.compare(losses, same_random_numbers=False)


def _targets(live: TrainingModel) -> list[str]:
    """Return the targets in the order of Keras, whose losses are in the order of outputs."""
    terms = list(describe(live.source).steps[0].loss.terms)
    if live.losses_given:
        outputs = [value.name for value in live.source.outputs]
        terms.sort(key=lambda term: outputs.index(term.output))
    return [name for term in terms for name in term.inputs]


def _example(live: TrainingModel) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return inputs with which the live model runs, and its outputs; empty lists if none work."""
    model = strip(live.source)
    runs = array_function("numpy", model.copy())
    for arrays in example_inputs(model):
        inputs = [arrays[name] for name in live.input_names]
        with contextlib.suppress(Error):
            runs(dict(zip(live.input_names, inputs, strict=True)))
            outputs = live(inputs, training=False)
            return inputs, [
                keras.ops.convert_to_numpy(x) for x in (outputs if isinstance(outputs, list) else [outputs])
            ]
    return [], []
