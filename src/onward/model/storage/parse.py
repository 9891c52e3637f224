"""From a file or bytes to a ModelProto: what is not a model is refused, and it is said what it is instead."""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import ModelProto

from onward.errors import Error, InvalidModelError, near, needing_memory
from onward.model.storage.checksums import remove_checksum_entry
from onward.model.storage.files import PAGE, NotRegularError, PathLike, listing, reason, regular
from onward.model.storage.not_a_model import EXPORT, instead_of, no_model, refuse_other_formats, refuse_text

PROTO_LIMIT = 2**31 - 1  # protobuf counts bytes in a signed 32-bit integer
OUTSIDE_HINT = "store its tensors beside it, as external data"


def folder_of(path: PathLike) -> Path:
    """The folder in which a model's external data is looked for: where the file is, not where a link to it is."""
    return Path(os.path.realpath(path)).parent


def read_proto(path: PathLike) -> ModelProto:
    """Parse a model file. External data is neither read nor checked."""
    if not isinstance(path, str | os.PathLike) or path == "":
        raise no_model(path)
    name, path = f"`{os.fspath(path)}`", Path(path)
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
        hint = near(path.name, siblings) or "check the path; it is relative to the current folder"
        raise InvalidModelError(f"there is no file {name}", hint=hint) from None
    except NotRegularError as error:
        raise InvalidModelError(f"{name} is {reason(error)}", hint=instead_of(path)) from None
    except Error:
        raise
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"could not read {name}: {reason(error)}") from error


def parse_proto(data: bytes) -> ModelProto:
    """Parse the bytes of a model file."""
    _refuse("what was given", data[:PAGE], len(data))
    return _parse("what was given", data)


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
            f"{name} is not an ONNX model, or a damaged one: its {len(data)} bytes are not valid protobuf",
            hint="if it was downloaded or copied, compare its size with the original's",
        ) from None
    missing = "graph" if not proto.HasField("graph") else "version"
    if missing == "graph" or not (proto.ir_version > 0 or proto.opset_import):
        refuse_text(name, data[:PAGE])
        raise InvalidModelError(
            f"{name} is valid protobuf, but not an ONNX model: it has no {missing}", hint=f"{EXPORT}, once more"
        )
    remove_checksum_entry(proto)
    return proto
