"""Checkpoints of Lightning: a file of `torch.save` with the state of its loops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.archive import is_torch_file, read_torch_file
from onward.checkpoint.description import Checkpoint
from onward.checkpoint.format import Format
from onward.checkpoint.objects import Object
from onward.checkpoint.trees import checkpoint_of, mapping, progress_of
from onward.errors import Error

_VERSION = "pytorch-lightning_version"


def matches(path: Path) -> bool:
    if not is_torch_file(path):
        return False
    try:
        tree = read_torch_file(path)
    except Error:  # whoever reads the file as one of PyTorch says what is wrong
        return False
    return isinstance(tree, Mapping) and _VERSION in tree


def read(path: Path) -> Checkpoint:
    tree: Mapping[str, Any] = read_torch_file(path)
    averaged = "current_model_state" in tree
    remarks = []
    if averaged:
        remarks.append("`state_dict` holds averaged weights; those that are trained are `current_model_state`")
    if "loops" not in tree:
        remarks.append("it does not say how far the loops are: Lightning would begin to count again")
    given = tree.get("hyper_parameters")
    return checkpoint_of(
        path,
        FORMAT.name,
        f"Lightning {tree[_VERSION]}",
        {path.name: tree},
        tensors=mapping(tree.get("current_model_state" if averaged else "state_dict")),
        averages=mapping(tree.get("state_dict")) if averaged else {},
        progress=progress_of(tree),
        arguments=mapping(given.state if isinstance(given, Object) else given),
        remarks=remarks,
    )


FORMAT = Format("lightning", "Lightning", matches, read, is_folder=False, ending=".ckpt")
