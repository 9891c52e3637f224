"""Files of other systems, such as `hf://` and `s3://`, read through fsspec where it is installed."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from onward.errors import InvalidModelError, UnsupportedError, first_line

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/(?P<root>/?)(?P<path>\S+)")  # `Path` joins slashes; `C:/` is a drive
_PACKAGES = {
    "abfs": "adlfs", "az": "adlfs", "gcs": "gcsfs", "gs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp",
    "https": "aiohttp", "s3": "s3fs",
}  # fmt: skip
_copies: set[Path] = set()
"""Folders of copies, which are removed at exit."""


def fetched(path: Any) -> Any:
    """Return a path on this machine: of a copy for a URL such as `hf://org/model/model.onnx`, else the path itself."""
    match = _URL.fullmatch(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
    if match is None or not isinstance(os.fspath(path), str):
        return path
    root = "/" if match["scheme"] == "file" and not match["path"].startswith("/") else ""
    return _fetch(match["scheme"], f"{match['scheme']}://{root}{match['path']}")


def is_copy(path: Path) -> bool:
    """True for a copy of a URL, beside which nothing is written."""
    return any(folder in path.parents for folder in _copies)


@functools.cache
def _fetch(scheme: str, url: str) -> Path:
    package = _PACKAGES.get(scheme, "")
    install = f"pip install fsspec {package}".strip()
    try:
        from fsspec.core import url_to_fs

        system, source = url_to_fs(url)
    except ImportError as error:
        raise UnsupportedError(f"`{url}` needs fsspec: {first_line(error)}", hint=install) from error
    except ValueError as error:
        raise UnsupportedError(f"`{url}` is of an unknown file system: {first_line(error)}", hint=install) from error
    folder = Path(tempfile.mkdtemp(prefix="onward-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _copies.add(folder)
    copy = folder / Path(source).name
    try:
        if system.isdir(source):
            system.get(f"{source.rstrip('/')}/", f"{copy}/", recursive=True)
            return copy
        for file in _with_data(system, source):
            system.get_file(file, str(folder / Path(file).name))
    except Exception as error:  # file systems raise errors of all types
        raise InvalidModelError(
            f"cannot read `{url}`: {first_line(error)}", hint="check the path and access"
        ) from error
    return copy


def _with_data(system: Any, source: str) -> list[str]:
    """Return a file, and those beside it that hold its data: `model.onnx.data`, `model.data`, shards of an index."""
    name, parent = Path(source).name, source.rpartition("/")[0]
    is_index = name.endswith((".index", ".index.json"))
    prefix = name.partition(".index")[0].removesuffix(".safetensors").removesuffix(".bin") if is_index else name
    others = [file for file in system.ls(parent, detail=False) if file.rstrip("/").rpartition("/")[0] == parent]
    data = f"{Path(name).stem}.data"
    return [source, *(x for x in others if x != source and (Path(x).name.startswith(prefix) or Path(x).name == data))]
