"""A run as a folder: a program for JAX, and its state. And back."""

from __future__ import annotations

from pathlib import Path

from onward.convert.files import compare, refilled
from onward.convert.jax.program.runtime import filled, named, read
from onward.convert.jax.program.runtime import write as write_arrays
from onward.convert.jax.program.source import CONSTANTS, STATE, program
from onward.convert.jax.restore import Parts
from onward.convert.problems import Problems
from onward.errors import InvalidModelError
from onward.model import Model
from onward.model.storage.replacement import replacing


def write(model: Model, path: Path) -> list[Path]:
    """Write `run.py` and the arrays that it reads into a folder."""
    parts = Parts(model)
    state, _ = parts.state()
    made = program(parts, state["params"], model.graph.name or path.name)
    with replacing(path) as folder:
        (folder / "run.py").write_text(made.source, encoding="utf-8")
        write_arrays(named(state), folder / STATE)
        if made.constants:
            write_arrays(made.constants, folder / CONSTANTS)
    return [path]


def restore(path: Path, like: Model | None) -> Model:
    """The training model `like` with the state of a folder, of which nothing is executed."""
    if like is None:
        return refilled(like, {}, str(path))
    try:
        arrays = read(path / STATE)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidModelError(f"`{path / STATE}` cannot be read: {error}") from error
    parts = Parts(like)
    state, tx = parts.state()
    problems = Problems(f"the state of `{path}`")
    compare(problems, arrays, named(state))
    problems.refuse()
    with parts.framework.active():
        return parts.training(filled(state, arrays), tx)
