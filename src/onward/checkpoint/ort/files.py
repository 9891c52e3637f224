"""The flatbuffer `checkpoint` of onnxruntime-training, both ways."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.checkpoint.ort.flatbuffers import Buffer, Fields, FlatTable, Number, Vector, Writer
from onward.errors import UnsupportedError
from onward.model.storage.files import blame_file, listing, regular
from onward.run_state.tensors import StoredTensor, Tensor, contiguous_strides

IDENTIFIER = b"ODTC"
VERSIONS = (1, 2)
_MOST_INSIDE = 1800 << 20
"""Bytes of tensors in the flatbuffer, which is limited to 2 GiB; more go to a second file."""


def is_ort_checkpoint(path: Path) -> bool:
    try:
        regular(path)
        with open(path, "rb") as file:
            return file.read(8)[4:] == IDENTIFIER
    except OSError:
        return False


def checkpoints_in(folder: Path) -> list[Path]:
    return sorted(Path(entry.path) for entry in listing(folder) if is_ort_checkpoint(Path(entry.path)))


def data_file(path: Path) -> Path:
    """Return the path of the second file, with the tensors of a large checkpoint."""
    return path.with_name(f"{path.name}.data")


def read_ort(path: Path) -> dict[str, Any]:
    """Return the tree of a checkpoint, by the names of its schema. All entries are present."""
    with blame_file(f"`{path}` is not a whole checkpoint of onnxruntime-training"):
        regular(path)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, Buffer(data)).tree()


class _Reader:
    def __init__(self, path: Path, buffer: Buffer):
        self._path = path
        self._buffer = buffer
        self._tensors_read: list[StoredTensor] = []
        self._outside = 0
        """Size in bytes of the second file."""

    def tree(self) -> dict[str, Any]:
        root = self._buffer.root()
        version = root.number(0, "i", 0)
        if version not in VERSIONS:
            raise ValueError(f"version {version} of the format is unknown")
        module = root.table(1)
        if module is not None and module.number(3, "?", False):
            self._outside = regular(data_file(self._path)).st_size
        tree = {
            "version": version,
            "module_state": {} if module is None else self._module(module),
            "optimizer_groups": _by_name((group.text(0), self._group(group)) for group in root.tables(2)),
            "properties": {} if (bag := root.table(3)) is None else _properties(bag),
        }
        self._refuse_overlaps()
        return tree

    def _module(self, table: FlatTable) -> dict[str, Any]:
        nominal = bool(table.number(2, "?", False))
        return {
            "requires_grad_params": self._tensors(table.tables(0), nominal),
            "frozen_params": self._tensors(table.tables(1), nominal),
            "is_nominal_state": nominal,
        }

    def _group(self, table: FlatTable) -> dict[str, Any]:
        states = ((state.text(0), self._tensors(state.tables(1))) for state in table.tables(3))
        return {
            "step": table.number(1, "q", 0),
            "initial_learning_rate": table.number(2, "f", 0.0),
            "optimizer_states": _by_name(states),
        }

    def _tensors(self, tables: Iterable[FlatTable], nominal: bool = False) -> dict[str, StoredTensor]:
        return _by_name((table.text(0), self._tensor(table, nominal)) for table in tables)

    def _tensor(self, table: FlatTable, nominal: bool) -> StoredTensor:
        dtype, shape = _type(table.number(3, "i", 0)), table.numbers(2, "q")
        if any(size < 0 for size in shape):
            raise ValueError(f"a tensor has the shape {list(shape)}")
        size = math.prod(shape) * dtype.itemsize
        offset, content = table.number(6, "q", -1), table.vector(4, 1)
        if nominal and content is None and offset < 0:
            return StoredTensor(self._path, 0, dtype, (0,) * len(shape), contiguous_strides((0,) * len(shape)))
        if offset >= 0:
            path, begin, available = data_file(self._path), offset, min(size, self._outside - offset)
        else:
            path, (begin, available) = self._path, content or (0, 0)
        if available != size:
            raise ValueError(f"a tensor of {dtype}{list(shape)} has {max(available, 0)} bytes")
        tensor = StoredTensor(path, begin, dtype, shape, contiguous_strides(shape))
        self._tensors_read.append(tensor)
        return tensor

    def _refuse_overlaps(self) -> None:
        ends: dict[Path, int] = {}
        for tensor in sorted(self._tensors_read, key=lambda item: item.offset):
            if tensor.nbytes and tensor.offset < ends.get(tensor.path, 0):
                raise ValueError("tensors overlap in it")
            ends[tensor.path] = max(tensor.end, ends.get(tensor.path, 0))


def _type(data_type: int) -> np.dtype:
    try:
        return ir.DataType(data_type).numpy()
    except (ValueError, TypeError):
        raise ValueError(f"{data_type} is not a numeric dtype") from None


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            raise ValueError(f"`{name[:80]}` occurs twice")
        named[name] = value
    return named


_PROPERTIES: tuple[tuple[type, str], ...] = ((int, "q"), (float, "f"), (str, ""))
"""Types of properties in the order of their fields, and the formats of numbers."""


def _properties(properties: FlatTable) -> dict[str, int | float | str]:
    return _by_name(
        (entry.text(0), entry.number(1, format, value_type()) if format else entry.text(1))
        for field, (value_type, format) in enumerate(_PROPERTIES)
        for entry in properties.tables(field)
    )


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_ort(tree: Mapping[str, Any], path: Path, most_inside: int = _MOST_INSIDE) -> None:
    """Write a tree of `read_ort`, with at most `most_inside` bytes of tensors in `path`."""
    module, groups = tree["module_state"], tree["optimizer_groups"]
    states = [momentums for group in groups.values() for momentums in group["optimizer_states"].values()]
    parts = [module["requires_grad_params"], module["frozen_params"], *states]
    large = sum(tensor.nbytes for tensors in parts for tensor in tensors.values()) > most_inside
    beside: list[Tensor] = []
    fields = _Fields(beside if large else None)
    writer = Writer(
        {
            0: Number("i", VERSIONS[-1]),
            1: {
                0: fields.tensors(module["requires_grad_params"]),
                1: fields.tensors(module["frozen_params"]),
                2: Number("?", False),
                3: Number("?", large),
            },
            2: [fields.group(name, group) for name, group in groups.items()],
            3: _bag(tree["properties"]),
        },
        IDENTIFIER,
    )
    with open(path, "wb") as file:
        writer.write_to(file)
    if large:
        with open(data_file(path), "wb") as file:
            for tensor in beside:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                tensor.write_to(file)


_ALIGNMENT = 64


class _Fields:
    """Tables of the schema to write. Tensors for the second file are listed in `beside`."""

    def __init__(self, beside: list[Tensor] | None):
        self._beside = beside
        self._end = 0

    def tensors(self, tensors: Mapping[str, Tensor]) -> list[Fields]:
        return [self._tensor(name, tensor) for name, tensor in tensors.items()]

    def group(self, name: str, group: Mapping[str, Any]) -> Fields:
        states = [
            {0: parameter, 1: self.tensors(momentums)} for parameter, momentums in group["optimizer_states"].items()
        ]
        return {0: name, 1: Number("q", group["step"]), 2: Number("f", group["initial_learning_rate"]), 3: states}

    def _tensor(self, name: str, tensor: Tensor) -> Fields:
        fields = {0: name, 2: Vector("q", tensor.shape), 3: Number("i", int(_data_type(tensor.dtype)))}
        if self._beside is None:
            return {**fields, 4: tensor}
        begin = self._end + -self._end % _ALIGNMENT
        self._end = begin + tensor.nbytes
        self._beside.append(tensor)
        return {**fields, 6: Number("q", begin)}


def _data_type(dtype: np.dtype) -> ir.DataType:
    try:
        return ir.DataType.from_numpy(dtype)
    except TypeError:
        raise UnsupportedError(f"checkpoints of onnxruntime-training cannot hold tensors of {dtype}") from None


def _bag(properties: Mapping[str, Any]) -> Fields:
    entries: dict[int, list[Fields]] = {}
    for field, (value_type, format) in enumerate(_PROPERTIES):
        chosen = {name: value for name, value in properties.items() if type(value) is value_type}
        entries[field] = [{0: name, 1: Number(format, x) if format else x} for name, x in chosen.items()]
    return entries
