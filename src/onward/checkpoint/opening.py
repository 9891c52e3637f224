"""Opening a checkpoint: what it is, by what is in it, and what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onward.arguments import checked
from onward.checkpoint.archive import is_torch_file, read_torch_file
from onward.checkpoint.contents import contents_of, executed_names
from onward.checkpoint.dcp import METADATA, read_dcp
from onward.checkpoint.description import Checkpoint
from onward.checkpoint.objects import Object
from onward.checkpoint.optimizers import optimizer_of
from onward.checkpoint.safetensors_files import INDEX, read_json, read_model_folder, read_safetensors
from onward.checkpoint.tensors import Tensor
from onward.errors import InvalidModelError, UnsupportedError

_COUNTERS = ("global_step", "step", "iteration", "epoch", "max_steps", "num_train_epochs")


@checked()
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Look at a checkpoint of another framework: a file or a folder. Nothing in it is executed.

    PyTorch's files, Lightning's among them, `.safetensors`, and folders of Hugging Face's Trainer and Accelerate and of
    PyTorch's distributed checkpoints, as FSDP writes. Tensors stay where they are until their elements are asked for.
    """
    place = Path(path)
    if not place.exists():
        raise InvalidModelError(f"there is no `{place}`")
    for matches, read in _FOLDERS if place.is_dir() else _FILES:
        if matches(place):
            return read(place)
    inside = sorted(each.name for each in place.iterdir() if is_checkpoint(each)) if place.is_dir() else []
    raise UnsupportedError(
        f"`{place}` is of no format that is known",
        hint=f"there is one in it: `{place / inside[-1]}`" if inside else "give what a framework has saved",
    )


def is_checkpoint(path: Path) -> bool:
    """Whether something looks as if it could be opened."""
    return any(matches(path) for matches, _ in (_FOLDERS if path.is_dir() else _FILES))


# ---- files -----------------------------------------------------------------------------------------------------------


def _torch(path: Path) -> Checkpoint:
    tree = read_torch_file(path)
    if isinstance(tree, Mapping) and "pytorch-lightning_version" in tree:
        return _lightning(path, tree)
    return _of_trees(path, "PyTorch", {path.name: tree}, progress=_progress(tree))


def _lightning(path: Path, tree: Mapping[str, Any]) -> Checkpoint:
    averaged = "current_model_state" in tree
    remarks = []
    if averaged:
        remarks.append("`state_dict` holds averaged weights; those that are trained are `current_model_state`")
    if "loops" not in tree:
        remarks.append("it does not say how far the loops are: Lightning would begin to count again")
    given = tree.get("hyper_parameters")
    return _of_trees(
        path,
        f"Lightning {tree['pytorch-lightning_version']}",
        {path.name: tree},
        tensors=_mapping(tree.get("current_model_state" if averaged else "state_dict")),
        progress=_progress(tree),
        arguments=_mapping(given.state if isinstance(given, Object) else given),
        remarks=tuple(remarks),
    )


def _safetensors(path: Path) -> Checkpoint:
    return Checkpoint(path, "safetensors", read_safetensors(path))


# ---- folders ---------------------------------------------------------------------------------------------------------


def _trainer(folder: Path) -> Checkpoint:
    """Of the Trainer of transformers."""
    state = read_json(folder / "trainer_state.json")
    trees = _torch_files(folder)
    arguments = trees.get("training_args.bin")
    remarks = []
    if not arguments and any("lr_lambdas" in each for each in contents_of(trees.get("scheduler.pt")).schedules):
        remarks.append(
            "its schedule is a function, which is not stored, and `training_args.bin`, which names it, is missing"
        )
    return _folder(
        folder,
        "Hugging Face Trainer",
        trees,
        progress={name: state[name] for name in _COUNTERS if name in state},
        arguments=_mapping(arguments.state if isinstance(arguments, Object) else None),
        remarks=tuple(remarks),
    )


def _accelerate(folder: Path) -> Checkpoint:
    trees = _torch_files(folder)
    states = [_progress(tree) for name, tree in trees.items() if name.startswith("random_states")]
    return _folder(folder, "Accelerate", trees, progress=states[0] if states else {})


def _model(folder: Path) -> Checkpoint:
    return _folder(folder, "Hugging Face model", {})


def _folder(folder: Path, name: str, trees: Mapping[str, Any], **facts: Any) -> Checkpoint:
    """What folders of Hugging Face have in common: a model in safetensors, and files of PyTorch beside it."""
    if (folder / INDEX).exists() or (folder / "model.safetensors").exists():
        facts["tensors"] = read_model_folder(folder)
    configuration = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    return _of_trees(folder, name, trees, configuration=configuration, **facts)


def _torch_files(folder: Path) -> dict[str, Any]:
    endings = (".pt", ".pth", ".bin", ".pkl")
    files = sorted(path for path in folder.iterdir() if path.suffix in endings and is_torch_file(path))
    return {path.name: read_torch_file(path) for path in files}


def _dcp(folder: Path) -> Checkpoint:
    tree = read_dcp(folder)
    return _of_trees(folder, "PyTorch, distributed", {METADATA: tree}, progress=_progress(tree))


# ---- both ------------------------------------------------------------------------------------------------------------


def _of_trees(
    path: Path, name: str, trees: Mapping[str, Any], *, tensors: Mapping[str, Any] | None = None, **facts: Any
) -> Checkpoint:
    """What is in trees, but for what is known of them already."""
    found = contents_of(*trees.values())
    if tensors is None:
        tensors = found.modules[0] if found.modules else {}
        if len(found.modules) > 1:
            facts["remarks"] = (*facts.get("remarks", ()), f"{len(found.modules)} modules are in it; this is the first")
    return Checkpoint(
        path,
        name,
        {key: tensor for key, tensor in tensors.items() if isinstance(tensor, Tensor)},
        tuple(map(optimizer_of, found.optimizers)),
        tuple(found.schedules),
        randomness=tuple(dict.fromkeys(found.randomness)),
        trees=trees,
        executes=executed_names(trees),
        **facts,
    )


def _progress(tree: Any) -> dict[str, Any]:
    counters = tree if isinstance(tree, Mapping) else {}
    return {name: counters[name] for name in _COUNTERS if isinstance(counters.get(name), int | float)}


def _mapping(tree: Any) -> Mapping[str, Any]:
    return tree if isinstance(tree, Mapping) else {}


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda folder: any((folder / name).is_file() for name in names)


Reader = Callable[[Path], Checkpoint]
_FILES: tuple[tuple[Callable[[Path], bool], Reader], ...] = (
    (lambda path: path.suffix == ".safetensors", _safetensors),
    (is_torch_file, _torch),
)
_FOLDERS: tuple[tuple[Callable[[Path], bool], Reader], ...] = (
    (_has(METADATA), _dcp),
    (_has("trainer_state.json"), _trainer),
    (lambda folder: any(folder.glob("random_states_*.pkl")), _accelerate),
    (_has(INDEX, "model.safetensors"), _model),
)
"""Of what a folder has to have, and what reads it."""
