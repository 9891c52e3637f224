"""Opening of training data: files, folders, arrays, data frames, datasets and streams."""

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
from onward.training.data.dataset import Columns, Dataset, Rows, check_names, to_array
from onward.training.data.files import check_file, files_in
from onward.training.data.images import SUFFIXES, ImageFormat, format_for, images_below, images_by_class
from onward.training.data.objects import HubDataset, HubStream, RayStream, Samples, Stream, is_frame, is_ray, open_frame
from onward.training.data.views import JoinedColumns, concatenate

_FILES = ".npz, .npy, .csv, .tsv, .parquet, .arrow, .feather, .safetensors, or a folder of images or of such files"


class _Format(NamedTuple):
    images: ImageFormat
    window: int | None
    labeled: bool = True


@needing_memory("read the data")
def open_data(
    source: Any,
    *,
    inputs: Mapping[str, Any] | None = None,
    images: ImageFormat | None = None,
    window: int | None = None,
    labeled: bool = True,
) -> Dataset | Stream:
    """Open training data, or data without labels unless `labeled`: then, images need no classes.

    - A path: `.npz`, `.npy`, `.csv`, `.tsv`, `.parquet`, `.arrow`, `.feather`, `.safetensors`; a
      folder with a subfolder of images per class; a folder that Hugging Face `datasets` saved; a
      folder of files of one format. A folder with `train/` and `val/` is for `in_parts`.
    - A pattern, such as `tokens/*.parquet`: all matching files, sorted by name.
    - Several paths of one format are concatenated; with names (`{"image": "x.npy", "label":
      "y.npy"}`, or strings `image=x.npy`) they are columns. `image=mnist.npz:x_train` takes one
      array of a file.
    - A dict or a tuple of arrays; a pandas data frame; a list of samples, or any object with a
      length and samples by index.
    - An iterable of batches (dicts or tuples of arrays), a function that returns one, a torch
      DataLoader, an `IterableDataset` of `datasets`, a Ray dataset or a shard of one: a stream.

    `inputs` of the model determine the format of images, unless `images` does. `window` is that of
    `Batches`, for formats that can be read either way.
    """
    data_format = _Format(images or (format_for(inputs) if inputs else ImageFormat()), window, labeled)
    if isinstance(source, str | Path):
        return _open_paths([source], data_format)
    if isinstance(source, bytes | bytearray):
        raise DataError("cannot train on bytes", hint=f"use {_FILES}")
    if is_frame(source):
        return open_frame(source)
    if isinstance(source, Dataset | Stream):
        return source
    if isinstance(source, Mapping):
        return _open_mapping(source, data_format)
    if hasattr(source, "with_format"):
        return HubDataset(source) if _has_length(source) else HubStream(source)
    if is_ray(source):
        return RayStream(source)
    if isinstance(source, list) and source and all(isinstance(item, str | Path) for item in source):
        return _open_paths(source, data_format)
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
    """Return the files of a data argument, in order; an empty list for Python objects."""
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
        for match in _find(named):
            files += sorted(file for file in match.rglob("*") if file.is_file()) if match.is_dir() else [match]
    return files


# ---- objects ---------------------------------------------------------------------------------------------------------


def _has_length(source: Any) -> bool:
    """True if an object has samples by index. A DataLoader has a length, but no samples by index."""
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _open_mapping(source: Mapping[Any, Any], data_format: _Format) -> Dataset:
    check_names(map(str, source), "the data")
    if source and all(isinstance(value, str | Path) for value in source.values()):
        return JoinedColumns(
            {str(name): _named_column(str(name), str(path), data_format) for name, path in source.items()}
        )
    if any(hasattr(value, "with_format") for value in source.values()):
        listed = ", ".join(f"`{name}`" for name in source)
        raise DataError(f"the mapping holds several datasets: {listed}", hint="pass one of them")
    return _arrays({str(name): value for name, value in source.items()})


def _arrays(arrays: tuple[Any, ...] | Mapping[str, Any]) -> Columns:
    named = arrays if isinstance(arrays, Mapping) else {str(index): value for index, value in enumerate(arrays)}
    columns: dict[str, Rows] = {name: to_array(value, name) for name, value in named.items()}
    return Columns(columns)


# ---- files -----------------------------------------------------------------------------------------------------------


def _open_paths(paths: Sequence[str | Path], data_format: _Format) -> Dataset:
    if "" in paths:
        raise DataError("the path of the data is empty", hint=f"use {_FILES}")
    names = [_name_of(path) for path in paths]
    if all(name is None for name in names):
        return _open_files([file for path in paths for file in _find(path)], data_format, f"{len(paths)} files")
    if None in names:
        raise DataError(
            "some paths have a column name and some do not", hint="name all of them: image=x.npy label=y.npy"
        )
    return JoinedColumns(
        {
            name: _named_column(name, str(path).partition("=")[2], data_format)
            for name, path in zip(names, paths, strict=True)
            if name
        }
    )


def _name_of(path: str | Path) -> str | None:
    """Return the name in `name=path`, unless the whole is a path."""
    match = re.match(r"([^=/\\]+)=", str(path))
    return match[1] if match and not os.path.exists(path) else None


def _named_column(name: str, path: str, data_format: _Format) -> tuple[Dataset, str]:
    """Return the dataset and the column of `path` or `path:column`."""
    if os.path.exists(path) or ":" not in path:
        data = _open_files(_find(path), data_format, path)
        if len(data.columns) == 1:
            return data, next(iter(data.columns))
        column = name
    else:
        path, _, column = path.rpartition(":")
        data = _open_files(_find(path), data_format, path, only=column)
    data.check_column(column, path)
    return data, column


def _find(path: str | Path) -> list[Path]:
    """Return the path, or the files that match a pattern, sorted by name."""
    if os.path.exists(path) or not glob.has_magic(str(path)):
        return [Path(path)]
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not matches:
        folder = Path(path).parent
        names = [entry.name for entry in files_in(folder)[:3]] if folder.is_dir() else []
        hint = f"{folder} holds {', '.join(names)} ..." if names else "patterns are relative to the current folder"
        raise DataError(f"no file matches `{path}`", hint=hint)
    return matches


def _open_files(paths: Sequence[Path], data_format: _Format, origin: str, only: str | None = None) -> Dataset:
    """Open files or folders of one format, one after the other."""
    for path in paths:
        if not os.path.exists(path):  # unlike Path.exists, this never raises for a malformed path
            raise DataError(f"`{path}` does not exist", hint="check the path; it is relative to the current folder")
        if not path.is_dir() and not check_file(path):
            raise DataError(f"{path} is empty")
    if not data_format.labeled and all(_is_image(path) for path in paths):
        return images_below(paths, data_format.images)
    suffixes = sorted({"a folder" if path.is_dir() else path.suffix.lower() for path in paths})
    if len(suffixes) > 1:
        raise DataError(
            f"{origin}: files of different formats ({', '.join(suffixes)})", hint="pass files of one format"
        )
    if suffixes[0] in (".parquet", ".pq"):
        from onward.training.data.parquet import open_parquet

        return open_parquet(paths, data_format.images, data_format.window)
    name = re.sub(r"[-_.]?\d+$", "", paths[0].stem) if len(paths) > 1 else None
    return concatenate([_open_path(path, data_format, only, name) for path in paths], origin)


def _open_path(path: Path, data_format: _Format, only: str | None = None, name: str | None = None) -> Dataset:
    """Open a file or folder. Files with many columns may read `only` one.

    `name` replaces the file name as the name of an unnamed column.
    """
    if path.is_dir():
        return _open_folder(path, data_format)
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

            return open_arrow(path, data_format.images)
        case ".safetensors":
            return open_safetensors(path, only)
        case suffix if suffix in SUFFIXES:
            raise _without_classes(f"the image {path} has")
        case suffix:
            raise DataError(f"cannot read the format of {path} (`{suffix}`)", hint=f"use {_FILES}")


def _open_folder(folder: Path, data_format: _Format) -> Dataset:
    refuse_parts(folder)
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        from onward.training.data.arrow import open_saved

        return open_saved(folder, data_format.images)
    inside = files_in(folder)
    files = [path for path in inside if not path.is_dir()]
    if any(path.is_dir() for path in inside):
        return images_by_class(folder, data_format.images)
    if any(path.suffix.lower() in SUFFIXES for path in files):
        raise _without_classes(f"the images in {folder} have")
    if not files:
        raise DataError(f"{folder} is empty", hint=f"use {_FILES}")
    return _open_files(files, data_format, str(folder))


def _is_image(path: Path) -> bool:
    """True for an image, and for a folder that holds images, also in subfolders; not for one of parts."""
    if not path.is_dir():
        return path.suffix.lower() in SUFFIXES
    refuse_parts(path)
    is_saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
    return not is_saved and any(p.is_dir() or p.suffix.lower() in SUFFIXES for p in files_in(path))


def _without_classes(images: str) -> DataError:
    hint = "put them into a subfolder per class; `onward predict` needs no classes"
    return DataError(f"{images} no classes", hint=hint)


_ROLES = {
    **dict.fromkeys(("train", "training"), "training"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    "test": "test",
}
_NUMBERED = re.compile(r"([a-z]+)([-_.]?\d[\w.-]*)?")


# ---- folders with training and validation data -----------------------------------------------------------------------
# `train/` and `val/`, or `train.npz` and `val.npz`: such names are not classes. A part is a folder, or files whose
# names begin with its name: `train-00001.parquet`.


def in_parts(data: Any, validation: Any = None) -> tuple[Any, Any, list[str]]:
    """Return training data, validation data and notes: the parts of a folder, or the arguments."""
    parts = parts_of(Path(data)) if isinstance(data, str | Path) and data != "" else {}
    if not parts:
        return data, validation, []
    actions, validation_source = [f"trains on {_common_name(parts['training'])}"], validation
    if "validation" in parts and validation is None:
        validation_source = _source(parts["validation"])
        actions.append(f"validates with {_common_name(parts['validation'])}")
    elif "validation" in parts:
        actions.append(f"ignores {_common_name(parts['validation'])}, since other validation data are given")
    if "test" in parts:
        actions.append(f"leaves {_common_name(parts['test'])} for an evaluation")
    return _source(parts["training"]), validation_source, [f"{data}: {', '.join(actions)}"]


def parts_of(folder: Path) -> dict[str, list[Path]]:
    """Return the parts of a folder by purpose (`training`, `validation`, `test`), if it has any."""
    if not os.path.isdir(folder):
        return {}
    inside = files_in(folder)
    entries = [path for path in inside if path.is_dir()] or inside
    words: dict[str, list[Path]] = defaultdict(list)
    for path in entries:
        words[_word(path)].append(path)
    roles = [role for word in words if (role := _ROLES.get(word)) is not None]
    if len(set(roles)) < 2 and (roles != ["training"] or len(words) > 1 or not entries[0].is_dir()):
        return {}  # a class, or all files, may have such a name
    _refuse_unclear(folder, words, roles)
    return {_ROLES[word]: paths for word, paths in words.items()}


def refuse_parts(folder: Path) -> None:
    """Refuse a folder of parts where one dataset is needed."""
    if parts := parts_of(folder):
        listed = " and ".join(map(_common_name, parts.values()))
        raise DataError(f"{folder} holds several datasets: {listed}", hint=_name_one(parts.values()))


def _refuse_unclear(folder: Path, words: dict[str, list[Path]], roles: list[str]) -> None:
    parts = [paths for word, paths in words.items() if word in _ROLES]
    problem = ""
    if "training" not in roles:
        problem = "none of them for training"
    elif len(set(roles)) < len(roles):
        problem = "two of them for the same purpose"
    elif others := [paths for word, paths in words.items() if word not in _ROLES]:
        problem = f"and also {_common_name(others[0])}: are they parts of one dataset?"
    if problem:
        listed = " and ".join(map(_common_name, parts))
        raise DataError(f"{folder} holds {listed}, {problem}", hint=_name_one(parts))


def _name_one(parts: Any) -> str:
    paths = [str(paths[0]) for paths in parts]
    return f"--data {paths[0]} --validation {paths[-1]}" if len(paths) > 1 else f"--data {paths[0]}"


def _word(path: Path) -> str:
    """Return the name of a folder, or that of a file without its number and suffix."""
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
