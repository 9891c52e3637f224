"""Checkpoints in trees and folders of PyTorch's files, which most of its frameworks write."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.archive import is_torch_file, read_torch_file, write_torch_file
from onward.checkpoint.pytorch.pickle_objects import Name, Object, parts
from onward.checkpoint.pytorch.state_dicts import (
    LOOPS,
    is_schedule_state,
    name_of_state,
    optimizer_of,
    schedule_of,
    state_of_optimizer,
    up_to_date,
)
from onward.checkpoint.safetensors_files import (
    INDEX,
    MODEL,
    PYTORCH,
    read_json,
    read_model_folder,
    read_safetensors,
    write_json,
    write_safetensors,
)
from onward.errors import InvalidModelError, UnknownNameError, list_names
from onward.model.storage.files import is_plain_name
from onward.run_state.state import OptimizerState, RandomState
from onward.run_state.tensors import Tensor, count_of, is_number

_MOST_NODES = 5_000_000
"""Largest number of nodes: a small pickle can describe an endless tree by repetition."""

_HARMLESS = ("torch", "collections", "numpy", "builtins", "__builtin__")
"""Modules of the data types that all checkpoints name."""
_HARMFUL = ("eval", "exec", "getattr", "setattr", "open", "compile", "__import__", "apply", "execfile", "input")


def executed_names(tree: Any) -> tuple[str, ...]:
    """Return the names that a trusting loader would import and call, without harmless ones."""
    names: set[Name] = set()
    seen: set[int] = set()
    pending = [tree]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        if len(seen) > _MOST_NODES:
            raise InvalidModelError("the checkpoint holds too many objects")
        if isinstance(node, dict | list | tuple | set | frozenset | Object):
            seen.add(id(node))
            pending.extend(parts(node))
        if isinstance(node, Object | Name):
            names.add(node.of if isinstance(node, Object) else node)
    return tuple(sorted(str(name) for name in names if not is_harmless(name)))


def is_harmless(name: Name) -> bool:
    """True for a data type that all checkpoints name."""
    if name.module.startswith(("torch.", "numpy.")):
        return False
    return name.module in _HARMLESS and name.name not in _HARMFUL


def contents_of(trees: Mapping[str, Any] | Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the outermost states in files, by kind (`modules`, `optimizers` and so on) and by name."""
    contents: dict[str, dict[str, Any]] = defaultdict(dict)
    pending: list[tuple[tuple[Any, ...], Any, int]] = [((), trees, _DEEPEST + 1)]
    while pending:
        path, tree, depth = pending.pop()
        name = name_of_state(path, len(trees))
        if (optimizer := state_of_optimizer(tree)) is not None:
            contents["optimizers"][name] = optimizer
        elif is_schedule_state(tree):
            contents["schedules"][name] = tree
        elif (generator := _generator_of(tree)) is not None:
            contents["randomness"][name] = RandomState(generator, tree)
        elif isinstance(tree, Mapping) and tree.keys() >= _SCALER:
            contents["scalers"][name] = tree
        elif isinstance(tree, Mapping) and tree.keys() >= _LOADER:
            contents["data"][name] = tree
        elif is_module(tree) or _is_module_state(tree):
            state = dict(module_entries(tree)) if isinstance(tree, Object) else tree
            contents["averages" if AVERAGED in state or OF_AVERAGES.search(name) else "modules"][name] = state
        elif depth and isinstance(tree, Mapping | list | tuple):
            if len(path) == 1 and (state := _module_beside(tree)):
                contents["modules"][name] = state
            children = list(tree.items() if isinstance(tree, Mapping) else enumerate(tree))
            pending += [((*path, key), child, depth - 1) for key, child in reversed(children)]
    if not contents["modules"]:
        contents["modules"] = contents.pop("averages", {})
    for optimizer in contents.get("optimizers", {}).values():
        _name_parameters(optimizer, contents["modules"].values())
    return contents


def _name_parameters(optimizer: Mapping[str, Any], modules: Iterable[Mapping[str, Any]]) -> None:
    """Name the parameters of a pickled optimizer, which are tensors of a module."""
    for group in optimizer["param_groups"]:
        if any(isinstance(parameter, Tensor) for parameter in group.get("param_names") or ()):
            names = {tensor: name for state in modules for name, tensor in reversed([*state.items()])}
            group["param_names"] = [names.get(parameter, parameter) for parameter in group["param_names"]]


def module_entries(module: Object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of the `state_dict()` of a pickled module."""
    state = module.state
    passing = state.get("_non_persistent_buffers_set") or ()
    for name, tensor in (*state["_parameters"].items(), *mapping(state.get("_buffers")).items()):
        if isinstance(tensor, Tensor) and name not in passing:
            yield f"{prefix}{name}", tensor
    for name, child in state["_modules"].items():
        if is_module(child):
            yield from module_entries(child, f"{prefix}{name}.")


OF_AVERAGES = re.compile(r"(?:^|[._/])(?:ema|avg|averaged?|swa)(?:$|[._/])", re.IGNORECASE)
"""Names of averaged parameters: `state_dict_ema`, `model_ema`, `model_avg`."""
_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval"}
"""Keys of the state of a `GradScaler`."""
_LOADER = {"_num_yielded", "_sampler_iter_yielded"}
"""Keys of the state of a `StatefulDataLoader`."""
AVERAGED = "n_averaged"
"""Key of the state of an `AveragedModel`, beside its module."""
_DEEPEST = 3
"""Largest depth of a part below the top."""


def _is_module_state(tree: Any) -> bool:
    """True for tensors by name."""
    return (
        isinstance(tree, Mapping)
        and any(isinstance(value, Tensor) and _generator_of(value) is None for value in tree.values())
        and all(isinstance(key, str) for key in tree)
        and all(isinstance(value, Tensor | Object | int | float | bytes) for value in tree.values())
    )


def _module_beside(tree: Any) -> dict[str, Tensor]:
    """Return tensors with names of parameters that are beside other states, as torchtitan saves them."""
    items = tree.items() if isinstance(tree, Mapping) else ()
    return {name: value for name, value in items if "." in str(name) and isinstance(value, Tensor)}


def _generator_of(tree: Any) -> str | None:
    """Return the random number generator that a tree is the state of."""
    if isinstance(tree, Tensor) and tree.dtype == np.uint8 and len(tree.shape) == 1:
        return {5056: "torch, CPU", 16: "torch, CUDA"}.get(tree.shape[0])  # by the sizes of their states
    if isinstance(tree, tuple) and len(tree) == 3 and isinstance(tree[1], tuple) and len(tree[1]) == 625:
        return "Python"  # 624 words of a Mersenne Twister, and its position
    if isinstance(tree, tuple) and len(tree) == 5 and tree[0] == "MT19937":
        return "numpy"
    return None


UPDATES = ("global_step", "global_steps", "step", "iteration", "iter")
"""Names of the number of updates in frameworks."""
_COUNTERS = (*UPDATES, "epoch", "max_steps", "num_train_epochs")


def checkpoint_of(path: Path, format: str, title: str, trees: Mapping[str, Any], **facts: Any) -> Checkpoint:
    """Return the checkpoint in trees. `facts` are fields that the format itself reads."""
    contents = contents_of(trees)
    remarks = tuple(facts.pop("remarks", ()))
    modules = [] if "tensors" in facts else [*contents["modules"]]
    if any(OF_AVERAGES.search(name) for name in modules):
        remarks = (*remarks, "its only weights are averaged ones, from which the run continues")
    optimizers = tuple(map(optimizer_of, contents["optimizers"].values()))
    group = next((group.settings for optimizer in optimizers for group in optimizer.groups), {})
    first = {name: next(iter(states.values())) for name, states in contents.items() if states}
    averages = first.get("averages", {})
    fields = {
        "tensors": first.get("modules", {}),
        "optimizers": optimizers,
        "schedules": tuple(schedule_of(state, group) for state in contents["schedules"].values()),
        "randomness": tuple(contents["randomness"].values()),
        "scaler": first.get("scalers", {}),
        "data": first.get("data", {}),
        "averages": {
            name.removeprefix("module."): tensor  # an `AveragedModel` holds its module
            for name, tensor in averages.items()
            if isinstance(tensor, Tensor) and (name.startswith("module.") or AVERAGED not in averages)
        },
        "average_updates": averages_made(averages),
        "executes": executed_names(trees),
        **facts,
    }
    fields["tensors"] = {key: tensor for key, tensor in fields["tensors"].items() if isinstance(tensor, Tensor)}
    step = step_of(fields.get("progress", {}), fields["optimizers"])
    positions = {schedule.position for schedule in fields["schedules"]}
    if step is not None and positions == {step + 1} and all(optimizer.count is None for optimizer in optimizers):
        remarks = (*remarks, f"its last iteration is {step}, counted from 0: {step + 1} updates were made")
        step += 1
    return Checkpoint(path=path, format=format, title=title, trees=trees, step=step, remarks=remarks, **fields)


def states_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the modules in a checkpoint, that of its tensors first; empty for one module."""
    modules = modules_of(checkpoint)
    is_own = checkpoint.tensors.keys().__eq__
    own = [checkpoint.module] if checkpoint.module else [name for name in modules if is_own(modules[name].keys())]
    return [*own[:1], *(name for name in modules if name != own[0])] if own else []


def modules_of(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """Return the modules of a checkpoint by name: several state dicts, or else the parts of a single one."""
    states = {
        name: {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for name, state in contents_of(checkpoint.trees)["modules"].items()
    }
    own = checkpoint.tensors.keys()
    if len(states) > 1 and (checkpoint.module in states or any(own == state.keys() for state in states.values())):
        return states
    tensors = {**next(iter(states.values()), {}), **checkpoint.tensors}
    words = {name: name.split(".") for name in tensors}
    alike = itertools.takewhile(lambda row: len({*row}) == 1, zip(*words.values(), strict=False))
    common = sum(1 for _ in alike)  # such as `module.` of all
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        modules[words[name][min(common, len(words[name]) - 1)]][name] = tensor
    return modules


def of_module(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Return a checkpoint with the tensors of one of its modules."""
    modules = modules_of(checkpoint)
    if name not in modules:
        raise UnknownNameError(
            f"`{checkpoint.path}` has no module `{name}`",
            hint=f"use one of {list_names([*modules], 8)}; a class of yours is `package.module:Class`",
        )
    return dataclasses.replace(checkpoint, tensors=modules[name], module=name)


def is_module(tree: Any) -> bool:
    """True for a pickled module."""
    if not isinstance(tree, Object) or not isinstance(tree.state, Mapping):
        return False
    return all(isinstance(tree.state.get(name), Mapping) for name in ("_parameters", "_modules"))


def averages_made(state: Mapping[str, Any]) -> int | None:
    """Return the number of updates of averages that an `AveragedModel` counted."""
    count = state.get(AVERAGED)
    return count_of(count) if is_number(count) else None


def step_of(progress: Mapping[str, Any], optimizers: Sequence[OptimizerState]) -> int | None:
    """Return the updates made, as the training loop or else the optimizer counts them.

    Steps of a scheduler do not count: loops call it after each update, or after each epoch.
    """
    for name in UPDATES:
        if isinstance(progress.get(name), int):
            return int(progress[name])
    return max((optimizer.count for optimizer in optimizers if optimizer.count is not None), default=None)


def progress_of(tree: Any) -> dict[str, Any]:
    """Return the counters of a training loop in a tree."""
    states = [mapping(tree), *(mapping(mapping(tree).get(key)) for key in LOOPS)]
    counters = ({n: state[n] for n in _COUNTERS if isinstance(state.get(n), int | float)} for state in states)
    return next(filter(None, counters), {})


def mapping(tree: Any) -> Mapping[str, Any]:
    """Return a tree if it is a mapping, else an empty one."""
    return tree if isinstance(tree, Mapping) else {}


ADAPTER = "adapter_model.safetensors"
"""File of PEFT."""
ENDINGS = (".pt", ".pth", ".bin", ".pkl", ".state", ".th", ".tar")


def has(*names: str) -> Callable[[Path], bool]:
    """Return a predicate: True for a folder with one of these files."""
    return lambda folder: folder.is_dir() and any((folder / name).is_file() for name in names)


def torch_files(folder: Path) -> dict[str, Any]:
    """Return the trees of PyTorch's files in a folder."""
    files = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS and is_torch_file(path))
    return {path.name: read_torch_file(path) for path in files}


def model_files(folder: Path) -> dict[str, Any]:
    """Return the tensors of models in a folder by file; those of an index as one file."""
    if (folder / INDEX).exists():
        return {MODEL: read_model_folder(folder)}
    return {path.name: read_safetensors(path) for path in sorted(folder.glob("*.safetensors"))}


def write_again(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the files that a checkpoint was read from, with current numbers, and copy its other files."""
    writers: dict[str, Callable[[Path, Any], None]] = {
        ".json": write_json,
        ".safetensors": functools.partial(write_safetensors, metadata=PYTORCH),
    }
    for name, tree in up_to_date(checkpoint.trees, checkpoint).items():
        (folder / name).parent.mkdir(exist_ok=True)
        writers.get(Path(name).suffix, write_torch_file)(folder / name, tree)
    copy_files(checkpoint, folder)


def copy_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy other files of a checkpoint, such as those of a tokenizer, that still exist."""
    for name in checkpoint.files:
        parts = name.split("/")
        if len(parts) < 3 and all(map(is_plain_name, parts)) and (source := checkpoint.path / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, folder / name)


def hugging_face_folder(folder: Path, format: str, title: str, trees: Mapping[str, Any], **facts: Any) -> Checkpoint:
    """Return a model in safetensors, its configuration, and PyTorch's files beside it."""
    if (folder / INDEX).exists() or (folder / "model.safetensors").exists():
        facts["tensors"] = read_model_folder(folder)
        if further := sorted(folder.glob("model_[0-9]*.safetensors")):  # Accelerate has a file for each model
            models = {MODEL: facts.pop("tensors"), **{path.name: read_safetensors(path) for path in further}}
            trees = {**models, **trees}
    for name in (ADAPTER,) if (folder / ADAPTER).is_file() and "tensors" not in facts else ():
        trees = {name: read_safetensors(folder / name), **trees}
    has_model = "tensors" in facts or bool(contents_of(trees)["modules"])
    facts.setdefault("keeps_order", "tensors" not in facts and has_model and ADAPTER not in trees)
    inside = () if has_model else ("", *(path.name for path in sorted(folder.iterdir()) if path.is_dir()))
    for name in inside:  # files with names of their own, and folders of models
        tensors = model_files(folder / name)
        trees = {**{f"{name}/{file}".lstrip("/"): state for file, state in tensors.items()}, **trees}
        if name and tensors:
            beside = sorted({path.name for path in (folder / name).iterdir()} - {*tensors, INDEX})
            facts["files"] = [*facts.get("files", ()), *(f"{name}/{file}" for file in beside)]
    if (folder / "config.json").exists():
        facts["configuration"] = read_json(folder / "config.json")
        trees = {**trees, "config.json": facts["configuration"]}
    read_files = {*trees, INDEX}
    others = facts.pop("files", [])  # neither tensors of the model, nor a training model that was written beside them
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in read_files):
        is_stored = path.suffix == ".data" and path.with_suffix(".onnx").exists()
        if path.suffix not in (".safetensors", ".onnx") and not is_stored:
            others.append(path.name)
    return checkpoint_of(folder, format, title, trees, files=tuple(others), **facts)
