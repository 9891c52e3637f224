"""Runs as a `.keras` file with the module beside it that Keras needs to load it, and back."""

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
from onward.agreement.tolerance import Comparison, Tolerance
from onward.engines.framework_engine import array_function
from onward.engines.keras.types import available
from onward.errors import Error
from onward.frameworks.files import OTHER, with_state
from onward.frameworks.keras.forward import GraphOptimizer, TrainingModel, to_keras
from onward.frameworks.keras.optimizer import array_of, copy_optimizer
from onward.frameworks.keras.program import trial_script
from onward.frameworks.keras.program.source import Source, write_program
from onward.frameworks.program.source_text import program_beside
from onward.frameworks.program.trial import StepTrial, step_trial, try_out
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
    """Write the run to `path`, and beside it the module with the classes that it is made of; both."""
    require_shapes(model, step_of(model), "a program of Keras")
    live, program = to_keras(model), program_beside(path)
    source = write_program(model, live, program.stem, path.name)
    made = standing_in(source, live)
    with replacing(path.parent, path) as folder:
        (folder / program.name).write_text(source.text, encoding="utf-8")
        made.save(folder / path.name)
        try_files(folder / program.name, folder / path.name, live)
    return [path, program]


# ---- back ------------------------------------------------------------------------------------------------------------


def restore(path: Path, like: Model) -> Model:
    """The training model `like` with the state of a file. Nothing in it is executed."""
    live = to_keras(like)
    held = list(live.variables_by_name.values())
    in_order = [*(v for v in held if v.trainable), *(v for v in held if not v.trainable)]
    places = {"vars": in_order, "optimizer/vars": live.optimizer.variables}
    arrays = read_weights(path, places)
    problems = Problems(f"the state of `{path}`")
    for place, variables in places.items():
        if len(arrays[place]) < len(variables):
            found = f"`{place}` has {len(arrays[place])} arrays"
            problems.add(f"{found}, where the training model has {len(variables)}", OTHER)
        for variable, array in zip(variables, arrays[place], strict=False):
            if tuple(variable.shape) != array.shape:
                shapes = f"{list(array.shape)}, where the training model has {list(variable.shape)}"
                problems.add(f"`{variable.path}` is {shapes}", OTHER)
            elif not _is_alike(array.dtype, array_of(variable).dtype):
                problems.add(f"`{variable.path}` is of {array.dtype}, not {array_of(variable).dtype}", OTHER)
    problems.refuse()
    for place, variables in places.items():
        for variable, array in zip(variables, arrays[place], strict=False):
            variable.assign(array.astype(array_of(variable).dtype))
    return with_state(like, live.state(), str(path))


def _is_alike(found: np.dtype, expected: np.dtype) -> bool:
    """Backends store numbers in other sizes, but floats as floats."""
    return (found.kind in "fV") == (expected.kind in "fV") and (found.kind == "b") == (expected.kind == "b")


# ---- arrays of a file, which anybody may have written: only what lies in it itself -----------------------------------


_MEMBER = "model.weights.h5"


def read_weights(path: Path, groups: Iterable[str]) -> dict[str, list[np.ndarray]]:
    """The arrays of groups, in their order; none of a group that is not there."""
    sentence = f"`{path}` is not a file of Keras with weights and an optimizer"
    with (
        blame_file(sentence, *BAD_ZIP, *DAMAGED, KeyError, hint="write it with `model.save`"),
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        zipfile.ZipFile(file) as archive,
    ):
        found = read_hdf5(data, *stored_range(archive, archive.getinfo(_MEMBER)))
        return {name: [_copy(data, array) for array in _in_order(found, name)] for name in groups}


def _in_order(groups: Mapping[str, Mapping[str, Any]], name: str) -> list[Stored | np.ndarray]:
    if inner := next((other for other in groups if other.startswith(f"{name}/")), None):
        raise ValueError(f"`{inner}` is a group, not an array")
    arrays = groups.get(name, {}).get("arrays", {})
    return [arrays[key] for key in sorted(arrays, key=int)]


def _copy(data: mmap.mmap, found: Stored | np.ndarray) -> np.ndarray:
    if isinstance(found, np.ndarray):
        return found
    return np.frombuffer(data, found.dtype, math.prod(found.shape), found.offset).reshape(found.shape).copy()


# ---- the model of a program without the program: it holds the same variables, and so is written to the same file -----


def standing_in(source: Source, live: TrainingModel) -> Any:
    """A compiled model that Keras writes as it would write that of the program, with the state of the live one."""
    made = _model(source)(name=live.name)
    for held in source.model:
        getattr(made, held.attribute).assign(held.array)
    made.compile(optimizer=_optimizer(made, live, source), **live.losses_given)
    return made


def _model(source: Source) -> Any:
    def initialize(self: Any, **options: Any) -> None:
        keras.Model.__init__(self, **options)
        for name, array, trainable in source.model:
            dtype, shape = available(str(array.dtype)), array.shape
            made = self.add_weight(name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=trainable)
            setattr(self, name, made)
        self.built = True

    return _register(source, type(source.class_name, (keras.Model,), {"__init__": initialize}))


def _optimizer(made: Any, live: TrainingModel, source: Source) -> Any:
    given = live.optimizer
    if isinstance(given, GraphOptimizer):
        optimizer = _update(source)(learning_rate=float(given.learning_rate), name="update")
        optimizer.build(made.trainable_variables)
        for held in source.optimizer:
            getattr(optimizer, held.attribute).assign(held.array)
        optimizer.iterations.assign(given.iterations.value)
        return optimizer
    return copy_optimizer(given, list(zip(live.trainable_variables, made.trainable_variables, strict=True)))


def _update(source: Source) -> Any:
    def build(self: Any, variables: Any) -> None:
        if not self.built:
            keras.optimizers.Optimizer.build(self, variables)
            for name, array, _ in source.optimizer:
                setattr(self, name, self.add_variable(array.shape, dtype=available(str(array.dtype)), name=name))

    return _register(source, type("Update", (keras.optimizers.Optimizer,), {"build": build}))


def _register(source: Source, made: Any) -> Any:
    return keras.saving.register_keras_serializable(package=source.package)(made)


# ---- what was written, in a process of its own -----------------------------------------------------------------------


def try_files(program: Path, file: Path, live: TrainingModel) -> None:
    """Compare what both compute of inputs that are made up, and the losses of steps."""
    inputs, expected = _example(live)
    trial = _step_trial(live)
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder, "given.npz"), Path(folder, "results.npz")
        np.savez(given, **{str(i): array for i, array in enumerate(inputs)})  # type: ignore[arg-type]
        environment = {"KERAS_BACKEND": keras.backend.backend()}
        batch = [] if trial is None else [trial.save(Path(folder), inputs=live.input_names, targets=_targets(live))]
        if not try_out(trial_script.__file__, program, file, given, results, *batch, environment=environment):
            return
        with np.load(results) as arrays:
            found, losses = [arrays[str(i)] for i in range(len(arrays) - 1)], arrays["losses"]
    names = [value.name or "" for value in live.source.outputs]
    tolerance = Tolerance(epsilon=epsilon_in(types_in(live.source)), least=0.0, equal_nan=True)
    hint = "please report the model; the live model is `onward.to_keras(training)`"
    compare = Comparison("that of the live model", hint, tolerance, "`{}` of the program".format)
    compare(dict(zip(names, found, strict=bool(inputs))), dict(zip(names, expected, strict=bool(inputs))))
    if trial is not None:
        trial.compare(losses, same_random_numbers=False)


def _step_trial(live: TrainingModel) -> StepTrial | None:
    """Steps to repeat, if what they are fed is all that a model takes."""
    trial = step_trial(live.source)
    return trial if trial is not None and {*live.input_names, *_targets(live)} <= trial.batch.keys() else None


def _targets(live: TrainingModel) -> list[str]:
    """Return the targets in the order in which Keras takes them: losses of its own are in that of outputs."""
    terms = list(describe(live.source).steps[0].loss.terms)
    if live.losses_given:
        outputs = [value.name for value in live.source.outputs]
        terms.sort(key=lambda term: outputs.index(term.output))
    return [name for term in terms for name in term.inputs]


def _example(live: TrainingModel) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs with which the live model runs, and its outputs; none if it takes none that are made up."""
    model = strip(live.source)
    runs = array_function("numpy", model.copy())
    for arrays in example_inputs(model):
        inputs = [arrays[name] for name in live.input_names]
        with contextlib.suppress(Error):
            runs(dict(zip(live.input_names, inputs, strict=True)))
            made = live(inputs, training=False)
            return inputs, [keras.ops.convert_to_numpy(x) for x in (made if isinstance(made, list) else [made])]
    return [], []
