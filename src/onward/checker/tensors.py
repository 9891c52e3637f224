"""Rules about the data of tensors, in the file and beside it (OW130 to OW133)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from onnx import GraphProto, TensorProto

from onward.checker.findings import Finding, bare, make_finding, quote
from onward.checker.view.graphs import Site, subgraphs
from onward.checker.view.scope import Subject
from onward.checker.view.shapes import count, of_tensor

_BITS = {
    **dict.fromkeys(("UINT8", "INT8", "BOOL"), 8),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"), 8),
    **dict.fromkeys(("UINT16", "INT16", "FLOAT16", "BFLOAT16"), 16),
    **dict.fromkeys(("FLOAT", "INT32", "UINT32"), 32),
    **dict.fromkeys(("DOUBLE", "INT64", "UINT64", "COMPLEX64"), 64),
    **dict.fromkeys(("UINT4", "INT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("UINT2", "INT2"), 2),
    **dict.fromkeys(("FLOAT6E2M3", "FLOAT6E3M2"), 6),
    "COMPLEX128": 128,
}
BITS = {getattr(TensorProto, name): bits for name, bits in _BITS.items() if hasattr(TensorProto, name)}

_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
_FIELD: dict[int, str] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.COMPLEX64: "float_data",
    TensorProto.DOUBLE: "double_data",
    TensorProto.COMPLEX128: "double_data",
    TensorProto.INT64: "int64_data",
    TensorProto.UINT32: "uint64_data",
    TensorProto.UINT64: "uint64_data",
    TensorProto.STRING: "string_data",
}  # all others: int32_data
_PACKED = tuple(dtype for dtype, bits in BITS.items() if bits < 8)
_PAIRS = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)  # two numbers for one element


class Located(NamedTuple):
    """A tensor and where it is. The place is spelt out only for those that are reported."""

    holder: str | Site
    part: str
    tensor: TensorProto

    @property
    def place(self) -> str:
        if isinstance(self.holder, Site):
            return f"{self.holder.place}/{bare(self.part)}"
        return f'{self.holder}.{self.part}["{bare(self.tensor.name)}"]'


class Extent(NamedTuple):
    """The bytes of a file that a tensor claims."""

    begin: int
    end: int
    place: str


def all_tensors(subject: Subject) -> Iterator[Located]:
    for scope in subject.scopes:
        yield from _in_graph(scope.own.proto, scope.own.place)
    for call in subject.calls:
        for attr in call.node.attribute:
            if attr.HasField("t"):
                yield Located(call.site, attr.name, attr.t)
            yield from (Located(call.site, attr.name, tensor) for tensor in attr.tensors)
        for name, graph in subgraphs(call.node):
            yield from _in_graph(graph, f"{call.place}/{name}")


def _in_graph(graph: GraphProto, holder: str) -> Iterator[Located]:
    yield from (Located(holder, "initializer", tensor) for tensor in graph.initializer)
    for sparse in graph.sparse_initializer:
        yield Located(holder, "sparse_initializer", sparse.values)
        yield Located(holder, "sparse_initializer", sparse.indices)


# ---- in the file


def data_fits(subject: Subject) -> Iterator[Finding]:
    for located in all_tensors(subject):
        tensor = located.tensor
        if tensor.data_location != TensorProto.EXTERNAL and (problem := _misfit(tensor)):
            yield make_finding(
                "OW130", located.place, f"{of_tensor(tensor)}: {problem}", "the file is damaged, or wrongly written"
            )


def _misfit(tensor: TensorProto) -> str | None:
    elements = count(tensor.dims)
    if elements < 0:
        return "a dimension is negative"
    filled = [field for field in (*_FIELDS, "raw_data") if len(getattr(tensor, field))]
    if len(filled) > 1:
        return f"the data stands in {' and in '.join(filled)}"
    if tensor.HasField("raw_data") and tensor.data_type in BITS:
        needed, there = (elements * BITS[tensor.data_type] + 7) // 8, len(tensor.raw_data)
        return None if needed == there else f"needs {needed} bytes, has {there}"
    if tensor.data_type in (TensorProto.UNDEFINED, *_PACKED):
        return None  # how many to a number differs between writers; onnx.checker looks at it
    field = _FIELD.get(tensor.data_type, "int32_data")
    needed, there = elements * (2 if tensor.data_type in _PAIRS else 1), len(getattr(tensor, field))
    return None if needed == there else f"needs {needed} numbers in `{field}`, has {there}"


# ---- beside the file


def external_data(subject: Subject) -> Iterator[Finding]:
    claimed: dict[str, list[Extent]] = {}
    for located in all_tensors(subject):
        tensor = located.tensor
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        place = located.place
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if problem := _bad_location(location) or _bad_file(location, subject.base_dir):
            yield make_finding("OW131", place, problem, "keep external data in plain files in the model's own folder")
            continue
        needed = (max(count(tensor.dims), 0) * BITS.get(tensor.data_type, 0) + 7) // 8
        try:
            offset, length = int(entries.get("offset") or 0), int(entries.get("length") or needed)
        except ValueError:
            offset = length = -1
        if offset < 0 or length < 0:
            yield make_finding("OW131", place, "`offset` or `length` is not a number of bytes")
            continue
        if problem := _too_short(location, subject.base_dir, offset, length, needed):
            yield make_finding("OW132", place, problem, "the file is cut off, or belongs to another model")
        claimed.setdefault(os.path.normpath(location), []).append(Extent(offset, offset + length, place))
    for location, extents in claimed.items():
        yield from _overlaps(location, extents)


def _bad_location(location: str) -> str | None:
    if not location:
        return "the tensor is external but has no `location`"
    if "\0" in location:
        return "the location holds a character that no path can have"
    posix, windows = PurePosixPath(location), PureWindowsPath(location)
    if posix.is_absolute() or windows.drive or windows.root:
        return f"the location {quote(location)} is absolute"
    if ".." in posix.parts or ".." in windows.parts:
        return f"the location {quote(location)} leaves the model's folder"
    return None


def _bad_file(location: str, base_dir: Path | None) -> str | None:
    if base_dir is None:
        return None
    path = base_dir
    try:
        status = path.lstat()
        for part in PurePosixPath(location).parts:
            path /= part
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                return f"{quote(location)} goes through a symbolic link"
        if not stat.S_ISREG(status.st_mode):
            return f"{quote(location)} is not a plain file"
        if status.st_nlink > 1:
            return f"{quote(location)} has several hard links, and onnx refuses to read such files"
    except OSError as error:
        return f"{quote(location)} cannot be read: {(error.strerror or str(error)).lower()}"
    return None


def _too_short(location: str, base_dir: Path | None, offset: int, length: int, needed: int) -> str | None:
    if length < needed:
        return f"`length` is {length} bytes, the tensor needs {needed}"
    if base_dir is None:
        return None
    size = (base_dir / location).stat().st_size
    return None if offset + length <= size else f"{quote(location)} ends at {size}, the tensor at {offset + length}"


def _overlaps(location: str, extents: list[Extent]) -> Iterator[Finding]:
    """Two tensors may be the same bytes (tied weights), but not share some of them."""
    for first, second in pairwise(sorted(extent for extent in extents if extent.begin < extent.end)):
        if second.begin < first.end and (second.begin, second.end) != (first.begin, first.end):
            yield make_finding(
                "OW133",
                second.place,
                f"bytes {second.begin} to {first.end} of {quote(location)} also belong to {first.place}",
                "writing one tensor would change the other: give each its own bytes",
            )


MODEL_RULES = (data_fits, external_data)
