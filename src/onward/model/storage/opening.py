"""Opening a model file with its data files, consistently, even if another process saves over them.

Other files are refused with a sentence that says what they are.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from onnx import ModelProto

from onward.errors import ArgumentError, Error, ExternalDataError, InvalidModelError, needing_memory, suggest
from onward.model.storage.checksums import CHECKSUMS
from onward.model.storage.external import check_external, data_files, remove_metadata
from onward.model.storage.files import PAGE, NotRegularError, PathLike, listing, reason, regular
from onward.model.storage.remote import fetched
from onward.model.storage.tensor_sites import HeldFile, hold_open

_ATTEMPTS = 100


@dataclass
class Opened:
    proto: ModelProto
    folder: Path
    files: dict[Path, HeldFile]


def open_model(path: PathLike) -> Opened:
    """Parse a model file and open its data files, after checking that reading them is safe.

    A save renames the new model file over the old one, and removes old data files last. So if data
    of a parsed model are missing, the new model is read.
    """
    path = fetched(path)
    for attempt in range(_ATTEMPTS):
        before = _identity(path)
        proto, folder = read_proto(path), folder_of(path)
        try:
            check_external(proto, folder)
            files = {file: hold_open(file) for file in data_files(proto, folder)}
            return Opened(proto, folder, {file: source for file, source in files.items() if source is not None})
        except ExternalDataError:
            if _identity(path) == before or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _identity(path: PathLike) -> tuple[int, ...] | None:
    if not isinstance(path, str | os.PathLike):  # `os.stat` takes a number for an open file; `read_proto` explains
        return None
    try:
        info = os.stat(path)
    except (OSError, ValueError):  # `read_proto` explains
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


# ---- parsing ---------------------------------------------------------------------------------------------------------


PROTO_LIMIT = 2**31 - 1  # protobuf counts bytes in a signed 32-bit integer
OUTSIDE_HINT = "store its tensors beside it, as external data"


def folder_of(path: PathLike) -> Path:
    """Return the folder for external data: that of the file, not of a link to it."""
    return Path(os.path.realpath(fetched(path))).parent


def read_proto(path: PathLike) -> ModelProto:
    """Parse a model file. External data is neither read nor checked."""
    if not isinstance(path, str | os.PathLike) or path == "":
        raise no_model(path)
    name, path = f"`{os.fspath(path)}`", Path(fetched(path))
    try:
        regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # a run may have replaced the file since
            _refuse(name, file.read(PAGE), size)
            file.seek(0)
            with needing_memory(f"read {name}"):
                return _parse(name, file.read(min(size, PROTO_LIMIT) + 1))  # which allocates as much
    except FileNotFoundError:
        siblings = (entry.name for entry in listing(path.parent))
        hint = suggest(path.name, siblings) or "check the path; it is relative to the current folder"
        raise InvalidModelError(f"the file {name} does not exist", hint=hint) from None
    except NotRegularError as error:
        raise InvalidModelError(f"{name} is {reason(error)}", hint=instead_of(path)) from None
    except Error:
        raise
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"could not read {name}: {reason(error)}") from error


def parse_proto(data: bytes) -> ModelProto:
    """Parse the bytes of a model file."""
    _refuse("the model", data[:PAGE], len(data))
    return _parse("the model", data)


def _refuse(name: str, start: bytes, size: int) -> None:
    refuse_other_formats(name, start, size)
    if size > PROTO_LIMIT:
        raise InvalidModelError(f"{name} is larger than 2 GiB, which protobuf cannot hold", hint=OUTSIDE_HINT)


def _parse(name: str, data: bytes) -> ModelProto:
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        refuse_text(name, data[:PAGE])
        raise InvalidModelError(
            f"{name} is not an ONNX model, or damaged: its {len(data)} bytes are not valid protobuf",
            hint="if you downloaded or copied it, compare its size with that of the original",
        ) from None
    missing = "graph" if not proto.HasField("graph") else "version"
    if missing == "graph" or not (proto.ir_version > 0 or proto.opset_import):
        refuse_text(name, data[:PAGE])
        raise InvalidModelError(f"{name} is valid protobuf, but not an ONNX model: it has no {missing}", hint=EXPORT)
    remove_metadata(proto, CHECKSUMS)  # a changed model has other checksums
    return proto


# ---- objects and files that are not models ---------------------------------------------------------------------------

_MAKERS = {"torch": "from_torch", "keras": "from_keras", "tensorflow": "from_tensorflow", "flax": "from_jax"}
_OTHERS = {
    "onnx.onnx_ml_pb2": "put it into a model first: `onnx.helper.make_model(graph)`",
    "onnx_ir": "wrap it: `onward.Model(model)`",
    "onnxruntime": "pass the model file that the session was opened from",
}


def no_model(source: Any) -> Error:
    """Return an error about an object that is neither a path nor a model."""
    if isinstance(source, str):
        return InvalidModelError("the path of the model is empty", hint="name an `.onnx` file")
    modules = [base.__module__ for base in type(source).__mro__]
    hint = "pass the path of an `.onnx` file, its bytes, an `onnx.ModelProto` or an `onward.Model`"
    for package, maker in _MAKERS.items():
        if any(module.partition(".")[0] == package for module in modules):
            hint = f"make a training model of it: `onward.{maker}(...)`"
            break
    else:
        hint = next((text for prefix, text in _OTHERS.items() if modules[0].startswith(prefix)), hint)
    return ArgumentError(f"a `{type(source).__name__}` is not an ONNX model", hint=hint)


def instead_of(path: Path) -> str:
    """Return a hint for a folder or another file format in place of a model."""
    for name, hint in _FOLDERS.items():
        if (path / name).exists():
            return hint.format(path=os.fspath(path), name=name)
    models = sorted(file.name for file in path.glob("*.onnx"))
    return f"name a file in it, such as `{path / models[0]}`" if models else "name an `.onnx` file, or pass its bytes"


_FOLDERS = {
    "training.onnx": "it is the folder of a run, whose model is `{path}/{name}`; show it with `onward report {path}`",
    "saved_model.pb": "it is a SavedModel: make a training model of it with `onward.from_tensorflow`",
}

_BACK = "convert back a file that `onward convert` wrote: `onward convert FILE --like training.onnx`"
_TORCH = f"it holds no graph: make a training model of its module with `onward.from_torch`; {_BACK}"
_KERAS = f"load it with Keras, and make a training model of it with `onward.from_keras`; {_BACK}"
EXPORT, _UNPACK = "export the model to ONNX with the framework that wrote it", "unpack it first"
_DATA = "it holds data: pass the model first, then `--data FILE`, to `onward train`"
_DOWNLOAD, _TEXT = "download it again: the server sent a page", "read it with `onnx.load(..., format=...)`"
_ZIPPED = {
    "data.pkl": ("a PyTorch file", _TORCH),
    ".npy": ("a NumPy file", _DATA),
    ".json": ("a Keras file", _KERAS),
}
"""Kinds of zip archives by the suffix of their first file."""
# Offset of the mark of a format, the mark, name of the format, hint. No ONNX model begins with these.
_FORMATS = [
    (0, b"version https://git-lfs", "a Git LFS pointer instead of the file", "fetch the file with `git lfs pull`"),
    (0, b"PK\x03\x04", "a zip archive", _UNPACK),
    *((0, bytes([128, n]), "a Python pickle, such as an old PyTorch checkpoint", _TORCH) for n in (2, 3, 4, 5)),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, such as a Keras model or its weights", _KERAS),
    (8, b'{"', "a safetensors file: tensors without a graph", EXPORT),
    (4, b"TFL3", "a TensorFlow Lite model", "convert the model that it was made from"),
    (4, b"ORTM", "a model in ONNX Runtime's own format", "use the `.onnx` file that it was made from"),
    (0, b"\x93NUMPY", "a NumPy array", _DATA),
    (0, b"PAR1", "a Parquet file", _DATA),
    (0, b"ARROW1", "an Arrow file", _DATA),
    (0, b"\x89PNG", "a picture", _DATA),
    (0, b"\xff\xd8\xff", "a picture", _DATA),
    (0, b"GGUF", "a GGUF file", EXPORT),
    (0, b"\x1f\x8b", "a gzip archive", _UNPACK),
    (0, b"BZh", "a bzip2 archive", _UNPACK),
    (0, b"\xfd7zXZ\x00", "an xz archive", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"<!DOCTYPE", "a web page", _DOWNLOAD),
    (0, b"<!doctype", "a web page", _DOWNLOAD),
    (0, b"<html", "a web page", _DOWNLOAD),
    (0, b"<?xml", "an XML file", EXPORT),
    (0, b"ir_version:", "a model written as text", _TEXT),
    (0, b"{", "a JSON file", _TEXT),
]


def refuse_other_formats(name: str, start: bytes, size: int) -> None:
    """Raise for other file formats by the first bytes, before gigabytes are read."""
    if size == 0:
        raise InvalidModelError(f"{name} is empty", hint="a download or copy may have failed")
    for at, mark, what, hint in _FORMATS:
        if not start.startswith(mark, at):
            continue
        if at == 8 and int.from_bytes(start[:8], "little") > size:  # safetensors begin with the length of their header
            continue
        what, hint = _explain_zip(start, size) if mark.startswith(b"PK") else (what, hint)
        raise InvalidModelError(f"{name} is not an ONNX model but {what}", hint=hint)


def _explain_zip(start: bytes, size: int) -> tuple[str, str]:
    length = int.from_bytes(start[26:28], "little")
    if size < 30 + length:
        return "the beginning of a zip archive, such as a PyTorch file", "a download or copy may have been cut off"
    first = start[30 : 30 + length].decode("utf-8", "replace")
    explanation = next((text for ending, text in _ZIPPED.items() if first.endswith(ending)), None)
    return explanation or ("a zip archive", _UNPACK)


def refuse_text(name: str, start: bytes) -> None:
    """Raise if a file is text."""
    with suppress(UnicodeDecodeError):
        if all(character.isprintable() or character in "\t\r\n" for character in start.decode()):
            raise InvalidModelError(f"{name} is not an ONNX model but a text file", hint="name an `.onnx` file")
