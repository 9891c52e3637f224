"""Data files: names, layouts (plain and safetensors), writing whole or in shards."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import onnx_ir as ir

from onward.model.storage.checksums import Range, Ranges
from onward.model.storage.containers import SAFETENSORS_TYPES, safetensors_head
from onward.model.storage.files import PAGE, Sink, announce, flush, is_repeated, listing, write_array
from onward.model.storage.tensor_sites import HeldTensor, TensorSite, describe_tensor, let_go, nbytes, outside, range_of
from onward.model.storage.transaction import Transaction

LARGE, ALIGNMENT = 2**20, 64  # large tensors begin on a page, so that each can be mapped separately

# Types that every reader of safetensors knows: an unknown one makes the whole file unreadable.
_SAFETENSORS = {ir.DataType.from_numpy(np.dtype(dtype)): name for name, dtype in SAFETENSORS_TYPES.items()}


@dataclass
class _Piece:
    """Bytes that are written once, and the sites that share them (tied weights)."""

    tensor: ir.TensorProtocol
    sites: list[TensorSite]


def write_data(
    tensors: dict[TensorSite, ir.TensorProtocol],
    suffix: str,
    target: Path,
    transaction: Transaction,
    shard_bytes: int | None,
    writers: Writers | None = None,
    ranges: dict[str, list[Range]] | None = None,
) -> dict[TensorSite, ir.TensorProtocol]:
    """Write external tensors one by one; return references to them, and add checksums to `ranges`."""
    layout = _safetensors_layout if suffix == "safetensors" else _plain_layout
    # `m.data`, `m.1.data`, ... Numbers only rise: a process that has the old model open must not read new data.
    names_in_use = [_own_names(target, suffix).fullmatch(entry.name) for entry in listing(target.parent)]
    first = max((int(match[1] or 0) + 1 for match in names_in_use if match), default=0)
    stem = target.name.removesuffix(".onnx")
    names = (target.with_name(f"{stem}.{n}.{suffix}" if n else f"{stem}.{suffix}") for n in itertools.count(first))
    pieces = _pieces(tensors)
    announce(sum(piece.tensor.nbytes for piece in pieces))
    future = {}
    for shard in _shards(pieces, shard_bytes):
        path, file = transaction.create_data(names)
        with file:
            sink = Sink(file, checksums=ranges is not None)
            head, offsets = layout(shard)
            if writers is not None:
                writers.start(path, {x.tensor.key: at for x, at in offsets if isinstance(x.tensor, DividedTensor)})
            file.write(head)
            for piece, offset in offsets:
                sink.seek(offset)
                written = _copy(piece.tensor, sink)
                if ranges is not None and written is not None:
                    ranges.setdefault(path.name, []).append(written)
                for site in piece.sites:
                    future[site] = outside(tensors[site], target.parent, path, offset)
            sink.finish()
            flush(file)
    return future


def _pieces(tensors: dict[TensorSite, ir.TensorProtocol]) -> list[_Piece]:
    pieces: dict[object, _Piece] = {}
    for site, tensor in tensors.items():
        pieces.setdefault(_bytes_of(tensor), _Piece(tensor, [])).sites.append(site)
    return list(pieces.values())


def _bytes_of(tensor: ir.TensorProtocol) -> object:
    """Return a key of a tensor's bytes. A file name may refer to different files over time."""
    if isinstance(tensor, HeldTensor):
        return tensor.source, tensor.offset, tensor.nbytes
    return range_of(tensor) or id(tensor)


def spared_bytes(tensors: dict[TensorSite, ir.TensorProtocol]) -> int:
    """Return the bytes that a data file saves against a model file: zeros and shared tensors."""
    pieces = _pieces(tensors)
    needed = 0
    for piece in pieces:
        array = piece.tensor.raw if isinstance(piece.tensor, ir.Tensor) else None
        is_zero = isinstance(array, np.ndarray) and is_repeated(array) and not any(array.flat[0].tobytes())
        needed += 0 if is_zero else nbytes(piece.tensor)
    return sum(map(nbytes, tensors.values())) - needed


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
    """Return tensors widest type first: aligned, as the format has no gaps."""
    entries: dict[str, object] = {}
    offsets, end = [], 0
    for piece in sorted(pieces, key=lambda piece: -piece.tensor.dtype.bitwidth):
        size, dtype = piece.tensor.nbytes, _SAFETENSORS.get(piece.tensor.dtype)
        shape = piece.tensor.shape.numpy() if dtype else (size,)
        key = _unused_key(piece.sites[0].name, entries)
        entries[key] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": (end, end + size)}
        offsets.append((piece, end))
        end += size
    head = safetensors_head(entries, ALIGNMENT)
    return head, [(piece, len(head) + offset) for piece, offset in offsets]


def _unused_key(name: str, taken: Iterable[str]) -> str:
    """Return a fresh key: steps may share names of counters, and `__metadata__` is reserved."""
    candidates = itertools.chain([name], (f"{name}#{n}" for n in itertools.count(2)))
    return next(key for key in candidates if key not in taken and key != "__metadata__")


def _copy(tensor: ir.TensorProtocol, sink: Sink) -> Range | None:
    """Write a tensor; return the written range, if this process writes any."""
    start = sink.tell()
    if isinstance(tensor, DividedTensor):
        written = write_range(sink, start, tensor.range) if tensor.range is not None else None
        sink.seek(start + tensor.nbytes)
        return written
    sink.take_checksum()
    _put(tensor, sink)
    if (size := sink.tell() - start) != tensor.nbytes:
        raise ValueError(f"`{tensor.name}` has {size} bytes, but its type and shape need {tensor.nbytes}")
    return start, size, sink.take_checksum()


def _put(tensor: ir.TensorProtocol, sink: Sink) -> None:
    if isinstance(tensor, HeldTensor):
        tensor.source.pour(tensor.offset or 0, tensor.nbytes, sink)
    elif isinstance(tensor, ir.LazyTensor):
        _put(tensor.raw(), sink)
        let_go()  # pages of the tensors from which it was computed
    elif isinstance(tensor, ir.Tensor) and tensor.dtype.bitwidth >= 8 and sys.byteorder == "little":
        write_array(tensor.numpy(), sink)
    elif hasattr(tensor, "tofile"):
        tensor.tofile(sink)
    else:
        sink.write(tensor.tobytes())


def _own_names(target: Path, suffix: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(target.name.removesuffix('.onnx'))}(?:\.([0-9]+))?\.(?:{suffix})")


def is_own(target: Path, file: Path) -> bool:
    """True if a data file has a name that Onward generates, so that it may be deleted."""
    return file.parent == target.parent and bool(_own_names(target, "data|safetensors").fullmatch(file.name))


# ---- data files that several processes write -------------------------------------------------------------------------


Parts = Mapping[str, tuple[int, np.ndarray]]
"""Tensor -> consecutive numbers of it, and the index of the first."""


class DividedTensor(ir.LazyTensor):
    """A tensor of which this process has a range of numbers, or none."""

    def __init__(self, key: str, numbers: tuple[int, np.ndarray] | None, like: ir.TensorProtocol):
        super().__init__(self._refuse, like.dtype, **describe_tensor(like))
        self.key, self.range = key, numbers

    def _refuse(self) -> NoReturn:
        raise ValueError(f"`{self.name}` is divided among processes")


class Writers(Protocol):
    """The other processes."""

    def start(self, file: Path, offsets: Mapping[str, int]) -> None:
        """Let the other processes write their ranges of tensors, which begin at `offsets`."""

    def finish(self) -> Ranges:
        """Wait until the other processes have flushed; return their checksums. Raises if one
        failed."""


def write_parts(file: Path, offsets: Mapping[str, int], parts: Parts) -> list[Range]:
    """Write this process's ranges of tensors into a file that another process has created."""
    with open(file, "r+b") as stream:
        sink = Sink(stream, checksums=True)
        keys = sorted(parts, key=lambda key: offsets[key])
        ranges = [write_range(sink, offsets[key], parts[key]) for key in keys]
        flush(stream)
    return ranges


def write_range(sink: Sink, offset: int, piece: tuple[int, np.ndarray]) -> Range:
    """Write a range of a tensor at `offset`. Return it, with the checksum of the sink."""
    first, numbers = piece
    start = offset + first * numbers.itemsize
    sink.seek(start)
    sink.take_checksum()
    write_array(numbers, sink)
    return start, numbers.nbytes, sink.take_checksum()
