"""Runs and models as a folder with a JAX program and its state, and back."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from onward.engines.jax import Jax
from onward.errors import InvalidModelError
from onward.frameworks.inference import try_outputs
from onward.frameworks.jax.forward import TrainingParts, open_inference
from onward.frameworks.jax.program import trial_script
from onward.frameworks.jax.program.source import CONSTANTS, STATE, write_model, write_program
from onward.frameworks.jax.runtime import fill_tree, leaves_by_name
from onward.frameworks.jax.runtime import write as write_arrays
from onward.frameworks.program.trial import outputs_of_program, step_trial
from onward.frameworks.run_files import check_numbers, compare, with_state
from onward.model import Model
from onward.model.storage.containers import safetensors_header
from onward.model.storage.files import reason, regular
from onward.model.storage.transaction import replacing
from onward.run_state.problems import Problems


def write(model: Model, path: Path) -> list[Path]:
    """Write `run.py`, or `model.py` of an inference model, and its arrays into a folder."""
    if not model.steps:
        return _write_model(model, path)
    parts = TrainingParts(model)
    state, _ = parts.state()
    source, constants = write_program(parts, state["params"], model.graph.name or path.name)
    with replacing(path) as folder:
        (folder / "run.py").write_text(source, encoding="utf-8")
        write_arrays(leaves_by_name(state), folder / STATE)
        if constants:
            write_arrays(constants, folder / CONSTANTS)
        if trial := step_trial(parts.model, parts.index):
            trial.run(trial_script.__file__, folder)
    return [path]


def _write_model(model: Model, path: Path) -> list[Path]:
    opened, params = open_inference(model, Jax())
    source, constants = write_model(opened, params, model.graph.name or path.name)
    with replacing(path) as folder:
        (folder / "model.py").write_text(source, encoding="utf-8")
        write_arrays(params, folder / STATE)
        if constants:
            write_arrays(constants, folder / CONSTANTS)
        try_outputs(model, lambda inputs: outputs_of_program(trial_script.__file__, folder, inputs), "jax")
    return [path]


def restore(path: Path, like: Model) -> Model:
    """Return the model `like` with the state of a folder, which is not executed."""
    arrays = _arrays(path / STATE)
    if not like.steps:
        return with_state(like, arrays, str(path))
    parts = TrainingParts(like)
    state, tx = parts.state()
    problems = Problems(f"the state of `{path}`")
    compare(problems, arrays, leaves_by_name(state))
    problems.refuse()
    check_numbers(problems, arrays, leaves_by_name(state))
    problems.refuse()
    with parts.framework.active():
        return parts.training(fill_tree(state, arrays), tx)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        regular(path)
        data = path.read_bytes()
        tensors = safetensors_header(lambda at, count: data[at : at + count], len(data))
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"`{path}` cannot be read: {reason(error)}", hint="write it with `run.save`") from error
    flat = {name: np.frombuffer(data, x.dtype, math.prod(x.shape), x.offset) for name, x in tensors.items() if x.size}
    return {name: flat.get(name, np.zeros(0, x.dtype)).reshape(x.shape) for name, x in tensors.items()}
