"""Folders that hold data in parts, by their names: `train/` and `val/`, or `train.npz` and `val.npz`.

What is called so is not a class. A part is a folder, or files whose names begin with its own: `train-00001.parquet`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from onward.errors import DataError
from onward.training.data.files import files_in

_ROLES = {
    **dict.fromkeys(("train", "training"), "training"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    "test": "test",
}
_NUMBERED = re.compile(r"([a-z]+)([-_.]?\d[\w.-]*)?")


class Parted(NamedTuple):
    """What to train on and to validate with."""

    data: Any
    validation: Any
    notes: tuple[str, ...] = ()
    """What the user should know about that."""


def in_parts(data: Any, validation: Any = None) -> Parted:
    """What to train on and to validate with: the parts of a folder that has such, unless `validation` is given."""
    parts = parts_of(Path(data)) if isinstance(data, str | Path) and data != "" else {}
    if not parts:
        return Parted(data, validation)
    said, used = [f"trains on {_common_name(parts['training'])}"], validation
    if "validation" in parts and validation is None:
        used = _source(parts["validation"])
        said.append(f"validates with {_common_name(parts['validation'])}")
    elif "validation" in parts:
        said.append(f"leaves {_common_name(parts['validation'])} alone, since other data to validate with are named")
    if "test" in parts:
        said.append(f"leaves {_common_name(parts['test'])} for an evaluation")
    return Parted(_source(parts["training"]), used, (f"{data}: {', '.join(said)}",))


def parts_of(folder: Path) -> dict[str, list[Path]]:
    """The parts that a folder holds, by what they are for (`training`, `validation`, `test`); none if it is data."""
    if not os.path.isdir(folder):
        return {}
    inside = files_in(folder)
    places = [path for path in inside if path.is_dir()] or inside
    words: dict[str, list[Path]] = defaultdict(list)
    for path in places:
        words[_word(path)].append(path)
    roles = [role for word in words if (role := _ROLES.get(word)) is not None]
    if len(set(roles)) < 2 and (roles != ["training"] or len(words) > 1 or not places[0].is_dir()):
        return {}  # a class may be called so, or all files
    _refuse_unclear(folder, words, roles)
    return {_ROLES[word]: paths for word, paths in words.items()}


def refuse_parts(folder: Path) -> None:
    """Refuse a folder of parts where one kind of data is wanted."""
    if parts := parts_of(folder):
        listed = " and ".join(map(_common_name, parts.values()))
        raise DataError(f"{folder} holds several sets of data: {listed}", hint=_name_one(parts.values()))


def _refuse_unclear(folder: Path, words: dict[str, list[Path]], roles: list[str]) -> None:
    known = [paths for word, paths in words.items() if word in _ROLES]
    problem = ""
    if "training" not in roles:
        problem = "of which none is to train on"
    elif len(set(roles)) < len(roles):
        problem = "of which two are for the same"
    elif others := [paths for word, paths in words.items() if word not in _ROLES]:
        problem = f"beside {_common_name(others[0])}, so that it is not clear whether these are parts of the data"
    if problem:
        listed = " and ".join(map(_common_name, known))
        raise DataError(f"{folder} holds {listed}, {problem}", hint=_name_one(known))


def _name_one(parts: Any) -> str:
    paths = [str(paths[0]) for paths in parts]
    return f"say which: --data {paths[0]} --validation {paths[-1]}" if len(paths) > 1 else f"say it: {paths[0]}"


def _word(path: Path) -> str:
    """The name of a folder; that of a file without a number and what comes after it."""
    name = path.name.lower()
    if path.is_dir():
        return name
    numbered = _NUMBERED.fullmatch(name.partition(".")[0])
    return numbered[1] if numbered else name


def _common_name(paths: list[Path]) -> str:
    if len(paths) > 1:
        return f"{len(paths)} files `{paths[0].name}` ..."
    return f"`{paths[0].name}{'/' if paths[0].is_dir() else ''}`"


def _source(paths: list[Path]) -> str | list[str]:
    return str(paths[0]) if len(paths) == 1 else [str(path) for path in paths]
