"""Runs as a state file of PyTorch with a program beside it, and back."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onward.frameworks.files import with_state
from onward.frameworks.program.names import program_beside
from onward.frameworks.torch import TorchTraining, to_torch
from onward.frameworks.torch.optimizers import read_optimizer
from onward.frameworks.torch.schedulers import updates_per_step
from onward.frameworks.torch.schedules import read_scheduler
from onward.frameworks.torch.source import state_of, write_program
from onward.frameworks.torch.source.trial import try_files
from onward.frameworks.torch.state_file import read_state_file
from onward.frameworks.torch.tags import COUNTER
from onward.frameworks.torch.tags import STEP as STEP_TAG
from onward.model import Model
from onward.model.state import STEP
from onward.model.storage.replacement import replacing
from onward.run_state.problems import Problems
from onward.run_state.training_models import from_training_model


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
    schedule = read_scheduler(carried.scheduler, every) if carried.scheduler is not None else None
    return read_optimizer(carried.optimizer, names, schedule)


def _load(carried: TorchTraining, path: Path) -> None:
    """Fill the objects of PyTorch with what a file holds, if they are the same."""
    scheduler = carried.scheduler
    expected = {
        "module": carried.module.state_dict(),
        "optimizer": _with_all_state(carried).state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    state = read_state_file(path, expected)
    carried.module.load_state_dict(state["module"])
    carried.optimizer.load_state_dict(state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])


def _with_all_state(carried: TorchTraining) -> torch.optim.Optimizer:
    """A copy of the optimizer that has made a step: with all that it ever remembers."""
    module, optimizer = copy.deepcopy(carried[:2])  # without the hook that clips
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return optimizer
