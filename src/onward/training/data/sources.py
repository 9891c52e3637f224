"""Opening data, whatever they are."""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onward.errors import DataError, needing_memory
from onward.training.data.array_files import open_npy, open_npz, open_safetensors
from onward.training.data.dataset import Columns, Dataset, Rows, check_names, known_columns, to_array
from onward.training.data.files import check_file, files_in
from onward.training.data.images import SUFFIXES, ImageFolder, ImageFormat, format_for
from onward.training.data.objects import HubDataset, HubStream, RayStream, Samples, Stream, is_frame, is_ray, open_frame
from onward.training.data.views import Beside, concatenate

_FILES = ".npz, .npy, .csv, .tsv, .parquet, .arrow, .feather, .safetensors, or a folder of images or of such files"


class _How(NamedTuple):
    images: ImageFormat
    window: int | None


@needing_memory("read the data")
def open_data(
    source: Any,
    *,
    inputs: Mapping[str, Any] | None = None,
    images: ImageFormat | None = None,
    window: int | None = None,
) -> Dataset | Stream:
    """Open data to train on.

    - A path: `.npz`, `.npy`, `.csv`, `.tsv`, `.parquet`, `.arrow`, `.feather`, `.safetensors`; a folder with a
      sub-folder of images per class; a folder that Hugging Face `datasets` saved; a folder of files of one kind.
      A folder of parts, `train/` and `val/`, is for `in_parts`.
    - A pattern, such as `tokens/*.parquet`: all files that match, in the order of their names.
    - Several paths of one kind are read one after the other; with names (`{"image": "x.npy", "label": "y.npy"}`, or
      strings `image=x.npy`) they are columns side by side. `image=mnist.npz:x_train` takes one array of a file.
    - A dict or a tuple of arrays; a data frame of pandas; a list of samples, or anything with a length and samples by
      number.
    - An iterable of batches (dicts or tuples of arrays), a function that makes one, a torch DataLoader, an
      `IterableDataset` of `datasets`, a data set of Ray Data or a part of one: a stream.

    `inputs` of the model tell what images are decoded to, unless `images` does; `window` is that of `Batches`, for
    formats that can be read either way.
    """
    wanted = _How(images or (format_for(inputs) if inputs else ImageFormat()), window)
    if isinstance(source, str | Path):
        return _open_paths([source], wanted)
    if isinstance(source, bytes | bytearray):
        raise DataError("cannot train on bytes", hint=f"use {_FILES}")
    if is_frame(source):
        return open_frame(source)
    if isinstance(source, Dataset | Stream):
        return source
    if isinstance(source, Mapping):
        return _open_mapping(source, wanted)
    if hasattr(source, "with_format"):
        return HubDataset(source) if _has_length(source) else HubStream(source)
    if is_ray(source):
        return RayStream(source)
    if isinstance(source, list) and source and all(isinstance(item, str | Path) for item in source):
        return _open_paths(source, wanted)
    if isinstance(source, tuple) or hasattr(source, "__array__"):
        return _arrays(source if isinstance(source, tuple) else (source,))
    if _has_length(source):
        if isinstance(source, list) and source and isinstance(source[0], np.ndarray):
            hint = "for columns use a tuple or a dict of arrays; for samples a list of dicts or tuples"
            raise DataError("a list of arrays could be columns or samples", hint=hint)
        return Samples(source)
    if isinstance(source, Iterable) or callable(source):
        return Stream(source)
    raise DataError(f"cannot train on an object of type `{type(source).__name__}`", hint=f"use {_FILES}")


def files_of(source: Any) -> list[Path]:
    """Return the files that a path of data leads to, in their order; nothing for data that are objects."""
    if isinstance(source, Mapping):
        source = list(source.values())
    paths = source if isinstance(source, list | tuple) else [source]
    if not all(isinstance(path, str | Path) for path in paths):
        return []
    files = []
    for path in map(str, paths):
        named = path if _name_of(path) is None else path.partition("=")[2]
        if not os.path.exists(named) and ":" in named and not glob.has_magic(named):
            named = named.rpartition(":")[0]
        for one in _find(named):
            files += sorted(file for file in one.rglob("*") if file.is_file()) if one.is_dir() else [one]
    return files


# ---- objects ---------------------------------------------------------------------------------------------------------


def _has_length(source: Any) -> bool:
    """Whether an object has samples by number; a DataLoader has a length, but no numbers."""
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _open_mapping(source: Mapping[Any, Any], how: _How) -> Dataset:
    check_names(map(str, source), "the data")
    if source and all(isinstance(value, str | Path) for value in source.values()):
        return Beside({str(name): _named_column(str(name), str(path), how) for name, path in source.items()})
    if any(hasattr(value, "with_format") for value in source.values()):
        listed = ", ".join(f"`{name}`" for name in source)
        raise DataError(f"this holds several data sets: {listed}", hint="give one of them")
    return _arrays({str(name): value for name, value in source.items()})


def _arrays(arrays: tuple[Any, ...] | Mapping[str, Any]) -> Columns:
    named = arrays if isinstance(arrays, Mapping) else {str(at): value for at, value in enumerate(arrays)}
    found: dict[str, Rows] = {name: to_array(value, name) for name, value in named.items()}
    return Columns(found)


# ---- files -----------------------------------------------------------------------------------------------------------


def _open_paths(paths: Sequence[str | Path], how: _How) -> Dataset:
    if "" in paths:
        raise DataError("the path of the data is empty", hint=f"use {_FILES}")
    names = [_name_of(path) for path in paths]
    if all(name is None for name in names):
        return _open_files([file for path in paths for file in _find(path)], how, f"{len(paths)} files")
    if None in names:
        raise DataError(
            "some paths have a name and some have none", hint="image=x.npy label=y.npy, or none with a name"
        )
    return Beside(
        {
            name: _named_column(name, str(path).partition("=")[2], how)
            for name, path in zip(names, paths, strict=True)
            if name
        }
    )


def _name_of(path: str | Path) -> str | None:
    """The name in `name=path`, unless the whole is a path."""
    found = re.match(r"([^=/\\]+)=", str(path))
    return found[1] if found and not os.path.exists(path) else None


def _named_column(name: str, path: str, how: _How) -> tuple[Dataset, str]:
    """A data set, and the column of it that `path` or `path:column` means."""
    if os.path.exists(path) or ":" not in path:
        data = _open_files(_find(path), how, path)
        if len(data.columns) == 1:
            return data, next(iter(data.columns))
        column = name
    else:
        path, _, column = path.rpartition(":")
        data = _open_files(_find(path), how, path, only=column)
    known_columns([column], data.columns, path)
    return data, column


def _find(path: str | Path) -> list[Path]:
    """What a path means: itself, or all that match a pattern, by name."""
    if os.path.exists(path) or not glob.has_magic(str(path)):
        return [Path(path)]
    found = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not found:
        folder = Path(path).parent
        near = [one.name for one in files_in(folder)[:3]] if folder.is_dir() else []
        hint = f"{folder} holds {', '.join(near)} ..." if near else "patterns are relative to the current folder"
        raise DataError(f"no file matches `{path}`", hint=hint)
    return found


def _open_files(paths: Sequence[Path], how: _How, origin: str, only: str | None = None) -> Dataset:
    """Files or folders of one kind, one after the other."""
    for path in paths:
        _check_there(path)
    kinds = sorted({"a folder" if path.is_dir() else path.suffix.lower() for path in paths})
    if len(kinds) > 1:
        raise DataError(f"{origin}: files of different kinds ({', '.join(kinds)})", hint="name the ones that are meant")
    if kinds[0] in (".parquet", ".pq"):
        from onward.training.data.parquet import open_parquet

        return open_parquet(paths, how.images, how.window)
    name = re.sub(r"[-_.]?\d+$", "", paths[0].stem) if len(paths) > 1 else None
    return concatenate([_open_path(path, how, only, name) for path in paths], origin)


def _check_there(path: Path) -> None:
    if not os.path.exists(path):  # which is no error, however strange the path is
        raise DataError(f"there is no {path}", hint="check the path; it is relative to the current folder")
    if not path.is_dir() and not check_file(path):
        raise DataError(f"{path} is empty")


def _open_path(path: Path, how: _How, only: str | None = None, name: str | None = None) -> Dataset:
    """A file or folder; `only` one column is used of it, so that others do not matter where they can be left out.

    A column that has no name but the file's is called `name`.
    """
    if path.is_dir():
        return _open_folder(path, how)
    match path.suffix.lower():
        case ".npz":
            return open_npz(path, only)
        case ".npy":
            return open_npy(path, name)
        case ".csv" | ".tsv":
            from onward.training.data.csv_file import open_csv

            return open_csv(path)
        case ".arrow" | ".feather" | ".ipc":
            from onward.training.data.arrow import open_arrow

            return open_arrow(path, how.images)
        case ".safetensors":
            return open_safetensors(path, only)
        case suffix:
            raise DataError(f"{path} is of no kind that can be read (`{suffix}`)", hint=f"use {_FILES}")


def _open_folder(folder: Path, how: _How) -> Dataset:
    refuse_parts(folder)
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        from onward.training.data.arrow import open_saved

        return open_saved(folder, how.images)
    inside = files_in(folder)
    files = [path for path in inside if not path.is_dir()]
    if any(path.is_dir() for path in inside):
        return ImageFolder(folder, how.images)
    if any(path.suffix.lower() in SUFFIXES for path in files):
        raise DataError(f"the images in {folder} have no classes", hint="put them into a sub-folder per class")
    if not files:
        raise DataError(f"{folder} is empty", hint=f"use {_FILES}")
    return _open_files(files, how, str(folder))


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


# ---- folders that hold data in parts ---------------------------------------------------------------------------------
# `train/` and `val/`, or `train.npz` and `val.npz`: what is called so is not a class. A part is a folder, or files
# whose names begin with its own: `train-00001.parquet`.


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
