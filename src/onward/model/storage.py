"""The bytes of model files: parse what may be hostile, check external data, write so that a crash loses nothing.

Protobuf is a container of tensors here, and an `onnx_ir` graph a set of places that hold tensors; what they mean is not
this module's business.

A save creates files beside the model and touches none that exists. Renaming the new `.onnx` over the old one is the
commit: before it the old model is whole, after it the new one is. Data that only the old one used is deleted last.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import mmap
import os
import re
import secrets
import stat
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError
from onnx import ModelProto, TensorProto

from onward.errors import Error, ExternalDataError, InvalidModelError, WriteError, near

PathLike = str | os.PathLike[str]
Container = ir.Graph | ir.Function
External = Literal["auto", "none", "data", "safetensors"]

PROTO_LIMIT = 2**31 - 1  # protobuf counts bytes in a signed 32-bit integer
EMBED_LIMIT = int(1.9 * 2**30)  # leaves room for the graph beside the tensors
PAGE, LARGE, ALIGNMENT = 4096, 2**20, 64  # large tensors begin on a page, so that each can be mapped by itself

_OUTSIDE = "store its tensors beside it, as external data"


# ---- parsing ---------------------------------------------------------------------------------------------------------


def folder_of(path: PathLike) -> Path:
    """The folder in which a model's external data is looked for: where the file is, not where a link to it is."""
    return Path(os.path.realpath(path)).parent


def read_proto(path: PathLike) -> ModelProto:
    """Parse a model file. External data is neither read nor checked."""
    name, path = f"`{os.fspath(path)}`", Path(path)
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            kind = "folder" if stat.S_ISDIR(info.st_mode) else "device or pipe"
            raise InvalidModelError(f"{name} is a {kind}, not a file", hint="name an `.onnx` file, or pass its bytes")
        with path.open("rb") as file:
            _refuse_other_formats(name, file.read(PAGE), info.st_size)  # before reading gigabytes of something else
            file.seek(0)
            return _parse(name, file.read(PROTO_LIMIT + 1))
    except FileNotFoundError:
        siblings = (entry.name for entry in _entries(path.parent))
        raise InvalidModelError(f"there is no file {name}", hint=near(path.name, siblings)) from None
    except Error:
        raise
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"could not read {name}: {_reason(error)}") from error


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
        raise InvalidModelError(f"{name} is larger than 2 GiB, which protobuf cannot hold", hint=_OUTSIDE)


# ---- tensors in protobuf ---------------------------------------------------------------------------------------------


def walk_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every tensor in a model: dense, sparse, in attributes, subgraphs and functions, for inference and training."""
    pending: list[Any] = [proto.graph, *proto.functions]
    for info in proto.training_info:
        pending += [info.initialization, info.algorithm]
    while pending:  # no recursion: how deep graphs nest is up to the file
        item = pending.pop()
        attributes = [attribute for node in item.node for attribute in node.attribute]
        if isinstance(item, onnx.FunctionProto):
            attributes += item.attribute_proto
        else:
            yield from item.initializer
            yield from _parts(item.sparse_initializer)
        for attribute in attributes:  # by the fields that are set, whatever type is declared
            yield from [attribute.t] if attribute.HasField("t") else []
            yield from attribute.tensors
            yield from _parts([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else [])
            yield from _parts(attribute.sparse_tensors)
            pending += [attribute.g] if attribute.HasField("g") else []
            pending += attribute.graphs


def _parts(sparse: Iterable[onnx.SparseTensorProto]) -> Iterator[TensorProto]:
    return (part for tensor in sparse for part in (tensor.values, tensor.indices))


def _external(proto: ModelProto) -> Iterator[TensorProto]:
    return (tensor for tensor in walk_tensors(proto) if tensor.data_location == TensorProto.EXTERNAL)


# ---- checking external data ------------------------------------------------------------------------------------------


class _Fault(Exception):
    """What is wrong with a reference to external data, as the rest of a sentence about the tensor."""


def check_external(proto: ModelProto, base_dir: PathLike | None) -> None:
    """Refuse a model whose external data is unsafe to read or cannot be read, naming every tensor. Opens no file.

    Without a folder, as for a model that did not come from a file, there can be no external data.
    """
    file_of = functools.cache(functools.partial(_file, base_dir))
    ranges: dict[tuple[int, int], dict[tuple[int, int], str]] = defaultdict(dict)
    problems = []
    for tensor in _external(proto):
        name = f"`{_printable(tensor.name)}`"
        try:
            location, start, stop = _reference(tensor)
            info = file_of(location)
            if isinstance(info, _Fault):
                raise info
            if stop > info.st_size:
                raise _Fault(f"ends at byte {stop} of `{_printable(location)}`, which has {info.st_size} bytes")
            if stop > start:  # tied weights share a range: one entry
                ranges[info.st_dev, info.st_ino].setdefault(
                    (start, stop), f"{name} (byte {start} of `{_printable(location)}`)"
                )
        except _Fault as fault:
            problems.append(f"{name} {fault}")
    problems += [problem for file in ranges.values() for problem in _overlaps(file)]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        lines = "".join(f"\n  {problem}" for problem in problems[:20] + more)
        raise ExternalDataError(f"the model's external data cannot be used:{lines}", hint=_way_out(problems))


def _reference(tensor: TensorProto) -> tuple[str, int, int]:
    """Location, first byte, and the byte after the last."""
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in entries:  # readers differ in which one they take
            raise _Fault(f"has `{_printable(entry.key)}` twice")
        entries[entry.key] = entry.value
    size = _size(tensor)
    start, length = _number(entries, "offset", 0), _number(entries, "length", size)
    if length != size:
        raise _Fault(f"has a length of {length} bytes, but its type and shape need {size}")
    return entries.get("location", ""), start, start + size


def _printable(text: str | bytes) -> str:
    """Protobuf gives bytes for a string that is not UTF-8, and control characters would garble a message."""
    return text if isinstance(text, str) and text.isprintable() else repr(text)


def _number(entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,19}", text) or int(text) >= 2**63:
        raise _Fault(f"has the {key} `{_printable(text)[:40]}`, which is no number of bytes")
    return int(text)


def _size(tensor: TensorProto) -> int:
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError):
        kind = "strings" if tensor.data_type == TensorProto.STRING else f"data type {tensor.data_type}"
        raise _Fault(f"holds {kind}, which cannot be outside the file") from None
    if any(dim < 0 for dim in tensor.dims):
        raise _Fault("has a negative dimension")
    total = 0 if 0 in tensor.dims else bits
    for dim in tensor.dims if total else ():
        total *= dim
        if total >= 2**63:  # stop here: a million dimensions make a number that takes hours
            raise _Fault("has a shape larger than any file")
    return -(-total // 8)


def _file(base_dir: PathLike | None, location: str) -> os.stat_result | _Fault:
    """The file that a location names, if reading it is safe. A fault is returned, so that it can be remembered."""
    where = f"is in `{_printable(location)}`"
    if base_dir is None:
        return _Fault(f"{where}, but a model that was not read from a file has no folder")
    if not location or not isinstance(location, str):
        return _Fault("does not say in which file it is")
    parts = location.replace("\\", "/").split("/")
    if not parts[0] or re.match("[A-Za-z]:", location):
        return _Fault(f"{where}: an absolute path")
    if ".." in parts:
        return _Fault(f"{where}: a path that leaves the model's folder")
    if "\\" in location:  # part of a name outside Windows: the file checked would not be the file opened
        return _Fault(f"{where}: ONNX separates folders by `/`")
    try:
        path, info = Path(base_dir), os.stat(base_dir)
        for part in (part for part in parts if part not in ("", ".")):
            path /= part
            info = os.lstat(path)
            if stat.S_ISLNK(info.st_mode):
                return _Fault(f"{where}: a path through a symbolic link")
    except FileNotFoundError:
        return _Fault(f"{where}, which does not exist")
    except (OSError, ValueError) as error:
        return _Fault(f"{where}, which cannot be read: {_reason(error)}")
    if not stat.S_ISREG(info.st_mode):
        return _Fault(f"{where}, which is not a regular file")
    if info.st_nlink > 1:
        return _Fault(f"{where}, a file with several hard links: it may belong to something else")
    return info


def _overlaps(ranges: dict[tuple[int, int], str]) -> Iterator[str]:
    end, before = 0, ""
    for (start, stop), name in sorted(ranges.items()):
        if start < end:
            yield f"{name} overlaps {before}"
        if stop > end:
            end, before = stop, name


def _way_out(problems: list[str]) -> str:
    text = " ".join(problems)
    if "link" in text:
        return "copy the files instead of linking them (huggingface_hub: `snapshot_download(..., local_dir=...)`)"
    if "no folder" in text:
        return "pass the path of the model instead"
    if "does not exist" in text:
        return "put the data files into the folder of the model"
    return "the model or its data is damaged, or was made to read other files: get both again from a source you trust"


# ---- tensors in onnx_ir ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Place:
    """Where a graph holds a tensor: an initializer, or an attribute."""

    holder: ir.Value | ir.Node | ir.Function
    attribute: str = ""
    index: int | None = None  # in an attribute that holds several

    @property
    def name(self) -> str:
        return "/".join(str(part) for part in (self.holder.name, self.attribute, self.index) if part not in ("", None))

    @property
    def tensor(self) -> ir.TensorProtocol | None:
        if isinstance(self.holder, ir.Value):
            return self.holder.const_value
        value = self.holder.attributes[self.attribute].value
        return value if self.index is None else value[self.index]

    @tensor.setter
    def tensor(self, tensor: Any) -> None:
        if isinstance(self.holder, ir.Value):
            self.holder.const_value = tensor
            return
        old = self.holder.attributes[self.attribute]
        value = tensor if self.index is None else [*old.value[: self.index], tensor, *old.value[self.index + 1 :]]
        self.holder.attributes[old.name] = ir.Attr(old.name, old.type, value, doc_string=old.doc_string)


def places(*containers: Container) -> list[Place]:
    """Every place in these graphs and functions, and in the graphs nested in them, that holds a tensor."""
    return [place for container in containers for place in _places(container)]


def _places(container: Container) -> Iterator[Place]:
    top = container.graph if isinstance(container, ir.Function) else container
    for graph in (top, *top.subgraphs()):
        yield from (Place(value) for value in graph.initializers.values() if value.const_value is not None)
    holders: list[ir.Node | ir.Function] = [container] if isinstance(container, ir.Function) else []
    for holder in (*holders, *top.all_nodes()):
        for attribute in holder.attributes.values():
            if attribute.value is None:
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                yield Place(holder, attribute.name)
            elif attribute.type == ir.AttributeType.TENSORS:
                yield from (Place(holder, attribute.name, index) for index in range(len(attribute.value)))


def set_base_dir(container: Container, base_dir: PathLike) -> None:
    """Say where the external tensors in a graph or function are; `onnx_ir` maps each when it is first used."""
    folder = os.path.realpath(base_dir)  # must stay true when the working folder changes
    for place in _places(container):
        if _is_external(tensor := place.tensor):
            tensor.base_dir = folder  # type: ignore[union-attr]


def _is_external(tensor: object) -> bool:
    """Whether a tensor is in a file. A subclass may mean anything, and only its owner knows how to write it."""
    return type(tensor) is ir.ExternalTensor


def _nbytes(tensor: ir.TensorProtocol) -> int:
    """How much could be outside the file; nothing of strings, and of what only its owner can write."""
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED) or _is_foreign(tensor):
        return 0
    return tensor.nbytes


def _is_foreign(tensor: object) -> bool:
    return isinstance(tensor, ir.ExternalTensor) and not _is_external(tensor)


def _range(tensor: ir.TensorProtocol) -> tuple[Path, int, int] | None:
    """File, offset and length of an external tensor."""
    if not _is_external(tensor):
        return None
    assert isinstance(tensor, ir.ExternalTensor)
    return Path(os.path.realpath(tensor.path)), tensor.offset or 0, tensor.nbytes


def _described(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """What a tensor keeps wherever its bytes are."""
    keys = {"name": tensor.name or "", "doc_string": tensor.doc_string, "shape": ir.Shape(tensor.shape.numpy())}
    return keys | {"metadata_props": dict(tensor.metadata_props)}


def _embedded(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy(), tensor.dtype, **_described(tensor))


def _outside(tensor: ir.TensorProtocol, folder: Path, file: Path, offset: int) -> ir.TensorProtocol:
    location = file.relative_to(folder).as_posix()
    return ir.ExternalTensor(location, offset, tensor.nbytes, tensor.dtype, base_dir=str(folder), **_described(tensor))


# ---- saving ----------------------------------------------------------------------------------------------------------


def save(
    path: PathLike,
    to_proto: Callable[[], ModelProto],
    places: Iterable[Place],
    *,
    external: External = "auto",
    threshold_bytes: int = 1024,
    shard_bytes: int | None = None,
) -> None:
    """Write a model and its data files, or fail and leave everything as it was.

    `places` are those of all graphs and functions that `to_proto` serialises. While it is called they hold what the new
    file will hold; afterwards they hold what they held, or, if that was in a data file that is gone, what replaced it.

    `external` says where tensors of at least `threshold_bytes` go:

    - `none`: into the model file.
    - `data`: into `<stem>.data`; with `shard_bytes`, into several such files, each at most that large unless one
      tensor is larger.
    - `safetensors`: the same with `.safetensors` files, which others can read by the names of the initializers. Types
      that not every reader of this format knows (complex, less than 8 bits, unusual float8) are in it as plain bytes.
    - `auto`: outside if the model, or the one that it replaces, has tensors outside, or if they do not fit inside.

    What is unchanged in a data file of the model that is replaced stays there. Attributes go outside only if they were.
    """
    target = _target(path, external)
    tensors = {place: tensor for place in places if (tensor := place.tensor) is not None}
    with _Transaction(target) as transaction:
        old = _data_files(target)
        plan = _plan(target, tensors, old, external, threshold_bytes)
        future = plan.kept | plan.embedded | _write_data(plan, target, transaction, shard_bytes)
        with _holding(future):
            payload, used = _serialise(to_proto(), target)
        transaction.commit(payload)
    if not _sync(target.parent, strict=False):
        return  # after a power failure the old model may be back, and need its data
    obsolete = _obsolete(target, old - used)
    for place, tensor in tensors.items():  # first: the model in memory must not lose its data
        if (where := _range(tensor)) and where[0] in obsolete:
            place.tensor = future[place]
    for file in obsolete:
        with suppress(OSError):
            file.unlink()


def _target(path: PathLike, external: str) -> Path:
    """The file to write, after the objections that can be raised before any work is done."""
    target = Path(os.path.realpath(path))
    if external not in ("auto", "none", "data", "safetensors"):
        raise WriteError(f"tensors cannot be stored as `{external}`", hint="use auto, none, data or safetensors")
    if not target.parent.is_dir():
        raise WriteError(f"could not write `{path}`: there is no folder `{target.parent}`", hint="create it first")
    if target.exists() and not target.is_file():
        raise WriteError(f"could not write `{path}`: it is not a file", hint="name a file, such as `model.onnx`")
    if target.exists() and not os.access(target, os.W_OK):  # a rename would replace it all the same
        raise WriteError(f"could not write `{path}`: it is read-only", hint="save under another name")
    return target


@dataclass
class _Plan:
    """What the places will hold that does not stay as it is; `written` is what goes into new data files."""

    kept: dict[Place, ir.TensorProtocol]
    embedded: dict[Place, ir.TensorProtocol]
    written: dict[Place, ir.TensorProtocol]
    suffix: str


def _plan(
    target: Path, tensors: dict[Place, ir.TensorProtocol], old: set[Path], external: str, threshold: int
) -> _Plan:
    ranges = {place: where for place, tensor in tensors.items() if (where := _range(tensor))}
    keep = _kept_files(target, set(ranges.values()), old, external)
    kept = {p: _outside(tensors[p], target.parent, *where[:2]) for p, where in ranges.items() if where[0] in keep}
    moving = {place: tensor for place, tensor in tensors.items() if place not in kept}
    total = sum(_nbytes(tensor) for tensor in moving.values())
    if external == "none" and total > PROTO_LIMIT:
        raise WriteError(f"could not write `{target}`: more than 2 GiB do not fit into one file", hint=_OUTSIDE)
    files = old | {file for file, _, _ in ranges.values()}
    spill = bool(files) or total > EMBED_LIMIT if external == "auto" else external != "none"
    written = {
        place: tensor
        for place, tensor in moving.items()
        if spill
        and _nbytes(tensor) >= max(threshold, 1)  # an empty tensor has nothing to point at
        and (isinstance(place.holder, ir.Value) or place in ranges)
    }
    embedded = {place: _embedded(tensors[place]) for place in ranges if place in moving and place not in written}
    is_safe = external == "safetensors" or (
        external == "auto" and files and {file.suffix for file in files} == {".safetensors"}
    )
    return _Plan(kept, embedded, written, "safetensors" if is_safe else "data")


def _kept_files(target: Path, ranges: set[tuple[Path, int, int]], old: set[Path], external: str) -> set[Path]:
    """The data files of the replaced model that the new one goes on using: of the right kind and, if they are ours to
    delete, used by half at least, so that a model that is often changed does not drag along all that it ever was."""
    used: dict[Path, int] = defaultdict(int)
    for file, _, size in ranges:
        used[file] += size
    kept = set()
    for file in old & used.keys() if external != "none" else ():
        fits = external == "auto" or (external == "safetensors") == (file.suffix == ".safetensors")
        if fits and (not _is_own(target, file) or used[file] * 2 >= file.stat().st_size):
            kept.add(file)
    return kept


@contextmanager
def _holding(future: dict[Place, ir.TensorProtocol]) -> Iterator[None]:
    """While inside, these places hold what the new file will hold."""
    past = [(place, place.tensor) for place in future]
    try:
        for place, tensor in future.items():
            place.tensor = tensor
        yield
    finally:
        for place, before in past:
            place.tensor = before


def _serialise(proto: ModelProto, target: Path) -> tuple[bytes, set[Path]]:
    """The bytes of the model file, and the data files that it refers to, all of which must be there."""
    check_external(proto, target.parent)
    with suppress(EncodeError):
        payload = proto.SerializeToString()
        if len(payload) <= PROTO_LIMIT:
            return payload, _locations(proto, target.parent)
    raise WriteError(f"could not write `{target}`: more than 2 GiB do not fit into one file", hint=_OUTSIDE)


def _data_files(target: Path) -> set[Path]:
    """The data files of the model that is there now; of something else, or of a broken model, none."""
    if not target.exists() or not _mentions(target, "location"):  # spares parsing a large model that has no data files
        return set()
    try:
        proto = read_proto(target)
        check_external(proto, target.parent)
    except (InvalidModelError, ExternalDataError):
        return set()
    return _locations(proto, target.parent)


def _locations(proto: ModelProto, folder: Path) -> set[Path]:
    entries = (entry for tensor in _external(proto) for entry in tensor.external_data if entry.key == "location")
    return {Path(os.path.realpath(folder / location)) for location in {entry.value for entry in entries}}


# ---- data files ------------------------------------------------------------------------------------------------------

# The types that every reader of safetensors knows. One that it does not know makes the whole file unreadable.
_SAFETENSORS = {
    ir.DataType.BOOL: "BOOL",
    ir.DataType.UINT8: "U8",
    ir.DataType.INT8: "I8",
    ir.DataType.UINT16: "U16",
    ir.DataType.INT16: "I16",
    ir.DataType.UINT32: "U32",
    ir.DataType.INT32: "I32",
    ir.DataType.UINT64: "U64",
    ir.DataType.INT64: "I64",
    ir.DataType.FLOAT8E4M3FN: "F8_E4M3",
    ir.DataType.FLOAT8E5M2: "F8_E5M2",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.FLOAT: "F32",
    ir.DataType.DOUBLE: "F64",
}


@dataclass
class _Piece:
    """Bytes that are written once, and the places that share them (tied weights)."""

    tensor: ir.TensorProtocol
    places: list[Place]


def _write_data(
    plan: _Plan, target: Path, transaction: _Transaction, shard_bytes: int | None
) -> dict[Place, ir.TensorProtocol]:
    """Write what goes outside, one tensor at a time; what the places will hold."""
    layout = _safetensors_layout if plan.suffix == "safetensors" else _plain_layout
    names = _fresh_names(target, plan.suffix)
    future = {}
    for shard in _shards(_pieces(plan.written), shard_bytes):
        path, file = transaction.create_data(names)
        with file:
            head, offsets = layout(shard)
            file.write(head)
            for piece, offset in offsets:
                file.seek(offset)  # a gap reads as zeros
                _copy(piece.tensor, file)
                for place in piece.places:
                    future[place] = _outside(plan.written[place], target.parent, path, offset)
            _flush(file)
    return future


def _pieces(tensors: dict[Place, ir.TensorProtocol]) -> list[_Piece]:
    pieces: dict[object, _Piece] = {}
    for place, tensor in tensors.items():
        pieces.setdefault(_range(tensor) or id(tensor), _Piece(tensor, [])).places.append(place)
    return list(pieces.values())


def _shards(pieces: list[_Piece], most: int | None) -> Iterator[list[_Piece]]:
    shard: list[_Piece] = []
    size = 0
    for piece in pieces:
        if shard and most is not None and size + piece.tensor.nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(piece)
        size += piece.tensor.nbytes
    if shard:
        yield shard


def _plain_layout(pieces: list[_Piece]) -> tuple[bytes, list[tuple[_Piece, int]]]:
    offsets, end = [], 0
    for piece in pieces:
        end += -end % (PAGE if piece.tensor.nbytes >= LARGE else ALIGNMENT)
        offsets.append((piece, end))
        end += piece.tensor.nbytes
    return b"", offsets


def _safetensors_layout(pieces: list[_Piece]) -> tuple[bytes, list[tuple[_Piece, int]]]:
    """The format has no gaps. With the widest types first, each tensor is still aligned to its own type."""
    entries: dict[str, object] = {}
    offsets, end = [], 0
    for piece in sorted(pieces, key=lambda piece: -piece.tensor.dtype.bitwidth):
        size, dtype = piece.tensor.nbytes, _SAFETENSORS.get(piece.tensor.dtype)
        shape = piece.tensor.shape.numpy() if dtype else (size,)
        key = _unused_key(piece.places[0].name, entries)
        entries[key] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": (end, end + size)}
        offsets.append((piece, end))
        end += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    head = struct.pack("<Q", len(header)) + header
    return head, [(piece, len(head) + offset) for piece, offset in offsets]


def _unused_key(name: str, taken: Iterable[str]) -> str:
    """Two steps may each have a counter of the same name; and one key has a meaning of its own."""
    candidates = itertools.chain([name], (f"{name}#{n}" for n in itertools.count(2)))
    return next(key for key in candidates if key not in taken and key != "__metadata__")


def _copy(tensor: ir.TensorProtocol, file: BinaryIO) -> None:
    start = file.tell()
    if isinstance(tensor, ir.ExternalTensor):
        tensor.tofile(file)  # in blocks, from file to file
    else:
        file.write(tensor.tobytes())
    if (size := file.tell() - start) != tensor.nbytes:
        raise ValueError(f"`{tensor.name}` has {size} bytes, but its type and shape need {tensor.nbytes}")


# ---- files -----------------------------------------------------------------------------------------------------------


def _own_names(target: Path, suffix: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(target.name.removesuffix('.onnx'))}(?:\.([0-9]+))?\.(?:{suffix})")


def _is_own(target: Path, file: Path) -> bool:
    """Whether a data file has a name that we give, and so may be deleted."""
    return file.parent == target.parent and bool(_own_names(target, "data|safetensors").fullmatch(file.name))


def _fresh_names(target: Path, suffix: str) -> Iterator[Path]:
    """`m.data`, `m.1.data`, ... Numbers only rise: who has the old model open must not find other data in its place."""
    found = [_own_names(target, suffix).fullmatch(entry.name) for entry in _entries(target.parent)]
    first = max((int(match[1] or 0) + 1 for match in found if match), default=0)
    stem = target.name.removesuffix(".onnx")
    return (target.with_name(f"{stem}.{n}.{suffix}" if n else f"{stem}.{suffix}") for n in itertools.count(first))


def _obsolete(target: Path, files: set[Path]) -> set[Path]:
    """Those files that are ours to delete and that no other model mentions, such as a copy of the replaced one."""
    own = {file for file in files if _is_own(target, file)}
    others = [entry for entry in _entries(target.parent) if entry.name.endswith(".onnx") and entry.name != target.name]
    return {file for file in own if not any(_mentions(other.path, file.name) for other in others)}


def _mentions(path: PathLike, name: str) -> bool:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name.encode()) >= 0
    except ValueError:  # an empty file cannot be mapped
        return False
    except OSError:
        return True  # it may


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync(folder: Path, *, strict: bool) -> bool:
    """Make new names in a folder survive a power failure, where the system offers that; False if it failed to."""
    if os.name == "nt":
        return True
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # not offered here
            if strict:
                raise
            return False
    return True


class _Transaction:
    """The new files of one save: with the rename of the model file they all become valid, else none remains."""

    def __init__(self, target: Path):
        self.target = target
        self.temporary = target.with_name(f".{target.name[:60]}.{secrets.token_hex(4)}.tmp")
        self.mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        self.data: list[Path] = []
        self.file: BinaryIO | None = None

    def create(self, path: Path) -> BinaryIO:
        """A new file that nobody can read who could not read the old model."""
        mode = 0o666 if self.mode is None else self.mode & 0o666
        file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        if self.mode is not None:
            os.chmod(path, mode)  # whatever the umask says
        return file

    def create_data(self, names: Iterator[Path]) -> tuple[Path, BinaryIO]:
        for path in names:
            self.data.append(path)  # first, so that an interrupt leaves nothing behind
            try:
                return path, self.create(path)
            except FileExistsError:  # another process saves too
                self.data.pop()
        raise AssertionError("there is always another name")

    def commit(self, payload: bytes) -> None:
        assert self.file is not None
        with self.file as file:
            file.write(payload)
            _flush(file)
        if self.mode is not None:
            os.chmod(self.temporary, self.mode)
        _sync(self.target.parent, strict=True)
        os.replace(self.temporary, self.target)

    def __enter__(self) -> _Transaction:
        try:
            self.file = self.create(self.temporary)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The temporary file is there just as long as the rename has not happened, whenever an interrupt comes.
        if os.path.lexists(self.temporary):
            if self.file is not None:
                with suppress(OSError):  # closing may try to write once more
                    self.file.close()
            for path in (*self.data, self.temporary):
                with suppress(OSError):
                    path.unlink()
        if isinstance(error, Exception) and not isinstance(error, WriteError):
            raise _write_error(self.target, error) from error


def _write_error(target: Path, error: Exception) -> WriteError:
    number = error.errno if isinstance(error, OSError) else None
    hint = "nothing was changed; save again when the cause is removed"
    if isinstance(error, Error):
        hint = error.hint or hint
    elif number in (errno.ENOSPC, errno.EDQUOT):
        hint = f"make room in `{target.parent}`, or save elsewhere"
    elif number == errno.EFBIG:
        hint = "files in this place cannot be so large: pass `shard_bytes`, or save elsewhere"
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "save into a folder that you may write to"
    culprit = f" (`{error.filename}`)" if isinstance(error, OSError) and error.filename else ""
    return WriteError(f"could not write `{target}`: {_reason(error)}{culprit}", hint=hint)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
