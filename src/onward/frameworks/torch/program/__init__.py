"""Runs as state files of PyTorch with a program beside them, and back. Nothing read is executed."""

from __future__ import annotations

import copy
import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onward.errors import InvalidModelError, UnsupportedError, first_line
from onward.frameworks.program.source_text import program_beside
from onward.frameworks.run_files import compare, with_state
from onward.frameworks.torch import TorchTraining, to_torch
from onward.frameworks.torch.module_capture import COUNTER
from onward.frameworks.torch.module_capture import STEP as STEP_TAG
from onward.frameworks.torch.optimizer import read_optimizer
from onward.frameworks.torch.probe import try_files
from onward.frameworks.torch.program.source import state_of, write_program
from onward.frameworks.torch.schedule import read_schedule, updates_per_step
from onward.model import Model
from onward.model.state import STEP
from onward.model.storage.transaction import replacing
from onward.run_state.problems import Problems
from onward.run_state.state import ParameterGroup
from onward.run_state.training_models import from_training_model, step_of

_HINT = "write it with `save` of the program beside it"
_EXTRA_BYTES = 64 << 20
"""Bytes that an archive may have in addition, for its index and small state."""
_LARGEST = 2**53
"""Bound of counts and settings: float64 has no larger integers without gaps."""


def _read_state_file(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dictionaries of a file, which must be like the expected ones."""
    _check_size(path, expected["module"])
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch has many errors for files that it did not write
        why = "".join(letter if letter.isprintable() else " " for letter in first_line(error))[:200]
        raise InvalidModelError(
            f"`{path}` is not a file of tensors that PyTorch reads without executing it: {why}", hint=_HINT
        ) from error
    if not isinstance(content, dict) or not expected.keys() <= content.keys():
        raise InvalidModelError(f"`{path}` does not hold a module, an optimizer and a scheduler", hint=_HINT)
    if "optimizer" in content and "optimizer" not in expected:
        raise UnsupportedError(
            f"`{path}` holds a run, and this is an inference model", hint="give its training model: `--like run.onnx`"
        )
    state = {key: content[key] for key in expected}
    _refuse(path, _module_problems(state["module"]))
    problems = Problems(f"the state of `{path}`")
    compare(problems, state["module"], expected["module"])
    problems.refuse()
    if "optimizer" in expected:
        _refuse(path, _optimizer_problems(state, expected))
    return state


def _refuse(path: Path, problems: Iterator[str]) -> None:
    for problem in problems:
        raise InvalidModelError(f"`{path}` is not a state of this run: {problem}", hint=_HINT)


def _check_size(path: Path, module: Mapping[str, torch.Tensor]) -> None:
    """Refuse archives that unpack to much more than a module and several slots need."""
    most = 16 * sum(tensor.nbytes for tensor in module.values()) + _EXTRA_BYTES
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # PyTorch will say what is wrong
    if size > most:
        raise InvalidModelError(f"`{path}` unpacks to {size} bytes, more than a state of this run needs", hint=_HINT)


def _module_problems(module: Any) -> Iterator[str]:
    if not isinstance(module, dict) or not all(isinstance(x, torch.Tensor) for x in module.values()):
        yield "`module` is not a dictionary of tensors"
        return
    for name, tensor in module.items():
        yield from _tensor_problems(tensor, f"module {name!r}")


def _optimizer_problems(state: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the state of the optimizer and the scheduler."""
    optimizer = state["optimizer"]
    if not isinstance(optimizer, dict) or optimizer.keys() != expected["optimizer"].keys():
        yield "`optimizer` is not the state of an optimizer"
        return
    for key, inner in expected["optimizer"].items():
        if key == "state":
            yield from _slot_problems(optimizer[key], inner)
        else:
            yield from _differences(optimizer[key], inner, f"optimizer {key}")
            if any(a.get("params") != b.get("params") for a, b in zip(optimizer[key], inner, strict=False)):
                yield "its groups have other parameters"
    if (state["scheduler"] is None) != (expected["scheduler"] is None):
        yield "only one of it and the training model has a scheduler"
    elif expected["scheduler"] is not None:
        yield from _differences(state["scheduler"], expected["scheduler"], "scheduler")


def _slot_problems(slots_by_number: Any, expected: Any) -> Iterator[str]:
    """Yield what is wrong with slots by number of the parameter. Some parameters may have none yet."""
    if not isinstance(slots_by_number, dict):
        yield "the state of the optimizer is not a dictionary"
        return
    for number, slots in slots_by_number.items():
        if type(number) is not int or number not in expected:
            yield f"optimizer state {number!r} has no parameter"
        else:
            yield from _differences(slots, expected[number], f"optimizer state {number}")
            scalars = (x for x in slots.values() if isinstance(x, torch.Tensor) and not x.ndim)
            if not all(0 <= x <= _LARGEST for x in scalars):
                yield f"optimizer state {number} has an invalid count"


def _differences(value: Any, expected: Any, name: str) -> Iterator[str]:
    """Yield how a tree of tensors, numbers and strings differs from the expected one."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            yield f"{name} is not a tensor"
        elif value.dtype != expected.dtype or value.shape != expected.shape:
            yield f"{name} is {value.dtype}{list(value.shape)}, not {expected.dtype}{list(expected.shape)}"
        else:
            yield from _tensor_problems(value, name)
    elif isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            yield f"{name} has other entries"
        else:
            for key, inner in expected.items():
                yield from _differences(value[key], inner, f"{name} {key}")
    elif isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            yield f"{name} is not a list of {len(expected)}"
        else:
            for i, (item, inner) in enumerate(zip(value, expected, strict=True)):
                yield from _differences(item, inner, f"{name} {i}")
    elif _is_number(expected):
        if not _is_number(value):
            yield f"{name} is not a number"
    else:
        types = bool | None if isinstance(expected, bool | None) else type(expected)
        if not isinstance(value, types):
            yield f"{name} is a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and -_LARGEST <= value <= _LARGEST and math.isfinite(value)


def _tensor_problems(tensor: torch.Tensor, name: str) -> Iterator[str]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
        yield f"{name} is not a plain tensor"


def write(model: Model, path: Path) -> list[Path]:
    """Write the state to `path` and the program that makes the run, or the module, beside it; return both paths."""
    objects, program = to_torch(model, step=step_of(model) if model.steps else None), program_beside(path)
    live = objects if model.steps else (objects, None, None, None)
    source = write_program(model, live, path.name)
    state = io.BytesIO()
    torch.save(state_of(source, live), state)
    with replacing(path.parent, path) as folder:
        (folder / path.name).write_bytes(state.getvalue())
        (folder / program.name).write_text(source.text, encoding="utf-8")
        try_files(folder / program.name, folder / path.name, live[0], model)
    return [path, program]


def restore(path: Path, like: Model) -> Model:
    """Return the training model `like` with the state of a file."""
    if not like.steps:
        module = to_torch(like, probe=False)
        module.load_state_dict(_read_state_file(path, {"module": module.state_dict()})["module"])
        return with_state(like, module.arrays(), str(path))
    run, live = from_training_model(like), to_torch(like, probe=False)
    names = {id(parameter): name for name, parameter in live.module.parameters_by_name().items()}
    every = updates_per_step(run)

    def optimizer() -> tuple[list[ParameterGroup], dict[str, np.ndarray], int]:
        schedule = read_schedule(live.scheduler, every) if live.scheduler is not None else None
        return read_optimizer(live.optimizer, names, schedule)

    groups_of_model, _, _ = optimizer()
    _load(live, path)
    groups, slots, step = optimizer()
    problems = Problems(f"the optimizer of `{path}`")
    if groups != groups_of_model:
        problems.add("its settings are not those of the training model", "change them there: `onward set`")
    problems.refuse()
    weights = live.module.arrays()
    arrays = {**weights, **{name: array.astype(like.array(name).dtype) for name, array in slots.items()}}
    model = with_state(like, {**arrays, STEP: np.asarray(max(step, run.step), np.int64)}, str(path))
    for name in weights:
        if name.rpartition(".")[2] == COUNTER:
            model.graph.initializers[name].metadata_props[STEP_TAG] = str(step)
    return model


def _load(live: TorchTraining, path: Path) -> None:
    """Load a file into the objects of PyTorch, if it has the state of such objects."""
    scheduler = live.scheduler
    module, optimizer = copy.deepcopy(live[:2])  # without the hook that clips
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()  # creates the state that an optimizer has after its first update
    expected = {
        "module": live.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    state = _read_state_file(path, expected)
    live.module.load_state_dict(state["module"])
    live.optimizer.load_state_dict(state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
