"""Tensors where they lie: a place in a file, read when somebody asks."""

from __future__ import annotations

import dataclasses
import math
import mmap
import operator
from collections.abc import Callable
from pathlib import Path

import numpy as np

from onward.errors import ExternalDataError


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Elements of a file. Two that begin at the same place are the same tensor under two names."""

    path: Path
    offset: int
    """In bytes, of the first element."""
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, as PyTorch counts."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def end(self) -> int:
        """Where the last byte that belongs to it has been."""
        if not math.prod(self.shape):
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the file has the elements in their order, so that others can point at them."""
        return self.strides == contiguous(self.shape) or math.prod(self.shape) < 2

    def array(self) -> np.ndarray:
        """The elements, which the system reads from the file as they are needed. Not to be written to."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        try:
            with open(self.path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ExternalDataError(f"`{self.path}` cannot be read any more: {error}") from error
        if len(data) < self.end:
            raise ExternalDataError(f"`{self.path}` is shorter than it was")
        steps = tuple(stride * self.dtype.itemsize for stride in self.strides)
        return np.ndarray(self.shape, self.dtype, data, self.offset, steps)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie in their order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclasses.dataclass(frozen=True)
class ScatteredTensor:
    """A tensor in several pieces, which are put together when somebody asks."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], Callable[[], StoredTensor]], ...]
    """Where each begins, and how to find it."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def array(self) -> np.ndarray:
        made, filled = np.zeros(self.shape, self.dtype), 0
        for begin, find in self.pieces:
            piece = find()
            end = tuple(map(operator.add, begin, piece.shape))
            if piece.dtype != self.dtype or any(map(operator.gt, end, self.shape)):
                raise ExternalDataError("a piece of a tensor does not fit it")
            made[tuple(map(slice, begin, end))] = piece.array()
            filled += math.prod(piece.shape)
        if filled != made.size:
            raise ExternalDataError(f"{made.size - filled} elements of a tensor are in none of its pieces")
        return made


Tensor = StoredTensor | ScatteredTensor
