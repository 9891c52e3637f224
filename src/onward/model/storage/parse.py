"""From a file or bytes to a ModelProto: what is not a model is refused, and it is said what it is instead."""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import ModelProto

from onward.errors import Error, InvalidModelError, near
from onward.model.storage.files import PAGE, NotRegularError, PathLike, listing, reason, regular

PROTO_LIMIT = 2**31 - 1  # protobuf counts bytes in a signed 32-bit integer
OUTSIDE_HINT = "store its tensors beside it, as external data"


def folder_of(path: PathLike) -> Path:
    """The folder in which a model's external data is looked for: where the file is, not where a link to it is."""
    return Path(os.path.realpath(path)).parent


def read_proto(path: PathLike) -> ModelProto:
    """Parse a model file. External data is neither read nor checked."""
    name, path = f"`{os.fspath(path)}`", Path(path)
    try:
        info = regular(path)
        with path.open("rb") as file:
            _refuse_other_formats(name, file.read(PAGE), info.st_size)  # before reading gigabytes of something else
            file.seek(0)
            return _parse(name, file.read(PROTO_LIMIT + 1))
    except FileNotFoundError:
        siblings = (entry.name for entry in listing(path.parent))
        raise InvalidModelError(f"there is no file {name}", hint=near(path.name, siblings)) from None
    except NotRegularError as error:
        hint = "name an `.onnx` file, or pass its bytes"
        raise InvalidModelError(f"{name} is {reason(error)}", hint=hint) from None
    except Error:
        raise
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"could not read {name}: {reason(error)}") from error


def parse_proto(data: bytes) -> ModelProto:
    """Parse the bytes of a model file."""
    _refuse_other_formats("what was given", data[:PAGE], len(data))
    return _parse("what was given", data)


def _parse(name: str, data: bytes) -> ModelProto:
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise InvalidModelError(
            f"{name} is not an ONNX model, or a damaged one: its {len(data)} bytes are not valid protobuf",
            hint="if it was downloaded or copied, compare its size with the original's",
        ) from None
    missing = "graph" if not proto.HasField("graph") else "version"
    if missing == "graph" or not (proto.ir_version > 0 or proto.opset_import):
        raise InvalidModelError(f"{name} is valid protobuf, but not an ONNX model: it has no {missing}")
    return proto


_EXPORT, _UNPACK = "export the model to ONNX with the framework that wrote it", "unpack it first"
_DOWNLOAD, _TEXT = "the download gave a page instead of the file", "read it with `onnx.load(..., format=...)`"
# What else is passed by mistake: where its mark is, the mark, what it is, what to do. No ONNX model begins with these.
_FORMATS = [
    (0, b"version https://git-lfs", "a Git LFS pointer instead of the file", "fetch the file with `git lfs pull`"),
    (0, b"PK\x03\x04", "a zip archive, such as a PyTorch, Keras or NumPy file", f"{_EXPORT}, or {_UNPACK}"),
    *((0, bytes([128, n]), "a Python pickle, such as an old PyTorch checkpoint", _EXPORT) for n in (2, 3, 4, 5)),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras weights", _EXPORT),
    (8, b'{"', "a safetensors file: tensors without a graph", _EXPORT),
    (4, b"TFL3", "a TensorFlow Lite model", "convert the model that it was made from"),
    (4, b"ORTM", "a model in ONNX Runtime's own format", "use the `.onnx` file that it was made from"),
    (0, b"\x93NUMPY", "a NumPy array", None),
    (0, b"GGUF", "a GGUF file", None),
    (0, b"\x1f\x8b", "a gzip archive", _UNPACK),
    (0, b"BZh", "a bzip2 archive", _UNPACK),
    (0, b"\xfd7zXZ\x00", "an xz archive", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"<!DOCTYPE", "a web page", _DOWNLOAD),
    (0, b"<!doctype", "a web page", _DOWNLOAD),
    (0, b"<html", "a web page", _DOWNLOAD),
    (0, b"<?xml", "an XML file", None),
    (0, b"ir_version:", "a model written as text", _TEXT),
    (0, b"{", "a JSON file", _TEXT),
]


def _refuse_other_formats(name: str, start: bytes, size: int) -> None:
    if size == 0:
        raise InvalidModelError(f"{name} is empty", hint="a download or copy may have failed")
    for at, mark, what, hint in _FORMATS:
        if not start.startswith(mark, at):
            continue
        if at == 8 and int.from_bytes(start[:8], "little") > size:  # safetensors begin with the length of their header
            continue
        raise InvalidModelError(f"{name} is not an ONNX model but {what}", hint=hint)
    if size > PROTO_LIMIT:
        raise InvalidModelError(f"{name} is larger than 2 GiB, which protobuf cannot hold", hint=OUTSIDE_HINT)
