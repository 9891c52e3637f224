"""What `torch.save` writes: a zip file with a pickle, and the data of tensors beside it. Read without PyTorch."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from onward.checkpoint.pytorch.pickles import MOST_BYTES, Maker, read_pickle
from onward.checkpoint.pytorch.pickling import Attributed, Name, Object, Persistent, write_pickle
from onward.errors import InvalidModelError, UnsupportedError
from onward.model.storage.containers import BAD_ZIP, LOCAL_HEADER, ZIPPED, members_of, read_stored, stored_range
from onward.model.storage.files import reason, regular
from onward.run_state.tensors import StoredTensor, Tensor, contiguous_strides

_LONGEST_START = 1 << 10
_MOST_REPEATED = 16 << 20
"""Bytes of a tensor that is larger than its data, since it repeats them."""
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How PyTorch before 1.6 began its files."""

TYPES: dict[str, Any] = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8, "bool": np.bool_,
    "uint64": np.uint64, "uint32": np.uint32, "uint16": np.uint16, "uint8": np.uint8,
    "complex64": np.complex64, "complex128": np.complex128,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2, "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip


def is_torch_file(path: Path) -> bool:
    """Whether a file is one of `torch.save`, by what is in it; of one that is not whole, by how it begins."""
    start = b""
    try:
        regular(path)
        with open(path, "rb") as file:
            start = file.read(_LONGEST_START)
            if start.startswith(_LEGACY):
                return True
            with zipfile.ZipFile(file) as archive:
                return any(_is_main_pickle(name) for name in archive.namelist())
    except BAD_ZIP:
        return _is_main_pickle(_first_member(start))


def _first_member(start: bytes) -> str:
    """The name of the first file of an archive, by how it begins; nothing if it is none."""
    if len(start) < LOCAL_HEADER.size or not start.startswith(ZIPPED):
        return ""
    _, length, _ = LOCAL_HEADER.unpack_from(start)
    return start[LOCAL_HEADER.size : LOCAL_HEADER.size + length].decode("utf-8", "replace")


def mentions(path: Path, word: str) -> bool:
    """Whether a word is in the pickle of a file, which is looked at without being read."""
    try:
        with zipfile.ZipFile(path) as archive:
            main = next((info for info in archive.infolist() if _is_main_pickle(info.filename)), None)
            return main is not None and word.encode() in read_stored(archive, main, MOST_BYTES)
    except BAD_ZIP:
        return False


def read_torch_file(path: Path, part: tuple[int, int] | None = None) -> Any:
    """The tree that was saved, with tensors as places in the file. Nothing in it is executed.

    `part` says where it begins and how long it is, in a file that holds several.
    """
    try:
        size = regular(path).st_size
        start, length = part or (0, size)
        if not 0 <= start <= start + length <= size:
            raise ValueError("a part of it lies outside of the file")
        with open(path, "rb") as file:
            file.seek(start)
            if file.read(len(_LEGACY)) == _LEGACY:
                raise UnsupportedError(
                    f"`{path}` is of PyTorch before 1.6, or was saved in its old form",
                    hint="save it again: `torch.save(torch.load(path, weights_only=True), path)`",
                )
            with zipfile.ZipFile(_Window(file, start, length)) as archive:
                return _read(path, archive, start)
    except InvalidModelError:
        raise
    except BAD_ZIP as error:
        what = reason(error).replace("File is not a zip file", "it does not end as one does")
        raise InvalidModelError(
            f"`{path}` is not a whole file of `torch.save`: {what}",
            hint="compare its size with the original's: it may be cut off; if it was packed again, use `torch.save`",
        ) from error


class Appending(io.RawIOBase):
    """The end of a file that is being written, as a file of its own."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.start = file.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self.start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset + self.start if whence == io.SEEK_SET else offset, whence)
        return self.tell()

    def write(self, data: Any) -> int:
        return self._file.write(data)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise ValueError("it leads to a place before the file")
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(min(size, rest) if size >= 0 else rest)
        self._at += len(data)
        return data


def _is_main_pickle(name: str) -> bool:
    return name.count("/") == 1 and name.endswith("/data.pkl")


def _read(path: Path, archive: zipfile.ZipFile, start: int) -> Any:
    members = members_of(archive)
    main = next((name for name in members if _is_main_pickle(name)), None)
    if main is None:
        raise ValueError("it has no `data.pkl`")
    root = main.removesuffix("data.pkl")
    order = members.get(f"{root}byteorder")
    if order is not None and read_stored(archive, order, len(b"little")) != b"little":
        raise UnsupportedError(
            f"`{path}` was written by a machine with the other order of bytes",
            hint="save it on a machine like this one",
        )
    storages = _Storages(path, archive, members, f"{root}data/", start)
    data = read_stored(archive, members[main], MOST_BYTES)
    return read_pickle(data, str(path), makers=_MAKERS, persistent=storages)


class _Storage(NamedTuple):
    """The data of one or several tensors."""

    path: Path
    start: int
    end: int
    dtype: np.dtype


class _Storages:
    """Finds the data that a pickle refers to."""

    def __init__(
        self, path: Path, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], folder: str, start: int
    ):
        self._path = path
        self._begin = start
        self._archive = archive
        self._members = members
        self._folder = folder

    def __call__(self, key: Any) -> _Storage:
        kind, storage, name, _, size = key
        is_known = kind == "storage" and isinstance(storage, Name) and storage.name in _STORAGES
        if not is_known or not isinstance(name, str) or type(size) is not int:
            raise ValueError("it refers to something other than the data of a tensor")
        dtype = np.dtype(TYPES[_STORAGES[storage.name]])
        info = self._members.get(f"{self._folder}{name}")
        if info is None:
            raise ValueError(f"the data of a tensor, `{name[:40]}`, is not there")
        start, length = stored_range(self._archive, info)
        if length < size * dtype.itemsize:
            raise ValueError(f"the data of a tensor, `{info.filename}`, is cut off")
        return _Storage(self._path, self._begin + start, self._begin + start + length, dtype)


# ---- writing ---------------------------------------------------------------------------------------------------------

_NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}
_STORAGE_OF = {name: storage for storage, name in _STORAGES.items() if storage != "UntypedStorage"}
_ALIGNMENT = 64
_ZIP64_EXTRA = 20
"""What `zipfile` puts before our own extra bytes, for members that may be large."""


def write_torch_file(path: Path, tree: Any) -> None:
    """Write a tree as `torch.save` does. Tensors are copied one at a time; names and objects are written, not made."""
    with open(path, "wb") as file:
        write_torch_archive(file, tree, path.stem)


def write_torch_archive(file: BinaryIO | Appending, tree: Any, root: str = "archive") -> None:
    """Write what `torch.save` writes into a file that is open."""
    writing = _Writing()
    main = write_pickle(tree, tensors=writing.reference)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", main)
        archive.writestr(f"{root}/.format_version", "1")
        archive.writestr(f"{root}/.storage_alignment", str(_ALIGNMENT))
        archive.writestr(f"{root}/byteorder", "little")
        for key, tensor in enumerate(writing.stored):
            _write_aligned(archive, f"{root}/data/{key}", tensor)
        archive.writestr(f"{root}/version", "3\n")


def type_name(dtype: np.dtype) -> str:
    """What PyTorch calls a type of numbers."""
    if dtype not in _NAMES:
        raise UnsupportedError(f"PyTorch has no tensors of {dtype}")
    return _NAMES[dtype]


class _Writing:
    """The tensors of a pickle that is being written, each once."""

    def __init__(self) -> None:
        self.stored: list[Tensor] = []
        self._made: dict[Any, Object] = {}

    def reference(self, tensor: Tensor) -> Object:
        key = tensor if isinstance(tensor, StoredTensor) else id(tensor)  # two names of one place stay one tensor
        if key not in self._made:
            self._made[key] = self._call(tensor)
            self.stored.append(tensor)
        return self._made[key]

    def _call(self, tensor: Tensor) -> Object:
        name = type_name(tensor.dtype)
        storage = Name("torch", _STORAGE_OF[name]) if name in _STORAGE_OF else Name("torch.storage", "UntypedStorage")
        size = math.prod(tensor.shape) if name in _STORAGE_OF else tensor.nbytes
        data = Persistent(("storage", storage, str(len(self.stored)), "cpu", size))
        described = (data, 0, tensor.shape, contiguous_strides(tensor.shape), False, Attributed())
        if name in _STORAGE_OF:
            return Object(Name("torch._utils", "_rebuild_tensor_v2"), described)
        return Object(Name("torch._utils", "_rebuild_tensor_v3"), (*described, Name("torch", name)))


def _write_aligned(archive: zipfile.ZipFile, name: str, tensor: Tensor) -> None:
    """Write the data of a tensor so that they begin at a multiple of 64 bytes of the file."""
    assert archive.fp is not None
    info = zipfile.ZipInfo(name)
    start = archive.fp.tell() + 30 + len(name.encode()) + _ZIP64_EXTRA + 4
    gap = -start % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", gap) + b"Z" * gap
    with archive.open(info, "w", force_zip64=True) as member:
        tensor.write_to(member)  # type: ignore[arg-type]


# ---- what names become -----------------------------------------------------------------------------------------------


def _tensor(storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> StoredTensor:
    return _place_tensor(storage, storage.dtype, offset, tuple(shape), tuple(strides))


def _tensor_of_type(
    storage: _Storage,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    grad: Any,
    hooks: Any,
    dtype: Name,
    *_: Any,
) -> StoredTensor:
    """As newer types are written, whose storages have none."""
    if dtype.module != "torch" or dtype.name not in TYPES:
        raise ValueError(f"`{dtype}` is no type of numbers that is known")
    return _place_tensor(storage, np.dtype(TYPES[dtype.name]), offset, tuple(shape), tuple(strides))


def _place_tensor(
    storage: _Storage, dtype: np.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> StoredTensor:
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError("a tensor has no shape that there could be")
    made = StoredTensor(storage.path, storage.start + offset * dtype.itemsize, dtype, shape, strides)
    if made.end > storage.end:
        raise ValueError("a tensor reaches beyond its data")
    if made.nbytes > max(storage.end - storage.start, _MOST_REPEATED):
        raise ValueError(f"a tensor of {list(shape)} repeats few numbers more often than any of a checkpoint")
    return made


def _parameter(data: StoredTensor, *_: Any) -> StoredTensor:
    return data


def _of_class(make: Maker, kind: Any, arguments: tuple[Any, ...], *_: Any) -> Any:
    """A tensor of a class of its own, or with attributes: the tensor."""
    return make(*arguments)


_MAKERS: dict[tuple[str, str], Maker] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_class,
    ("torch", "Size"): tuple,
}
