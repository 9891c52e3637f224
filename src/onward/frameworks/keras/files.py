"""Runs as a `.keras` file with the module beside it that Keras needs to load it, and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onward.frameworks.files import OTHER, with_state
from onward.frameworks.keras.optimizers import array_of
from onward.frameworks.keras.release import to_keras
from onward.frameworks.keras.source import write_program
from onward.frameworks.keras.source.placeholder_model import standing_in
from onward.frameworks.keras.source.trial import try_files
from onward.frameworks.keras.weights import read_weights
from onward.frameworks.program.names import program_beside
from onward.model import Model
from onward.model.storage.replacement import replacing
from onward.run_state.problems import Problems
from onward.run_state.training_models import step_of
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
