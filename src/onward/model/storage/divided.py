"""A data file that several processes write at once, since each has some of the numbers of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import onnx_ir as ir

from onward.model.storage.checksums import Range, Ranges
from onward.model.storage.files import flush
from onward.model.storage.stream import Sink, write_array
from onward.model.storage.tensor_places import describe_tensor

Parts = Mapping[str, tuple[int, np.ndarray]]
"""Tensor -> numbers of it in a row, and at which of its numbers they begin."""


class DividedTensor(ir.LazyTensor):
    """A tensor that is to be written, of which this process has some numbers in a row, or none."""

    def __init__(self, key: str, part: tuple[int, np.ndarray] | None, like: ir.TensorProtocol):
        super().__init__(self._refuse, like.dtype, **describe_tensor(like))
        self.key, self.part = key, part

    def _refuse(self) -> NoReturn:
        raise ValueError(f"`{self.name}` is in several processes")


class Writers(Protocol):
    """The other processes."""

    def start(self, file: Path, offsets: Mapping[str, int]) -> None:
        """Let them write their parts of tensors, which begin there."""

    def finish(self) -> Ranges:
        """Wait until they have, and it would survive a power failure; fail if one of them could not.

        Returns the checksums of what they wrote.
        """


def write_parts(file: Path, offsets: Mapping[str, int], parts: Parts) -> list[Range]:
    """Write this process's parts of tensors, which begin there, into a file that another one has made."""
    with open(file, "r+b") as stream:
        sink = Sink(stream, checksums=True)
        keys = sorted(parts, key=lambda key: offsets[key])
        ranges = [write_part(sink, offsets[key], parts[key]) for key in keys]
        flush(stream)
    return ranges


def write_part(sink: Sink, offset: int, part: tuple[int, np.ndarray]) -> Range:
    """Write a part of a tensor that begins at `offset`. Return its range, with a checksum if the sink computes them."""
    first, numbers = part
    start = offset + first * numbers.itemsize
    sink.seek(start)
    sink.take_checksum()
    write_array(numbers, sink)
    return start, numbers.nbytes, sink.take_checksum()
