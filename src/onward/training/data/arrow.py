"""Arrow data: `.arrow` and `.feather` files, and datasets that Hugging Face `datasets` saved to a
folder.

These files are memory-mapped, unlike others: only Arrow knows where their rows are, and it needs
the whole file. If a mapped file shrinks, the process ends, so its size is checked before each
batch. Mapped pages count as memory of the process, but the system can reclaim them. Compressed
files would be copied to memory whole, so they are converted once, like CSV.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import (
    Batch,
    Column,
    Dataset,
    check_names,
    check_not_empty,
    gather,
    optional_package,
)
from onward.training.data.files import UNCHANGED, Records, check_file
from onward.training.data.images import Decoder, ImageFormat
from onward.training.data.views import concatenate


def pyarrow() -> Any:
    return optional_package("pyarrow", "reading Arrow and Parquet files")


class Reader:
    """Converter from Arrow batches to arrays, with shapes and image formats of the first row."""

    def __init__(self, first: Any, images: ImageFormat, origin: str):
        check_names(first.schema.names, origin)
        self._origin = origin
        self._decoders: dict[str, Decoder] = {}
        self._classes = _class_names(first.schema)
        self.columns: Mapping[str, Column] = {
            name: self._column(name, _storage(values).slice(0, 1), images)
            for name, values in zip(first.schema.names, first.columns, strict=True)
        }

    def of(self, origin: str) -> Reader:
        """Return the reader for another file."""
        reader = copy.copy(self)
        reader._origin = origin
        return reader

    def is_encoded(self, name: str) -> bool:
        """True if the values of a column are decoded one by one: strings and encoded images."""
        return name in self._decoders or self.columns[name].dtype.hasobject

    def batch(self, names: Sequence[str], batch: Any, first: int) -> Batch:
        """Return the named columns of a batch. `first` is the number of its first row."""
        rows = range(first, first + batch.num_rows)
        return {name: self.array(name, batch.column(name), rows) for name in names}

    def array(self, name: str, values: Any, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the values of a column. `rows` are their numbers, for messages."""
        column, origin, values = self.columns[name], f"column `{name}` of {self._origin}", _storage(values)
        if values.null_count:
            row = rows[int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))]
            raise DataError(f"{origin} has no value in row {row:,}", hint="fill in a value, or remove the row")
        if name in self._decoders:
            images = []
            for row, encoded in zip(rows, values.field("bytes").to_pylist(), strict=True):
                if encoded is None:
                    message = f"row {row:,} in {origin} is a file name, not an image"
                    raise DataError(message, hint="save the dataset with embedded images")
                images.append(self._decoders[name](encoded, f"row {row:,} in {origin}"))
            return np.stack(images)
        if column.dtype.hasobject:
            return np.array(values.to_pylist(), object)
        if column.dtype.kind == "U":
            raise DataError(f"cannot train on {origin}: it is {column}", hint="encode it as numbers")
        flat, shape = _flatten(values, origin)
        if shape != column.shape:
            raise DataError(f"{origin} has rows of different shapes: {list(column.shape)} and {list(shape)}", hint=_PAD)
        return flat.reshape(len(values), *shape).astype(column.dtype, copy=False)

    def _column(self, name: str, first: Any, images: ImageFormat) -> Column:
        origin = f"row 0 in column `{name}` of {self._origin}"
        if _is_image(first.type) and (encoded := first.field("bytes")[0].as_py()):
            self._decoders[name] = Decoder(images, encoded, origin)
            return self._decoders[name].column
        if pyarrow().types.is_string(first.type) or pyarrow().types.is_large_string(first.type):
            return Column(np.dtype(object))
        if not _is_numeric(first.type):
            return Column(np.dtype(str), remark=str(first.type))
        if first.null_count:
            return Column(np.dtype(str), remark="no value in row 0")
        flat, shape = _flatten(first, origin)
        return Column(flat.dtype, shape, self._classes.get(name))


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names that `datasets` stores in a schema, by column."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        labels = {name: feature for name, feature in features.items() if feature.get("_type") == "ClassLabel"}
        return {name: tuple(map(str, feature["names"])) for name, feature in labels.items() if feature.get("names")}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not written by `datasets`
        return {}


_PAD = "pad them to one length"


def _flatten(values: Any, origin: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the numbers in nested lists, and the shape of each row."""
    types = pyarrow().types
    if isinstance(values.type, pyarrow().FixedShapeTensorType):
        return _tensors(values, origin)
    shape: list[int] = []
    while _is_list(values.type):
        if types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
        else:
            lengths = values.value_lengths().to_numpy(zero_copy_only=False)
            shape.append(int(lengths[0]) if len(lengths) else 0)
            if (lengths != shape[-1]).any():
                other = int(lengths[lengths != shape[-1]][0])
                raise DataError(f"{origin} has lists of different lengths: {shape[-1]} and {other}", hint=_PAD)
        values = values.flatten()
    if values.null_count:
        raise DataError(f"{origin} has lists with missing numbers")
    return values.to_numpy(zero_copy_only=False), tuple(shape)


def _tensors(values: Any, origin: str) -> tuple[np.ndarray, tuple[int, ...]]:
    stored = values.storage.flatten().to_numpy(zero_copy_only=False).reshape(len(values), *values.type.shape)
    permutation = values.type.permutation or list(range(len(values.type.shape)))
    if [permutation[dim] for dim in permutation] != sorted(permutation):  # pyarrow writes the inverse
        raise DataError(f"{origin} has tensors with an ambiguous permutation", hint="write them in C order")
    array = stored.transpose(0, *(dim + 1 for dim in permutation))
    return array, array.shape[1:]


def _storage(values: Any) -> Any:
    """Return the stored values, without the extension types of `datasets`. Tensors stay tensors."""
    pa = pyarrow()
    while isinstance(values.type, pa.BaseExtensionType) and not isinstance(values.type, pa.FixedShapeTensorType):
        values = values.storage
    return values


def _is_list(arrow_type: Any) -> bool:
    types = pyarrow().types
    return types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type)


def _is_numeric(arrow_type: Any) -> bool:
    types = pyarrow().types
    if isinstance(arrow_type, pyarrow().FixedShapeTensorType):
        return True
    while _is_list(arrow_type):
        arrow_type = arrow_type.value_type
    return types.is_integer(arrow_type) or types.is_floating(arrow_type) or types.is_boolean(arrow_type)


def _is_image(arrow_type: Any) -> bool:
    """True if a column has the type that `datasets` gives to images."""
    return pyarrow().types.is_struct(arrow_type) and {field.name for field in arrow_type} == {"bytes", "path"}


# ---- files -----------------------------------------------------------------------------------------------------------


def open_arrow(path: Path, images: ImageFormat) -> Dataset:
    file = _File(path, is_mapped=True)
    lengths, is_mapped = _survey(file)
    check_not_empty(sum(lengths), str(path))
    if is_mapped:
        return _Mapped(path, [batch for batch in file if batch.num_rows], images)
    return _convert_once(path, sum(lengths), images)


def open_saved(folder: Path, images: ImageFormat) -> Dataset:
    """Open a folder that `Dataset.save_to_disk` wrote, without importing `datasets`."""
    if (folder / "dataset_dict.json").exists():
        splits = [str(split) for split in _json(folder / "dataset_dict.json").get("splits", [])]
        hint = "pass one: " + " or ".join(str(folder / split) for split in splits)
        raise DataError(f"{folder} holds {len(splits)} datasets: {', '.join(splits)}", hint=hint)
    try:
        files = [folder / Path(file["filename"]).name for file in _json(folder / "state.json")["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{folder / 'state.json'} does not name the files of the dataset") from None
    check_not_empty(len(files), str(folder))
    return concatenate([open_arrow(file, images) for file in files], folder.name)


class _Mapped(Dataset):
    """Rows of a memory-mapped file."""

    def __init__(self, path: Path, batches: list[Any], images: ImageFormat):
        self._reader = Reader(batches[0], images, path.name)
        super().__init__(self._reader.columns, sum(batch.num_rows for batch in batches), path.name)
        self._path, self._size = path, path.stat().st_size
        self._batches = batches
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._views: dict[tuple[str, int], np.ndarray] = {}

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        with suppress(OSError):  # the file was deleted; the open mapping can still be read
            if self._path.stat().st_size < self._size:
                raise DataError(f"{self._path} has shrunk since it was opened", hint=UNCHANGED)
        return gather(
            self._starts, indices, lambda number, rows: {name: self._rows(name, number, rows) for name in names}
        )

    def _rows(self, name: str, number: int, rows: np.ndarray) -> np.ndarray:
        """Return rows of one batch. Numbers are read in place: Arrow's own `take` is much slower."""
        values, start = self._batches[number].column(name), int(self._starts[number])
        if self._reader.is_encoded(name):
            return self._reader.array(name, values.take(pyarrow().array(rows)), rows + start)
        if (name, number) not in self._views:
            self._views[name, number] = self._reader.array(name, values, range(start, start + len(values)))
        return self._views[name, number][rows]


def _convert_once(path: Path, length: int, images: ImageFormat) -> Records:
    first = next(batch for batch in _File(path) if batch.num_rows)
    reader = Reader(first, images, path.name)

    def chunks(names: Sequence[str]) -> Iterator[Batch]:
        row = 0
        for batch in _File(path):
            yield reader.batch(names, batch, row)
            row += batch.num_rows

    return Records(reader.columns, length, path.name, chunks)


# ---- reading ---------------------------------------------------------------------------------------------------------


class _File:
    """The record batches of a file."""

    def __init__(self, path: Path, is_mapped: bool = False):
        self._path, self._is_mapped = path, is_mapped
        self.extent = range(0)  # the addresses of the file in memory, if it is mapped

    def __iter__(self) -> Iterator[Any]:
        pa = pyarrow()
        check_file(self._path)
        try:
            source = pa.memory_map(str(self._path)) if self._is_mapped else pa.OSFile(str(self._path))
            if self._is_mapped:
                source = source.read_buffer()
                self.extent = range(source.address, source.address + source.size)
            try:
                file = pa.ipc.open_file(source)
            except pa.ArrowInvalid:  # `datasets` writes the stream format, without the index at the end
                if not self._is_mapped:
                    source.seek(0)
                batches = iter(pa.ipc.open_stream(source))
            else:
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            for batch in batches:
                batch.validate(full=True)  # Arrow does not check offsets when it follows them
                batch.schema.names  # noqa: B018 (names are decoded on access)
                yield batch
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise DataError(f"{self._path} is not a complete Arrow file: {error}") from None


def _survey(file: _File) -> tuple[list[int], bool]:
    """Return the number of rows per batch, and True if the batches are views of the mapped file."""
    lengths: list[int] = []
    is_mapped = True
    for batch in file:
        lengths.append(batch.num_rows)
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer and buffer.size]
        is_mapped &= all(buffer.address in file.extent for buffer in buffers)
    return lengths, is_mapped


def _json(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    return content if isinstance(content, dict) else {}
