"""Runs as files of other frameworks, and back: what `onward convert` does.

What is written needs nothing of Onward. What is read back is never executed: state refills a training model.
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
"""Of the file that holds the state; none where it is a folder."""


def places(framework: Framework, path: Path) -> list[Path]:
    """What is written for a run: the file and a program beside it, or the folder."""
    return [path, program_beside(path)] if ENDINGS[framework] else [path]


def write(model: Model, framework: Framework, path: Path) -> list[Path]:
    """Write the run that a training model holds for a framework; the files, or folders, that were written."""
    made: list[Path] = _files_of(framework).write(_with_known_names(framework, of_one_opset(model)), path)
    return made


def restore(framework: Framework, path: Path, like: Model | None = None) -> Model:
    """The training model that goes on where a run of a framework is: `like`, with the state that its files have."""
    try:
        if not path.is_dir():
            regular(path)
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"could not read `{path}`: {reason(error)}") from error
    files = _files_of(framework)
    if like is None and framework != "tensorflow":
        raise UnsupportedError(
            f"`{path}` holds the state of a run, and not what it computes",
            hint="give the training model that it was made of: `--like training.onnx`",
        )
    made: Model = files.restore(path, None if like is None else _with_known_names(framework, like))
    return made


def _with_known_names(framework: Framework, model: Model) -> Model:
    """With state under names that converters know. TensorFlow executes any step as it is."""
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
    """The framework that a file or a folder is of, by what it is called and what is in it."""
    if path.is_dir():
        return "tensorflow" if (path / "saved_model.pb").exists() else "jax"
    return next((name for name, ending in ENDINGS.items() if ending and path.suffix == ending), None)


def with_state(like: Model, state: Mapping[str, np.ndarray], of: str) -> Model:
    """A copy of a training model with other values, by its own names; refused is what it has no place for.

    `of` is what the values come from, such as a path.
    """
    made, problems = like.copy(), Problems(f"the state of `{of}`")
    known = tensors_of(made, state)
    compare(problems, state, known)
    problems.refuse()
    check_numbers(problems, state, known)
    problems.refuse()
    for name, array in state.items():
        made.set(name, array)
    return made


def tensors_of(model: Model, names: Iterable[str]) -> dict[str, Any]:
    """What a training model has under these names, as far as it has."""
    known = {}
    for name in names:
        with contextlib.suppress(LookupError):
            known[name] = model.initializer(name).const_value
    return known


def compare(problems: Problems, found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Note what tensors of a file, and those that a training model has, do not have in common."""
    for name in {**known, **found}:
        if name not in known or name not in found:
            problems.add(f"{'the training model' if name not in known else 'it'} has no `{name}`", OTHER)
        elif _kind(found[name]) != _kind(known[name]):
            problems.add(f"`{name}` is {_kind(found[name])}, not {_kind(known[name])}", OTHER)


def check_numbers(problems: Problems, found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Note what is no number where the training model has numbers, and counts that are none."""
    for name, tensor in found.items():
        if not _is_finite(tensor) and _is_finite(known[name]):
            problems.add(f"`{name}` has elements that are infinite or no numbers (NaN)", "go on from an earlier state")
    if STEP in found and int(found[STEP]) < 0:
        problems.add(f"it has made {int(found[STEP])} updates", OTHER)


def _is_finite(tensor: Any) -> bool:
    array = np.asarray(tensor.numpy() if isinstance(tensor, ir.TensorProtocol) else tensor)
    return array.dtype.kind in "biuSUO" or bool(np.isfinite(array.astype(np.float64)).all())


def _kind(tensor: Any) -> str:
    """Type and shape, of tensors of any framework."""
    dtype = tensor.dtype.numpy() if isinstance(tensor.dtype, ir.DataType) else tensor.dtype
    return f"{str(dtype).removeprefix('torch.')}{list(tensor.shape)}"


OTHER = "give the training model that it was made of"
