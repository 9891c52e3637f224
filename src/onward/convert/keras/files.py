"""Runs as a `.keras` file with the module beside it that Keras needs to load it, and back."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import h5py
import numpy as np

from onward.convert.files import OTHER, refilled
from onward.convert.keras.optimizers import array_of
from onward.convert.keras.release import to_keras
from onward.convert.keras.source import program_of
from onward.convert.keras.source.standin import standing_in
from onward.convert.keras.source.trial import try_files
from onward.convert.problems import Problems
from onward.convert.python import program_beside
from onward.errors import InvalidModelError
from onward.model import Model
from onward.model.storage.replacement import replacing


def write(model: Model, path: Path) -> list[Path]:
    """Write the run to `path`, and beside it the module with the classes that it is made of; both."""
    live, program = to_keras(model), program_beside(path)
    source = program_of(model, live, program.stem, path.name)
    made = standing_in(source, live)
    with replacing(path.parent, path) as folder:
        (folder / program.name).write_text(source.text, encoding="utf-8")
        made.save(folder / path.name)
        try_files(folder / program.name, folder / path.name, live)
    return [path, program]


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
