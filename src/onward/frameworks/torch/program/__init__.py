"""Runs as a state file of PyTorch with a program beside it, and back. Nothing in these files is executed."""

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

from onward.errors import InvalidModelError, first_line
from onward.frameworks.files import compare, with_state
from onward.frameworks.program.source_text import program_beside
from onward.frameworks.torch import TorchTraining, to_torch
from onward.frameworks.torch.capture import COUNTER
from onward.frameworks.torch.capture import STEP as STEP_TAG
from onward.frameworks.torch.optimizer import read_optimizer
from onward.frameworks.torch.probe import try_files
from onward.frameworks.torch.program.source import state_of, write_program
from onward.frameworks.torch.schedule import read_schedule, updates_per_step
from onward.model import Model
from onward.model.state import STEP
from onward.model.storage.transaction import replacing
from onward.run_state.problems import Problems
from onward.run_state.training_models import from_training_model

_HINT = "write it with `save` of the program beside it"
_ROOM = 64 << 20
_LARGEST = 2**53
"""Of counts and settings: no larger one is exact."""


def read_state_file(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds, if it is a dictionary of state dictionaries like those that are expected."""
    _check_size(path, expected["module"])
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of bytes that are none of its own, PyTorch says so in many ways
        why = "".join(letter if letter.isprintable() else " " for letter in first_line(error))[:200]
        raise InvalidModelError(
            f"`{path}` is not a file of tensors that PyTorch reads without executing it: {why}", hint=_HINT
        ) from error
    if not isinstance(state, dict) or not expected.keys() <= state.keys():
        raise InvalidModelError(f"`{path}` does not hold a module, an optimizer and a scheduler", hint=_HINT)
    found = {key: state[key] for key in expected}
    _refuse(path, _of_module(found["module"]))
    problems = Problems(f"the state of `{path}`")
    compare(problems, found["module"], expected["module"])
    problems.refuse()
    _refuse(path, _of_optimizer(found, expected))
    return found


def _refuse(path: Path, objections: Iterator[str]) -> None:
    for objection in objections:
        raise InvalidModelError(f"`{path}` is no state of such a run: {objection}", hint=_HINT)


def _check_size(path: Path, module: Mapping[str, torch.Tensor]) -> None:
    """Refuse archives that unpack to much more than a module, an optimizer of several slots and a scheduler need."""
    most = 16 * sum(tensor.nbytes for tensor in module.values()) + _ROOM
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # PyTorch will say what is wrong
    if size > most:
        raise InvalidModelError(f"`{path}` unpacks to {size} bytes, more than a state of this run needs", hint=_HINT)


def _of_module(module: Any) -> Iterator[str]:
    if not isinstance(module, dict) or not all(isinstance(x, torch.Tensor) for x in module.values()):
        yield "`module` is no table of tensors"
        return
    for name, tensor in module.items():
        yield from _tensor(tensor, f"module {name!r}")


def _of_optimizer(found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """And of the scheduler."""
    optimizer = found["optimizer"]
    if not isinstance(optimizer, dict) or optimizer.keys() != expected["optimizer"].keys():
        yield "`optimizer` is no state of an optimizer"
        return
    for key, inner in expected["optimizer"].items():
        if key == "state":
            yield from _slots(optimizer[key], inner)
        else:
            yield from _unlike(optimizer[key], inner, f"optimizer {key}")
            if any(one.get("params") != other.get("params") for one, other in zip(optimizer[key], inner, strict=False)):
                yield "its groups are of other parameters"
    if (found["scheduler"] is None) != (expected["scheduler"] is None):
        yield "only one of it and the training model has a scheduler"
    elif expected["scheduler"] is not None:
        yield from _unlike(found["scheduler"], expected["scheduler"], "scheduler")


def _slots(found: Any, expected: Any) -> Iterator[str]:
    """What an optimizer remembers, of each parameter by its number; of some it may remember nothing yet."""
    if not isinstance(found, dict):
        yield "what the optimizer remembers is no table"
        return
    for number, slots in found.items():
        if type(number) is not int or number not in expected:
            yield f"optimizer state {number!r} is of no parameter"
        else:
            yield from _unlike(slots, expected[number], f"optimizer state {number}")
            counts = slots.values() if isinstance(slots, dict) else ()
            if any(isinstance(x, torch.Tensor) and not x.ndim and not 0 <= x <= _LARGEST for x in counts):
                yield f"optimizer state {number} has a count that is none"


def _unlike(found: Any, expected: Any, place: str) -> Iterator[str]:
    """What makes a tree of tensors, numbers and words another one than is expected."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            yield f"{place} is no tensor"
        elif found.dtype != expected.dtype or found.shape != expected.shape:
            yield f"{place} is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
        else:
            yield from _tensor(found, place)
    elif isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            yield f"{place} has other entries"
        else:
            for key, inner in expected.items():
                yield from _unlike(found[key], inner, f"{place} {key}")
    elif isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            yield f"{place} is no list of {len(expected)}"
        else:
            for i, (one, inner) in enumerate(zip(found, expected, strict=True)):
                yield from _unlike(one, inner, f"{place} {i}")
    elif _is_number(expected) and not isinstance(expected, bool):
        if not _is_number(found) or isinstance(found, bool):
            yield f"{place} is no number"
    elif expected is None or isinstance(expected, bool):
        if found is not None and not isinstance(found, bool):
            yield f"{place} is a {type(found).__name__}"
    elif type(found) is not type(expected):
        yield f"{place} is a {type(found).__name__}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST and math.isfinite(value)


def _tensor(tensor: torch.Tensor, place: str) -> Iterator[str]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
        yield f"{place} is no plain tensor"


def write(model: Model, path: Path) -> list[Path]:
    """Write the state to `path`, and beside it the program that makes the run again; both."""
    live, program = to_torch(model), program_beside(path)
    source = write_program(model, live, path.name)
    state = io.BytesIO()
    torch.save(state_of(source, live), state)
    with replacing(path.parent, path) as folder:
        (folder / path.name).write_bytes(state.getvalue())
        (folder / program.name).write_text(source.text, encoding="utf-8")
        try_files(folder / program.name, folder / path.name, live.module, model)
    return [path, program]


def restore(path: Path, like: Model) -> Model:
    """The training model `like` with the state of a file. Nothing in it is executed."""
    run, carried = from_training_model(like), to_torch(like, probe=False)
    names = {id(parameter): name for name, parameter in carried.module.parameters_by_name().items()}
    every = updates_per_step(run)
    before, _, _ = _optimizer(carried, names, every)
    _load(carried, path)
    after, slots, step = _optimizer(carried, names, every)
    problems = Problems(f"the optimizer of `{path}`")
    if before != after:
        problems.add("its settings are others than those of the training model", "set them there: `onward set`")
    problems.refuse()
    weights = carried.module.arrays()
    arrays = {**weights, **{name: array.astype(like.array(name).dtype) for name, array in slots.items()}}
    made = with_state(like, {**arrays, STEP: np.asarray(max(step, run.step), np.int64)}, str(path))
    for name in weights:
        if name.rpartition(".")[2] == COUNTER:
            made.graph.initializers[name].metadata_props[STEP_TAG] = str(step)
    return made


def _optimizer(carried: TorchTraining, names: Mapping[int, str], every: int) -> Any:
    schedule = read_schedule(carried.scheduler, every) if carried.scheduler is not None else None
    return read_optimizer(carried.optimizer, names, schedule)


def _load(carried: TorchTraining, path: Path) -> None:
    """Fill the objects of PyTorch from a file, if it holds the same objects."""
    scheduler = carried.scheduler
    module, optimizer = copy.deepcopy(carried[:2])  # without the hook that clips
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()  # makes all the state that it ever has
    expected = {
        "module": carried.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    state = read_state_file(path, expected)
    carried.module.load_state_dict(state["module"])
    carried.optimizer.load_state_dict(state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
