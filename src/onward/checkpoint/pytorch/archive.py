"""Files of `torch.save`, without PyTorch: a zip file with a pickle and the data of tensors."""

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

from onward.checkpoint.pytorch.pickle_objects import Attributed, Name, Object, Persistent, write_pickle
from onward.checkpoint.pytorch.pickle_reader import MOST_BYTES, Maker, read_pickle
from onward.errors import InvalidModelError, UnsupportedError
from onward.model.storage.containers import BAD_ZIP, LOCAL_HEADER, ZIPPED, members_of, read_stored, stored_range
from onward.model.storage.files import reason, regular
from onward.run_state.tensors import StoredTensor, Tensor, contiguous_strides

_LONGEST_START = 1 << 10
_MOST_REPEATED = 16 << 20
"""Largest size in bytes of a tensor that repeats its data."""
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of files of PyTorch before 1.6."""

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
    """True for a file of `torch.save`, also for one that is cut off."""
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
    """Return the name of the first file of an archive, or an empty string."""
    if len(start) < LOCAL_HEADER.size or not start.startswith(ZIPPED):
        return ""
    _, length, _ = LOCAL_HEADER.unpack_from(start)
    return start[LOCAL_HEADER.size : LOCAL_HEADER.size + length].decode("utf-8", "replace")


def mentions(path: Path, word: str) -> bool:
    """True if a word is in the pickle of a file, which is not parsed."""
    try:
        with zipfile.ZipFile(path) as archive:
            main = next((info for info in archive.infolist() if _is_main_pickle(info.filename)), None)
            return main is not None and word.encode() in read_stored(archive, main, MOST_BYTES)
    except BAD_ZIP:
        return False


def read_torch_file(path: Path, section: tuple[int, int] | None = None) -> Any:
    """Return the saved tree, with tensors as locations in the file. Nothing is executed.

    `section` is the start and the length of the archive in a larger file.
    """
    try:
        size = regular(path).st_size
        start, length = section or (0, size)
        if not 0 <= start <= start + length <= size:
            raise ValueError("a part lies outside of the file")
        with open(path, "rb") as file:
            file.seek(start)
            if file.read(len(_LEGACY)) == _LEGACY:
                raise UnsupportedError(
                    f"`{path}` has the format of PyTorch before 1.6",
                    hint="save it again: `torch.save(torch.load(path, weights_only=True), path)`",
                )
            with zipfile.ZipFile(_Window(file, start, length)) as archive:
                return _read(path, archive, start)
    except InvalidModelError:
        raise
    except BAD_ZIP as error:
        cause = reason(error).replace("File is not a zip file", "it does not end as one does")
        raise InvalidModelError(
            f"`{path}` is not a whole file of `torch.save`: {cause}",
            hint="compare its size with the original: it may be cut off or packed again; save it with `torch.save`",
        ) from error


class Appending(io.RawIOBase):
    """End of a file that is being written, as a file."""

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
    """Section of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise ValueError("an offset lies before the file")
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
            f"`{path}` was written by a machine with another byte order",
            hint="save it on a machine with the byte order of this one",
        )

    def storage(key: Any) -> _Storage:
        tag, storage_class, name, _, size = key
        is_known = tag == "storage" and isinstance(storage_class, Name) and storage_class.name in _STORAGES
        if not is_known or not isinstance(name, str) or type(size) is not int:
            raise ValueError("it refers to data that is not of a tensor")
        dtype = np.dtype(TYPES[_STORAGES[storage_class.name]])
        info = members.get(f"{root}data/{name}")
        if info is None:
            raise ValueError(f"the data of a tensor, `{name[:40]}`, is missing")
        begin, length = stored_range(archive, info)
        if length < size * dtype.itemsize:
            raise ValueError(f"the data of a tensor, `{info.filename}`, is cut off")
        return _Storage(path, start + begin, start + begin + length, dtype)

    data = read_stored(archive, members[main], MOST_BYTES)
    return read_pickle(data, str(path), makers=_MAKERS, persistent=storage)


class _Storage(NamedTuple):
    """Data of one or several tensors."""

    path: Path
    start: int
    end: int
    dtype: np.dtype


# ---- writing ---------------------------------------------------------------------------------------------------------

_NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}
_STORAGE_OF = {name: storage for storage, name in _STORAGES.items() if storage != "UntypedStorage"}
_ALIGNMENT = 64
_ZIP64_EXTRA = 20
"""Bytes that `zipfile` writes before our extra field, for members that may be large."""


def write_torch_file(path: Path, tree: Any) -> None:
    """Write a tree as `torch.save` does, one tensor at a time. Nothing is imported or called."""
    with open(path, "wb") as file:
        write_torch_archive(file, tree, path.stem)


def write_torch_archive(file: BinaryIO | Appending, tree: Any, root: str = "archive") -> None:
    """Write the archive of `torch.save` into an open file."""
    stored: list[Tensor] = []
    calls: dict[Any, Object] = {}

    def reference(tensor: Tensor) -> Object:
        key = tensor if isinstance(tensor, StoredTensor) else id(tensor)  # equal locations are one tensor
        if key not in calls:
            calls[key] = _call(tensor, len(stored))
            stored.append(tensor)
        return calls[key]

    main = write_pickle(tree, tensors=reference)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", main)
        archive.writestr(f"{root}/.format_version", "1")
        archive.writestr(f"{root}/.storage_alignment", str(_ALIGNMENT))
        archive.writestr(f"{root}/byteorder", "little")
        for key, tensor in enumerate(stored):
            _write_aligned(archive, f"{root}/data/{key}", tensor)
        archive.writestr(f"{root}/version", "3\n")


def type_name(dtype: np.dtype) -> str:
    """Return PyTorch's name of a dtype."""
    if dtype not in _NAMES:
        raise UnsupportedError(f"PyTorch has no tensors of {dtype}")
    return _NAMES[dtype]


def _call(tensor: Tensor, number: int) -> Object:
    """Return the call of PyTorch that makes a tensor of the storage with a number."""
    name = type_name(tensor.dtype)
    storage = Name("torch", _STORAGE_OF[name]) if name in _STORAGE_OF else Name("torch.storage", "UntypedStorage")
    size = math.prod(tensor.shape) if name in _STORAGE_OF else tensor.nbytes
    data = Persistent(("storage", storage, str(number), "cpu", size))
    arguments = (data, 0, tensor.shape, contiguous_strides(tensor.shape), False, Attributed())
    if name in _STORAGE_OF:
        return Object(Name("torch._utils", "_rebuild_tensor_v2"), arguments)
    return Object(Name("torch._utils", "_rebuild_tensor_v3"), (*arguments, Name("torch", name)))


def _write_aligned(archive: zipfile.ZipFile, name: str, tensor: Tensor) -> None:
    """Write the data of a tensor at a multiple of 64 bytes."""
    assert archive.fp is not None
    info = zipfile.ZipInfo(name)
    start = archive.fp.tell() + 30 + len(name.encode()) + _ZIP64_EXTRA + 4
    gap = -start % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", gap) + b"Z" * gap
    with archive.open(info, "w", force_zip64=True) as member:
        tensor.write_to(member)  # type: ignore[arg-type]


# ---- what names become -----------------------------------------------------------------------------------------------


def _tensor(storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> StoredTensor:
    return _checked_tensor(storage, storage.dtype, offset, tuple(shape), tuple(strides))


def _tensor_of_type(
    storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *others: Any
) -> StoredTensor:
    """Return a tensor of a newer dtype, whose storage has none."""
    dtype = others[2]  # after `requires_grad` and the hooks
    if dtype.module != "torch" or dtype.name not in TYPES:
        raise ValueError(f"`{dtype}` is not a known dtype")
    return _checked_tensor(storage, np.dtype(TYPES[dtype.name]), offset, tuple(shape), tuple(strides))


def _checked_tensor(
    storage: _Storage, dtype: np.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> StoredTensor:
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError("a tensor has an invalid shape")
    tensor = StoredTensor(storage.path, storage.start + offset * dtype.itemsize, dtype, shape, strides)
    if tensor.end > storage.end:
        raise ValueError("a tensor is larger than its data")
    if tensor.nbytes > max(storage.end - storage.start, _MOST_REPEATED):
        raise ValueError(f"a tensor of {list(shape)} repeats its data too often")
    return tensor


_MAKERS: dict[tuple[str, str], Maker] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_type,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda make, _class, arguments, *_: make(*arguments),
    ("torch", "Size"): tuple,
}
"""Functions of PyTorch -> what they make here. Subclasses and attributes of tensors are dropped."""
