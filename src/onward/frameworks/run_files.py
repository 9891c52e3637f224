"""Runs as files of other frameworks, and back, for `onward convert`.

The written files need no Onward. Files that are read are never executed: their state fills a
training model.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir

from onward.errors import InvalidModelError, UnsupportedError
from onward.frameworks.inference import open_parameters
from onward.frameworks.program.source_text import program_beside
from onward.model import Model
from onward.model.state import STEP
from onward.model.storage.files import reason, regular
from onward.run_state.problems import Problems
from onward.run_state.standard_steps import adopt
from onward.transform.opset import of_one_opset

Framework = Literal["torch", "keras", "jax", "tensorflow"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)


ENDINGS: dict[Framework, str] = {"torch": ".pt", "keras": ".keras", "jax": "", "tensorflow": ""}
"""Suffix of the state file, or none for a folder."""


def written_paths(framework: Framework, path: Path) -> list[Path]:
    """Return the paths that are written for a run: a file and its program, or a folder."""
    return [path, program_beside(path)] if ENDINGS[framework] else [path]


def write(model: Model, framework: Framework, path: Path) -> list[Path]:
    """Write the run of a training model for a framework, and return the paths."""
    paths: list[Path] = _files_of(framework).write(_with_known_names(framework, of_one_opset(model)), path)
    return paths


def restore(framework: Framework, path: Path, like: Model | None = None) -> Model:
    """Return the training model, or the inference model, `like` with the state of a framework's files."""
    try:
        if not path.is_dir():
            regular(path)
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"could not read `{path}`: {reason(error)}") from error
    files = _files_of(framework)
    if like is not None and not like.steps:
        like, _ = open_parameters(like)
    if like is None and framework != "tensorflow":
        raise UnsupportedError(
            f"`{path}` holds the state of a run, but no graph",
            hint="give its training model: `--like training.onnx`",
        )
    model: Model = files.restore(path, None if like is None else _with_known_names(framework, like))
    return model


def _with_known_names(framework: Framework, model: Model) -> Model:
    """Return the model with state names that converters know. TensorFlow executes any step."""
    return model if framework == "tensorflow" else adopt(model)


def _files_of(framework: Framework) -> Any:
    try:
        return importlib.import_module(f"onward.frameworks.{framework}.program")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("onward"):
            raise
        extra = "tensorflow" if framework == "keras" else framework
        raise UnsupportedError(
            f"this needs `{error.name}`, which is not installed", hint=f"pip install 'onward[{extra}]'"
        ) from error


def recognize(path: Path) -> Framework | None:
    """Return the framework of a file or folder, judged by its name and content."""
    if path.is_dir():
        return "tensorflow" if (path / "saved_model.pb").exists() else "jax"
    return next((name for name, ending in ENDINGS.items() if ending and path.suffix == ending), None)


def with_state(like: Model, state: Mapping[str, np.ndarray], of: str) -> Model:
    """Return a copy of a training model with other state, and refuse names that it lacks.

    `of` is the source of the values, such as a path.
    """
    model, problems = like.copy(), Problems(f"the state of `{of}`")
    tensors = tensors_of(model, state)
    compare(problems, state, tensors)
    problems.refuse()
    check_numbers(problems, state, tensors)
    problems.refuse()
    for name, array in state.items():
        model.set(name, array)
    return model


def tensors_of(model: Model, names: Iterable[str]) -> dict[str, Any]:
    """Return the tensors of these names that a training model has."""
    tensors = {}
    for name in names:
        with contextlib.suppress(LookupError):
            tensors[name] = model.initializer(name).const_value
    return tensors


def compare(problems: Problems, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Note differences between tensors of a file and of a training model."""
    for name in {**theirs, **ours}:
        if name not in theirs or name not in ours:
            problems.add(f"{'the training model' if name not in theirs else 'it'} has no `{name}`", OTHER)
        elif _type_and_shape(ours[name]) != _type_and_shape(theirs[name]):
            problems.add(f"`{name}` is {_type_and_shape(ours[name])}, not {_type_and_shape(theirs[name])}", OTHER)


def check_numbers(problems: Problems, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Note NaN and infinite elements, and negative counts."""
    for name, tensor in ours.items():
        if not _is_finite(tensor) and _is_finite(theirs[name]):
            problems.add(f"`{name}` has infinite or NaN elements", "restore an earlier state")
    if STEP in ours and int(ours[STEP]) < 0:
        problems.add(f"it has made {int(ours[STEP])} updates", OTHER)


def _is_finite(tensor: Any) -> bool:
    array = np.asarray(tensor.numpy() if isinstance(tensor, ir.TensorProtocol) else tensor)
    return array.dtype.kind in "biuSUO" or bool(np.isfinite(array.astype(np.float64)).all())


def _type_and_shape(tensor: Any) -> str:
    """Return the type and shape of a tensor of any framework."""
    dtype = tensor.dtype.numpy() if isinstance(tensor.dtype, ir.DataType) else tensor.dtype
    return f"{str(dtype).removeprefix('torch.')}{list(tensor.shape)}"


OTHER = "give the training model of this run"
