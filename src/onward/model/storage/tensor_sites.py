"""Sites of tensors in an `onnx_ir` graph, and tensors inside a file or outside."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from onward.errors import ExternalDataError
from onward.model.storage.files import BLOCK, PathLike, Sink, extents

Container = ir.Graph | ir.Function


@dataclass(eq=False)
class TensorSite:
    """A site of a tensor in a graph: an initializer, or an attribute."""

    holder: ir.Value | ir.Node | ir.Function
    attribute: str = ""
    index: int | None = None  # in an attribute that holds several

    @property
    def name(self) -> str:
        segments = (self.holder.name, self.attribute, self.index)
        return "/".join(str(segment) for segment in segments if segment not in ("", None))

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


def sites(*containers: Container) -> list[TensorSite]:
    """Return the site of every tensor in these graphs and functions, nested graphs included."""
    return [site for container in containers for site in _sites(container)]


def _sites(container: Container) -> Iterator[TensorSite]:
    top = container.graph if isinstance(container, ir.Function) else container
    for graph in (top, *top.subgraphs()):
        yield from (TensorSite(value) for value in graph.initializers.values() if value.const_value is not None)
    holders: list[ir.Node | ir.Function] = [container] if isinstance(container, ir.Function) else []
    for holder in (*holders, *top.all_nodes()):
        for attribute in holder.attributes.values():
            if attribute.value is None:
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                yield TensorSite(holder, attribute.name)
            elif attribute.type == ir.AttributeType.TENSORS:
                yield from (TensorSite(holder, attribute.name, index) for index in range(len(attribute.value)))


def hold_data(sites: Iterable[TensorSite], base_dir: PathLike, files: Mapping[Path, HeldFile]) -> None:
    """Point the external tensors of a model to the opened files."""
    folder = os.path.realpath(base_dir)  # the working folder may change
    for site in sites:
        if not is_external(tensor := site.tensor):
            continue
        assert isinstance(tensor, ir.ExternalTensor)
        tensor.base_dir = folder
        if (file := files.get(Path(os.path.realpath(tensor.path)))) is not None:
            site.tensor = in_file(tensor, file)


def in_file(tensor: ir.ExternalTensor, file: HeldFile) -> HeldTensor:
    """Return the tensor in an open file."""
    at = (tensor.location, tensor.offset, tensor.length, tensor.dtype)
    return HeldTensor(file, *at, base_dir=tensor.base_dir, **describe_tensor(tensor))


def is_external(tensor: object) -> bool:
    """True if a tensor is in a file. Only the owner of a subclass knows how to write it."""
    return type(tensor) in (ir.ExternalTensor, HeldTensor)


def nbytes(tensor: ir.TensorProtocol) -> int:
    """Return the bytes that could be external; 0 for strings and for subclasses of other owners."""
    is_foreign = isinstance(tensor, ir.ExternalTensor) and not is_external(tensor)
    return 0 if is_foreign or tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED) else tensor.nbytes


def range_of(tensor: ir.TensorProtocol) -> tuple[Path, int, int] | None:
    """Return file, offset and length of an external tensor."""
    if not is_external(tensor):
        return None
    assert isinstance(tensor, ir.ExternalTensor)
    return Path(os.path.realpath(tensor.path)), tensor.offset or 0, tensor.nbytes


def is_in(tensor: ir.TensorProtocol | None, files: Set[Path]) -> bool:
    """True if a tensor needs only these files."""
    where = range_of(tensor) if tensor is not None else None
    return where is None or where[0] in files


def is_where_it_was_read(tensor: ir.TensorProtocol) -> bool:
    """True if the file that an external tensor names still holds it."""
    return not isinstance(tensor, HeldTensor) or tensor.source.is_named()


def describe_tensor(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """Return the fields of a tensor that do not depend on the storage."""
    keys = {"name": tensor.name or "", "doc_string": tensor.doc_string, "shape": ir.Shape(tensor.shape.numpy())}
    return keys | {"metadata_props": dict(tensor.metadata_props)}


def inside(tensor: ir.TensorProtocol, numbers: np.ndarray | None = None) -> ir.TensorProtocol:
    """Return the tensor in memory, to be written into the model file."""
    return ir.Tensor(tensor.numpy() if numbers is None else numbers, tensor.dtype, **describe_tensor(tensor))


def outside(tensor: ir.TensorProtocol, folder: Path, file: Path, offset: int) -> ir.TensorProtocol:
    """Return the tensor as a reference to bytes in a data file."""
    location = file.relative_to(folder).as_posix()
    return ir.ExternalTensor(
        location, offset, tensor.nbytes, tensor.dtype, base_dir=str(folder), **describe_tensor(tensor)
    )


# ---- files that are held open ----------------------------------------------------------------------------------------

# Data files stay open, so that the tensors of a model do not change: a save may delete a file, and an export may
# replace it under the same name.


class HeldFile:
    """A file of tensors, open as long as one of them lives."""

    def __init__(self, path: Path, file: BinaryIO, info: os.stat_result):
        self.path, self.file, self._info = path, file, info
        self._turn = threading.Lock()
        weakref.finalize(self, file.close)

    def mapped(self) -> mmap.mmap:
        """Return the whole file as mapped memory."""
        self.check()
        return self._mapped

    @functools.cached_property
    def _mapped(self) -> mmap.mmap:
        return mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

    def let_go(self) -> None:
        """Release the memory of pages that were read; a new access reads them again."""
        if "_mapped" in self.__dict__ and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def is_named(self) -> bool:
        """True if the name of the file still refers to it."""
        info = self.check()
        try:
            return os.path.samestat(info, os.stat(self.path))
        except OSError:
            return False

    def check(self) -> os.stat_result:
        """Raise if the file was overwritten: its old content is lost."""
        info = os.fstat(self.file.fileno())
        if (info.st_size, info.st_mtime_ns) != (self._info.st_size, self._info.st_mtime_ns):
            raise ExternalDataError(
                f"`{self.path}` has changed since the model was read: its numbers are lost", hint="load the model again"
            )
        return info

    def copy(self, start: int, size: int, target: BinaryIO | Sink) -> None:
        """Copy bytes to another file. Reads, since mapping a file that shrinks crashes."""
        end = start + size
        while start < end and (block := self._read(start, min(end - start, BLOCK))):
            target.write(block)
            start += len(block)
        self.check()

    def pour(self, start: int, size: int, sink: Sink) -> None:
        """Copy bytes to a new file with holes, within the system where possible."""
        end = start + size
        for begin, stop in extents(self.file.fileno(), start, min(end, self.check().st_size)):
            sink.skip(begin - start)
            start = begin + sink.copy(self.file.fileno(), begin, stop - begin)
            if start < stop:
                self.copy(start, stop - start, sink)
                start = stop
        sink.skip(min(end, self.check().st_size) - start)

    def _read(self, start: int, size: int) -> bytes:
        if hasattr(os, "pread"):  # does not move the position, which forked processes share
            return os.pread(self.file.fileno(), size, start)
        with self._turn:
            self.file.seek(start)
            return self.file.read(size)


_open: weakref.WeakValueDictionary[tuple[int, ...], HeldFile] = weakref.WeakValueDictionary()


def hold_open(path: Path) -> HeldFile | None:
    """Return a data file, opened once for all models; None at the limit of open files."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as it is used)
    except FileNotFoundError:
        raise ExternalDataError(f"the data file `{path}` is gone", hint="load the model again") from None
    except OSError:  # too many open files, or no permission: reading the tensor raises
        return None
    info = os.fstat(file.fileno())
    key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    opened = _open.get(key)
    if opened is not None and opened.path == path:
        file.close()
        return opened
    _open[key] = held_file = HeldFile(path, file, info)
    return held_file


def let_go() -> None:
    """Release the memory of pages of all open files."""
    for file in list(_open.values()):
        file.let_go()


class HeldTensor(ir.ExternalTensor):
    """A tensor in an open file."""

    __slots__ = ("source",)

    def __init__(
        self, source: HeldFile, location: Any, offset: int | None, length: int | None, dtype: Any, **rest: Any
    ):
        super().__init__(location, offset, length, dtype, **rest)
        self.source = source

    def numpy(self) -> np.ndarray:
        if not self.nbytes:
            return np.empty(self.shape.numpy(), self.dtype.numpy())
        start, shape = self.offset or 0, self.shape.numpy()
        if self.dtype.bitwidth < 8:
            packed = np.frombuffer(self.source.mapped(), np.uint8, self.nbytes, start)
            return ir.PackedTensor(packed, self.dtype, shape=ir.Shape(shape)).numpy()
        plain = self.dtype.numpy().newbyteorder("<")
        return np.frombuffer(self.source.mapped(), plain, self.size, start).reshape(shape)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self.numpy().__array__(dtype)

    def tobytes(self) -> bytes:
        start = self.offset or 0
        return self.source.mapped()[start : start + self.nbytes] if self.nbytes else b""

    def tofile(self, file: Any) -> None:
        self.source.copy(self.offset or 0, self.nbytes, file)
