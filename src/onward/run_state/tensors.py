"""Tensors that stay in their files until they are read."""

from __future__ import annotations

import abc
import dataclasses
import math
import mmap
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from onward.errors import ExternalDataError, InvalidModelError
from onward.model.storage.files import advance
from onward.model.storage.tensor_sites import HeldTensor, hold_open, let_go

_BLOCK = 16 << 20
"""Size in bytes of a copied block."""
_CHANGED = "do not change the files of a checkpoint until the result is written"


class Tensor(abc.ABC):
    """Tensor whose elements are read by `array` and `write_to` only."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @abc.abstractmethod
    def array(self) -> np.ndarray:
        """Return the elements. Do not write to them."""

    def write_to(self, file: BinaryIO) -> None:
        """Write the elements in order, in blocks if possible."""
        flat = np.ascontiguousarray(self.array()).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _BLOCK):
            file.write(flat[start : start + _BLOCK].data)
            advance(min(flat.size - start, _BLOCK))


@dataclasses.dataclass(frozen=True)
class StoredTensor(Tensor):
    """Tensor in a file. Equal locations are the same tensor under two names."""

    path: Path
    offset: int
    """Offset in bytes of the first element."""
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements, as in PyTorch."""

    def __post_init__(self) -> None:
        _refuse_impossible(self)

    @property
    def end(self) -> int:
        """Return the offset in bytes one past the last element."""
        if not math.prod(self.shape):
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the file has the elements in order, so that other files can refer to them."""
        return self.strides == contiguous_strides(self.shape) or math.prod(self.shape) < 2

    def array(self) -> np.ndarray:
        """Return the elements, which are mapped from the file."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        try:
            with open(self.path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ExternalDataError(f"`{self.path}` cannot be read: {error}", hint=_CHANGED) from error
        if len(data) < self.end:
            raise ExternalDataError(f"`{self.path}` is shorter than it was", hint=_CHANGED)
        steps = tuple(stride * self.dtype.itemsize for stride in self.strides)
        return np.ndarray(self.shape, self.dtype, data, self.offset, steps)

    def write_to(self, file: BinaryIO) -> None:
        if not self.is_contiguous:
            super().write_to(file)
            return
        with open(self.path, "rb") as source:
            source.seek(self.offset)
            left = self.nbytes
            while left and (block := source.read(min(left, _BLOCK))):
                file.write(block)
                left -= len(block)
                advance(len(block))
        if left:
            raise ExternalDataError(f"`{self.path}` is shorter than it was", hint=_CHANGED)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor with its elements in order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclasses.dataclass(frozen=True)
class ScatteredTensor(Tensor):
    """Tensor in pieces, which are assembled when it is read."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], Callable[[], Tensor]], ...]
    """Start and reader of each piece."""

    def __post_init__(self) -> None:
        _refuse_impossible(self)

    def array(self) -> np.ndarray:
        pieces = [(begin, find()) for begin, find in self.pieces]
        missing = math.prod(self.shape) - sum(math.prod(piece.shape) for _, piece in pieces)
        if missing:  # which is known before there is room for all of them
            raise ExternalDataError(f"{missing} elements of a tensor are in none of its pieces", hint=_CHANGED)
        result = np.zeros(self.shape, self.dtype)
        for begin, piece in pieces:
            end = tuple(map(operator.add, begin, piece.shape))
            if piece.dtype != self.dtype or len(begin) != len(self.shape) or any(map(operator.gt, end, self.shape)):
                raise ExternalDataError("a piece of a tensor does not fit its shape or type", hint=_CHANGED)
            result[tuple(map(slice, begin, end))] = piece.array()
        return result


@dataclasses.dataclass(frozen=True)
class JoinedTensor(Tensor):
    """Tensor whose elements are those of its pieces, one after another."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        _refuse_impossible(self)
        if math.prod(self.shape) != sum(math.prod(piece.shape) for piece in self.pieces):
            raise InvalidModelError(f"the pieces of a tensor of {list(self.shape)} have another size")

    def array(self) -> np.ndarray:
        return np.concatenate([piece.array().reshape(-1) for piece in self.pieces]).reshape(self.shape)

    def write_to(self, file: BinaryIO) -> None:
        for piece in self.pieces:
            piece.write_to(file)


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayTensor(Tensor):
    """Tensor in memory."""

    elements: np.ndarray

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.elements.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.elements.shape

    def array(self) -> np.ndarray:
        return self.elements


@dataclasses.dataclass(frozen=True, eq=False)
class ModelTensor(Tensor):
    """Tensor of an ONNX model."""

    value: ir.TensorProtocol

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.value.dtype.numpy()

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.value.shape.numpy())

    def array(self) -> np.ndarray:
        let_go()  # of earlier files
        return self.value.numpy()

    def write_to(self, file: BinaryIO) -> None:
        if isinstance(self.value, HeldTensor):
            self.value.source.copy(self.value.offset or 0, self.nbytes, file)
            advance(self.nbytes)
        else:
            super().write_to(file)


@dataclasses.dataclass(frozen=True, eq=False)
class ComputedTensor(Tensor):
    """Tensor that a function computes from others: transposed, cut, converted."""

    dtype: np.dtype
    shape: tuple[int, ...]
    compute: Callable[[], np.ndarray]

    def array(self) -> np.ndarray:
        array = self.compute()
        if array.dtype != self.dtype or array.shape != self.shape:
            expected = f"{self.dtype}{list(self.shape)}"
            raise ExternalDataError(f"a tensor of {expected} is {array.dtype}{list(array.shape)}", hint=_CHANGED)
        return array


@dataclasses.dataclass(frozen=True, eq=False)
class ConvertedTensor(Tensor):
    """Tensor in another type, converted in blocks when it is written."""

    dtype: np.dtype
    of: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.of.shape

    def array(self) -> np.ndarray:
        return self.of.array().astype(self.dtype)

    def write_to(self, file: BinaryIO) -> None:
        flat, count = self.of.array().reshape(-1), _BLOCK // self.dtype.itemsize
        for start in range(0, flat.size, count):
            block = flat[start : start + count].astype(self.dtype)
            file.write(block.view(np.uint8).data)
            advance(block.nbytes)


_MOST_AXES = 64
"""Limit of numpy."""


def _refuse_impossible(tensor: Tensor) -> None:
    """Raise an InvalidModelError for a shape that no array can have."""
    sizes = [size for size in tensor.shape if size]
    is_too_large = math.prod(sizes) * tensor.dtype.itemsize >= 1 << 63
    if is_too_large or len(tensor.shape) > _MOST_AXES or any(size < 0 for size in sizes):
        raise InvalidModelError(f"a tensor has the shape {list(tensor.shape)[:_MOST_AXES]}, which none can have")


def transpose(tensor: Tensor) -> Tensor:
    """Return a matrix with its axes in reverse order."""
    shape = tensor.shape[::-1]
    if isinstance(tensor, StoredTensor):
        return dataclasses.replace(tensor, shape=shape, strides=tensor.strides[::-1])
    return ComputedTensor(tensor.dtype, shape, lambda: tensor.array().T)


def convert_dtype(tensor: Tensor, dtype: np.dtype) -> Tensor:
    """Return a tensor in another type."""
    if tensor.dtype == dtype:
        return tensor
    if isinstance(tensor, JoinedTensor):
        return JoinedTensor(dtype, tensor.shape, tuple(convert_dtype(piece, dtype) for piece in tensor.pieces))
    return ConvertedTensor(dtype, tensor)


def as_tensor(value: Any) -> Tensor:
    """Return a tensor for a tensor or number."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value) if isinstance(value, int | float | complex | np.generic | np.ndarray) else None
    if array is None or array.dtype.hasobject:
        raise InvalidModelError(f"the checkpoint has a `{type(value).__name__}` where a number would be")
    return ArrayTensor(array)


def is_number(value: Any) -> bool:
    """True for one number, as a tensor or itself."""
    return math.prod(value.shape) == 1 if isinstance(value, Tensor) else isinstance(value, int | float | np.number)


def number_of(value: Any) -> Any:
    """Return a number, which may be a tensor."""
    tensor = as_tensor(value)
    if not is_number(tensor):
        raise InvalidModelError(f"the checkpoint has a tensor of {list(tensor.shape)} where a number would be")
    return tensor.array().item()


def count_of(value: Any) -> int:
    """Return a number that counts something."""
    number = number_of(value)
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise InvalidModelError(f"something is counted as {number} in the checkpoint")
    return int(number)


def as_initializer(tensor: Tensor, name: str, tags: Mapping[str, str] | None = None) -> ir.TensorProtocol:
    """Return a tensor for a model, with a name and tags."""
    fields: dict[str, Any] = {
        "dtype": ir.DataType.from_numpy(tensor.dtype),
        "shape": ir.Shape(tensor.shape),
        "name": name,
        "metadata_props": dict(tags or {}),
    }
    if isinstance(tensor, StoredTensor) and tensor.is_contiguous and tensor.nbytes:
        path = Path(os.path.realpath(tensor.path))
        source = hold_open(path)
        if source is not None:
            location = (source, path.name, tensor.offset, tensor.nbytes)
            return HeldTensor(*location, base_dir=str(path.parent), **fields)
    if isinstance(tensor, ModelTensor | ArrayTensor):
        return ir.Tensor(tensor.array(), **fields)
    return ir.LazyTensor(lambda: ir.Tensor(tensor.array(), dtype=fields["dtype"]), **fields)
