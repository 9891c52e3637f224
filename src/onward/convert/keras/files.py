"""Runs as a `.keras` file with the module beside it that Keras needs to load it, and back."""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from onward.convert.files import OTHER, refilled
from onward.convert.keras.live import GraphOptimizer, TrainingModel
from onward.convert.keras.optimizers import array_of, twin_of
from onward.convert.keras.release import to_keras
from onward.convert.keras.source import Source, program_of
from onward.convert.keras.source.lines import identifier
from onward.convert.problems import Problems
from onward.errors import InvalidModelError
from onward.model import Model


def write(model: Model, path: Path) -> list[Path]:
    """Write the run to `path`, and beside it the module with the classes that it is made of; both."""
    live = to_keras(model)
    package = identifier(path.stem)
    source = program_of(model, live, package)
    module = path.with_name(f"{package}.py")
    module.write_text(source.text, encoding="utf-8")
    _filled(_imported(module, package), live, source).save(path)
    return [path, module]


def _imported(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"onward_written_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _filled(module: Any, live: TrainingModel, source: Source) -> Any:
    """The model of the program with the state of the live one."""
    made = getattr(module, source.class_name)(name=live.name)
    for name, attribute in source.model.items():
        getattr(made, attribute).assign(live.variables_by_name[name].value)
    for attribute, array in source.constants.items():
        getattr(made, attribute).assign(array)
    made.compile(optimizer=_optimizer(module, made, live, source), **live.losses_given)
    return made


def _optimizer(module: Any, made: Any, live: TrainingModel, source: Source) -> Any:
    given = live.optimizer
    if isinstance(given, GraphOptimizer):
        optimizer = module.Update(learning_rate=float(given.learning_rate), name="update")
        optimizer.build(made.trainable_variables)
        for name, array in given.state().items():
            getattr(optimizer, source.optimizer[name]).assign(array)
        optimizer.iterations.assign(given.iterations.value)
        return optimizer
    optimizer = twin_of(given, zip(live.trainable_variables, made.trainable_variables, strict=True))
    optimizer.build(made.trainable_variables)
    for ours, theirs in zip(given.variables, optimizer.variables, strict=True):
        theirs.assign(ours.value)
    return optimizer


# ---- back ------------------------------------------------------------------------------------------------------------


def restore(path: Path, like: Model | None = None) -> Model:
    """The training model `like` with the state of a file. Nothing in it is executed."""
    stored = _stored(path)
    if like is None:
        return refilled(None, {}, str(path))
    live = to_keras(like)
    held = list(live.variables_by_name.values())
    in_order = [*(v for v in held if v.trainable), *(v for v in held if not v.trainable)]
    places = {"vars": in_order, "optimizer/vars": live.optimizer.variables}
    problems = Problems(f"the state of `{path}`")
    for place, variables in places.items():
        arrays = stored.get(place, [])
        if len(arrays) < len(variables):
            problems.add(f"`{place}` has {len(arrays)} arrays, where the training model has {len(variables)}", OTHER)
        for variable, array in zip(variables, arrays, strict=False):
            if tuple(variable.shape) != array.shape:
                shapes = f"{list(array.shape)}, where the training model has {list(variable.shape)}"
                problems.add(f"`{variable.path}` is {shapes}", OTHER)
    problems.refuse()
    for place, variables in places.items():
        for variable, array in zip(variables, stored[place], strict=False):
            variable.assign(array.astype(array_of(variable).dtype))
    return refilled(like, live.state(), str(path))


def _stored(path: Path) -> dict[str, list[np.ndarray]]:
    """The arrays of a file, in the order of variables."""
    try:
        with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5")), "r") as weights:
            groups = {name: weights[name] for name in ("vars", "optimizer/vars") if name in weights}
            return {name: [np.array(group[key]) for key in sorted(group, key=int)] for name, group in groups.items()}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise InvalidModelError(
            f"`{path}` is not a file of Keras with weights and an optimizer", hint="write it with `model.save`"
        ) from error
