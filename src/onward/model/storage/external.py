"""References from a ModelProto to external data: locations and their safety."""

from __future__ import annotations

import functools
import os
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir
from onnx import ModelProto, TensorProto

from onward.errors import ExternalDataError
from onward.model.storage.files import PathLike, reason


def walk_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Return every tensor in a model: sparse, in attributes, functions and steps, too."""
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
            yield from _components(item.sparse_initializer)
        for attribute in attributes:  # by the fields that are set, whatever type is declared
            yield from [attribute.t] if attribute.HasField("t") else []
            yield from attribute.tensors
            yield from _components([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else [])
            yield from _components(attribute.sparse_tensors)
            pending += [attribute.g] if attribute.HasField("g") else []
            pending += attribute.graphs


def _components(sparse: Iterable[onnx.SparseTensorProto]) -> Iterator[TensorProto]:
    return (component for tensor in sparse for component in (tensor.values, tensor.indices))


def _external(proto: ModelProto) -> Iterator[TensorProto]:
    return (tensor for tensor in walk_tensors(proto) if tensor.data_location == TensorProto.EXTERNAL)


def data_files(proto: ModelProto, folder: Path) -> dict[Path, str]:
    """Return the data files that a model refers to, with their checksums if recorded."""
    checksums: dict[str, str] = {}
    for tensor in _external(proto):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        checksums[entries["location"]] = checksums.get(entries["location"]) or entries.get("checksum", "")
    return {Path(os.path.realpath(folder / location)): checksum for location, checksum in checksums.items()}


def add_checksums(proto: ModelProto, folder: Path, checksums: dict[Path, str]) -> None:
    """Restore the checksums of data files, which `onnx_ir` drops, in the references to them."""
    for tensor in _external(proto) if any(checksums.values()) else ():
        entries = {entry.key: entry.value for entry in tensor.external_data}
        checksum = checksums.get(Path(os.path.realpath(folder / entries["location"])))
        if checksum and isinstance(checksum, str) and "checksum" not in entries:
            tensor.external_data.add(key="checksum", value=checksum)


BORROWED = "onward.borrowed"
"""Key of the record that a tensor in a file of another program has: see `record_borrowed`."""
_SAMPLE = 4096  # bytes: enough to tell two sets of weights apart, and as quick to read as the name of the file


def remove_metadata(holder: ModelProto | TensorProto, key: str) -> None:
    for index in reversed(range(len(holder.metadata_props))):
        if holder.metadata_props[index].key == key:
            del holder.metadata_props[index]


def record_borrowed(proto: ModelProto, folder: Path, files: Set[Path]) -> None:
    """Record how tensors in files of other programs begin, so that reading finds changed files."""
    for tensor in walk_tensors(proto):
        remove_metadata(tensor, BORROWED)
        if files and tensor.data_location == TensorProto.EXTERNAL:
            location, start, stop = _reference(tensor)
            if Path(os.path.realpath(folder / location)) in files:
                tensor.metadata_props.add(key=BORROWED, value=_borrowed(folder, location, start, stop))


def _borrowed(folder: PathLike, location: str, start: int, stop: int) -> str:
    with open(Path(folder) / location, "rb") as file:
        file.seek(start)
        return f"crc32:{zlib.crc32(file.read(min(stop - start, _SAMPLE))):08x} {start} {location}"


def _check_borrowed(tensor: TensorProto, base_dir: PathLike, location: str, start: int, stop: int) -> None:
    """Raise if a file of another program has changed since the model was saved."""
    recorded = next((entry.value for entry in tensor.metadata_props if entry.key == BORROWED), "")
    # Other tools keep the record when they move a tensor: then it no longer applies.
    if recorded.endswith(f" {start} {location}") and recorded != _borrowed(base_dir, location, start, stop):
        raise Fault(f"has changed in `{_printable(location)}` since the model was saved", "change")


class Fault(Exception):
    """A problem of a reference to external data, as the rest of a sentence about the tensor."""

    def __init__(self, text: str, about: Literal["place", "size", "overlap", "change"] = "place"):
        super().__init__(text)
        self.about = about


def check_external(proto: ModelProto, base_dir: PathLike | None) -> None:
    """Raise if external data is unsafe or unreadable, with the names of all tensors. Opens no file.

    Without a folder, as for a model that did not come from a file, there can be no external data.
    """
    named = [(f"`{_printable(tensor.name)}`", tensor) for tensor in _external(proto)]
    problems = [f"{name} {fault}" for name, fault in external_faults(named, base_dir)]
    if base_dir is None:
        problems += [
            f"{name} is external, but a model that was not read from a file has no folder" for name, _ in named
        ]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        lines = "".join(f"\n  {problem}" for problem in problems[:20] + more)
        raise ExternalDataError(f"the model's external data cannot be used:{lines}", hint=_hint_for(problems))


def external_faults(
    tensors: Iterable[tuple[str, TensorProto]], base_dir: PathLike | None
) -> Iterator[tuple[str, Fault]]:
    """Return problems of external tensors. Without a folder, no file is checked."""
    file_of = functools.cache(functools.partial(_file, base_dir))
    ranges: dict[Any, dict[tuple[int, int], tuple[str, str]]] = defaultdict(dict)
    for name, tensor in tensors:
        try:
            location, start, stop = _reference(tensor)
            info = file_of(location)
            if isinstance(info, Fault):
                raise info
            if info is not None and stop > info.st_size:
                text = f"ends at byte {stop} of `{_printable(location)}`, which has {info.st_size} bytes"
                raise Fault(text, "size")
            if info is not None and base_dir is not None:
                _check_borrowed(tensor, base_dir, location, start, stop)
            if stop > start:  # tied weights share a range: one entry
                file = os.path.normpath(location) if info is None else (info.st_dev, info.st_ino)
                ranges[file].setdefault((start, stop), (name, f"(byte {start} of `{_printable(location)}`)"))
        except Fault as fault:
            yield name, fault
    for ranges_of_file in ranges.values():
        for late, early in overlaps(ranges_of_file):
            name, where = ranges_of_file[late]
            yield name, Fault(f"{where} overlaps {' '.join(ranges_of_file[early])}", "overlap")


def _reference(tensor: TensorProto) -> tuple[str, int, int]:
    """Return location, first byte, and the byte after the last."""
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in entries:  # readers differ in which one they take
            raise Fault(f"has `{_printable(entry.key)}` twice")
        entries[entry.key] = entry.value
    bits = bits_of(tensor)
    if bits is None:
        description = "strings" if tensor.data_type == TensorProto.STRING else f"data type {tensor.data_type}"
        raise Fault(f"holds {description}, which cannot be external")
    if any(dim < 0 for dim in tensor.dims):
        raise Fault("has a negative dimension")
    total = 0 if 0 in tensor.dims else bits
    for dim in tensor.dims if total else ():
        total *= dim
        if total >= 2**63:  # stop here: a million dimensions make a number that takes hours
            raise Fault("has a shape larger than any file", "size")
    size = -(-total // 8)
    start, length = _number(entries, "offset", 0), _number(entries, "length", size)
    if length != size:
        raise Fault(f"has a length of {length} bytes, but its type and shape need {size}", "size")
    return entries.get("location", ""), start, start + size


def _printable(text: str | bytes) -> str:
    """Escape bytes that are not UTF-8, and control characters, for messages."""
    shown = text if isinstance(text, str) and text.isprintable() else repr(text)
    return shown if len(shown) <= 200 else f"{shown[:199]}…"


def _number(entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,19}", text) or int(text) >= 2**63:
        raise Fault(f"has the {key} `{_printable(text)[:40]}`, which is not a number of bytes")
    return int(text)


def bits_of(tensor: TensorProto) -> int | None:
    """Return the bits of an element; None for strings and unknown types."""
    try:
        return ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError):
        return None


def _file(base_dir: PathLike | None, location: str) -> os.stat_result | Fault | None:
    """Return the file at a location, or a `Fault` if it is not safe to read; None without a folder."""
    where = f"is in `{_printable(location)}`"
    if not location or not isinstance(location, str):
        return Fault("has no location")
    parts = location.replace("\\", "/").split("/")
    if not parts[0] or re.match("[A-Za-z]:", location):
        return Fault(f"{where}: an absolute path")
    if ".." in parts:
        return Fault(f"{where}: a path that leaves the model's folder")
    if "\\" in location:  # part of a name outside Windows: the file checked would not be the file opened
        return Fault(f"{where}: ONNX separates folders by `/`")
    if base_dir is None:
        return None
    try:
        path, info = Path(base_dir), os.stat(base_dir)
        for segment in (segment for segment in parts if segment not in ("", ".")):
            path /= segment
            info = os.lstat(path)
            if stat.S_ISLNK(info.st_mode):
                return Fault(f"{where}: a path through a symbolic link")
    except FileNotFoundError:
        return Fault(f"{where}, which does not exist")
    except (OSError, ValueError) as error:
        return Fault(f"{where}, which cannot be read: {reason(error)}")
    if not stat.S_ISREG(info.st_mode):
        return Fault(f"{where}, which is not a regular file")
    if info.st_nlink > 1:
        return Fault(f"{where}, a file with several hard links, which another program may own")
    return info


def can_point_at(folder: Path, file: Path) -> bool:
    """True if a model in this folder may have tensors in that file, by its real path."""
    if not file.is_relative_to(folder):
        return False
    return not isinstance(_file(folder, file.relative_to(folder).as_posix()), Fault)


def overlaps(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the non-empty ranges of a file that begin within another one, each with that one."""
    end, before = 0, (0, 0)
    for start, stop in sorted(ranges):
        if start < end:
            yield (start, stop), before
        if stop > end:
            end, before = stop, (start, stop)


def _hint_for(problems: list[str]) -> str:
    text = " ".join(problems)
    if "link" in text:
        return "copy the files instead of linking them (huggingface_hub: `snapshot_download(..., local_dir=...)`)"
    if "no folder" in text:
        return "pass the path of the model instead"
    if "does not exist" in text:
        return "put the data files into the folder of the model"
    if "has changed in" in text:
        return "make the model again from the new file, or restore the old one; `--data data` copies tensors"
    return "the files are damaged or malicious: download them again from a source that you trust"
