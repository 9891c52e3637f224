"""Columns of Arrow: `.arrow` and `.feather` files, and data sets that Hugging Face `datasets` saved to a folder.

These files are mapped, unlike others: where their rows are only Arrow knows, which wants the whole. So that a file
that shrinks is an error and does not end the process, its size is looked at before each batch; what remains is the
moment between. What was read stays mapped and counts as memory, but the system takes it back when it needs it.
Files that are compressed would be copied to memory whole, so they are converted once, as CSV is.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
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
    known_columns,
    optional_package,
)
from onward.training.data.files import UNCHANGED, Conversion, Records, check_file
from onward.training.data.images import Decoder, ImageFormat
from onward.training.data.views import concatenate


def pyarrow() -> Any:
    return optional_package("pyarrow", "reading Arrow and Parquet files")


class Reader:
    """Makes arrays of batches of one schema. Shapes, and formats of images, are those of the first row."""

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
        """The same for another file."""
        reader = copy.copy(self)
        reader._origin = origin
        return reader

    def is_encoded(self, name: str) -> bool:
        """Whether values of a column are made one by one: text, and images in the bytes of their files."""
        return name in self._decoders or self.columns[name].dtype.hasobject

    def batch(self, names: Sequence[str], batch: Any, first: int) -> Batch:
        """The named columns of a batch whose first row has the number `first`."""
        rows = range(first, first + batch.num_rows)
        return {name: self.array(name, batch.column(name), rows) for name in names}

    def array(self, name: str, values: Any, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Values of a column; `rows` are their numbers, for messages."""
        column, where, values = self.columns[name], f"column `{name}` of {self._origin}", _storage(values)
        if values.null_count:
            row = rows[int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))]
            raise DataError(f"{where} has no value in row {row:,}", hint="fill it in, or leave the row out")
        if name in self._decoders:
            encoded = values.field("bytes").to_pylist()
            return np.stack(
                [self._decode(name, one, f"row {row:,} in {where}") for row, one in zip(rows, encoded, strict=True)]
            )
        if column.dtype.hasobject:
            return np.array(values.to_pylist(), object)
        if column.dtype.kind == "U":
            raise DataError(f"{where} is {column}, which cannot be trained on", hint="encode it as numbers")
        flat, shape = _flatten(values, where)
        if shape != column.shape:
            raise DataError(f"{where} has rows of different shapes: {list(column.shape)} and {list(shape)}", hint=_PAD)
        return flat.reshape(len(values), *shape).astype(column.dtype, copy=False)

    def _column(self, name: str, first: Any, images: ImageFormat) -> Column:
        where = f"row 0 in column `{name}` of {self._origin}"
        if _is_image(first.type) and (encoded := first.field("bytes")[0].as_py()):
            self._decoders[name] = Decoder(images, encoded, where)
            return self._decoders[name].column
        if _is_text(first.type):
            return Column(np.dtype(object))
        if not _is_numeric(first.type):
            return Column(np.dtype(str), remark=str(first.type))
        if first.null_count:
            return Column(np.dtype(str), remark="no value in row 0")
        flat, shape = _flatten(first, where)
        return Column(flat.dtype, shape, self._classes.get(name))

    def _decode(self, name: str, encoded: bytes | None, where: str) -> np.ndarray:
        if encoded is None:
            raise DataError(f"{where} names a file in place of an image", hint="save it with the images embedded")
        return self._decoders[name](encoded, where)


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """The names that numbers stand for, as `datasets` writes them beside a schema: {column: names}."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        labels = {name: kind for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
        return {name: tuple(map(str, kind["names"])) for name, kind in labels.items() if kind.get("names")}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # nothing of the kind is there
        return {}


_PAD = "pad them to one length"


def _flatten(values: Any, where: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """The numbers in nested lists, and the shape of each row."""
    types = pyarrow().types
    if isinstance(values.type, pyarrow().FixedShapeTensorType):
        return _tensors(values, where)
    shape: list[int] = []
    while _is_list(values.type):
        if types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
        else:
            lengths = values.value_lengths().to_numpy(zero_copy_only=False)
            shape.append(int(lengths[0]) if len(lengths) else 0)
            if (lengths != shape[-1]).any():
                other = int(lengths[lengths != shape[-1]][0])
                raise DataError(f"{where} has lists of different lengths: {shape[-1]} and {other}", hint=_PAD)
        values = values.flatten()
    if values.null_count:
        raise DataError(f"{where} has lists with missing numbers")
    return values.to_numpy(zero_copy_only=False), tuple(shape)


def _tensors(values: Any, where: str) -> tuple[np.ndarray, tuple[int, ...]]:
    stored = values.storage.flatten().to_numpy(zero_copy_only=False).reshape(len(values), *values.type.shape)
    permutation = values.type.permutation or list(range(len(values.type.shape)))
    if [permutation[dim] for dim in permutation] != sorted(permutation):  # pyarrow writes it the other way round
        raise DataError(f"{where} has tensors with dimensions in an unclear order", hint="write them in C order")
    array = stored.transpose(0, *(dim + 1 for dim in permutation))
    return array, array.shape[1:]


def _storage(values: Any) -> Any:
    """The values as they are stored, not as `datasets` wraps them where it is loaded; tensors stay tensors."""
    pa = pyarrow()
    while isinstance(values.type, pa.BaseExtensionType) and not isinstance(values.type, pa.FixedShapeTensorType):
        values = values.storage
    return values


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_numeric(kind: Any) -> bool:
    types = pyarrow().types
    if isinstance(kind, pyarrow().FixedShapeTensorType):
        return True
    while _is_list(kind):
        kind = kind.value_type
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_string(kind) or types.is_large_string(kind)


def _is_image(kind: Any) -> bool:
    """Whether a column is what `datasets` makes of images."""
    return pyarrow().types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}


# ---- files -----------------------------------------------------------------------------------------------------------
#


def open_arrow(path: Path, images: ImageFormat) -> Dataset:
    file = _File(path, is_mapped=True)
    lengths, is_mapped = _survey(file)
    check_not_empty(sum(lengths), str(path))
    if is_mapped:
        return _Mapped(path, [batch for batch in file if batch.num_rows], images)
    return _convert_once(path, sum(lengths), images)


def open_saved(folder: Path, images: ImageFormat) -> Dataset:
    """A folder that `Dataset.save_to_disk` wrote; `datasets` itself is not needed to read it."""
    if (folder / "dataset_dict.json").exists():
        splits = [str(split) for split in _json(folder / "dataset_dict.json").get("splits", [])]
        hint = "name one: " + " or ".join(str(folder / split) for split in splits)
        raise DataError(f"{folder} holds {len(splits)} data sets: {', '.join(splits)}", hint=hint)
    try:
        files = [folder / Path(file["filename"]).name for file in _json(folder / "state.json")["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{folder / 'state.json'} does not name the files of the data set") from None
    check_not_empty(len(files), str(folder))
    return concatenate([open_arrow(file, images) for file in files], folder.name)


class _Mapped:
    """Rows of a mapped file."""

    def __init__(self, path: Path, batches: list[Any], images: ImageFormat):
        self._path, self._size = path, path.stat().st_size
        self._batches = batches
        self._starts = [0, *itertools.accumulate(batch.num_rows for batch in batches)]
        self._reader = Reader(batches[0], images, path.name)
        self._views: dict[tuple[str, int], np.ndarray] = {}
        self.columns = self._reader.columns

    def __len__(self) -> int:
        return self._starts[-1]

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        wanted = known_columns(columns, self.columns, self._path.name)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {len(self)}")
        self._check_size()
        places = np.searchsorted(self._starts, indices, side="right") - 1
        return {name: self._column(name, indices, places) for name in wanted}

    def row(self, index: int) -> str:
        return f"row {index:,} of {self._path.name}"

    def _column(self, name: str, indices: np.ndarray, places: np.ndarray) -> np.ndarray:
        column = self.columns[name]
        out = np.empty((len(indices), *(dim or 0 for dim in column.shape)), column.dtype)
        for place in np.unique(places).tolist():
            here = np.flatnonzero(places == place)
            out[here] = self._rows(name, place, indices[here])
        return out

    def _rows(self, name: str, place: int, indices: np.ndarray) -> np.ndarray:
        """Rows of one batch. What is stored as numbers is looked at in place: Arrow's own way is much slower."""
        values, start = self._batches[place].column(name), self._starts[place]
        if self._reader.is_encoded(name):
            return self._reader.array(name, values.take(pyarrow().array(indices - start)), indices)
        if (name, place) not in self._views:
            self._views[name, place] = self._reader.array(name, values, range(start, start + len(values)))
        return self._views[name, place][indices - start]

    def _check_size(self) -> None:
        try:
            size = self._path.stat().st_size
        except OSError:
            return  # its name is gone; what is open can still be read
        if size < self._size:
            raise DataError(f"{self._path} has become shorter since it was opened", hint=UNCHANGED)


def _convert_once(path: Path, length: int, images: ImageFormat) -> Records:
    first = next(batch for batch in _File(path) if batch.num_rows)
    reader = Reader(first, images, path.name)

    def chunks(names: Sequence[str]) -> Iterator[Batch]:
        row = 0
        for batch in _File(path):
            yield reader.batch(names, batch, row)
            row += batch.num_rows

    return Records(Conversion(reader.columns, length, chunks, lambda index: f"row {index:,} of {path.name}", path.name))


# ---- reading ---------------------------------------------------------------------------------------------------------


class _File:
    """The batches of rows in a file."""

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
            except pa.ArrowInvalid:  # `datasets` writes the other format: a stream, without the index at the end
                if not self._is_mapped:
                    source.seek(0)
                batches = iter(pa.ipc.open_stream(source))
            else:
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            for batch in batches:
                batch.validate(full=True)  # Arrow itself follows offsets wherever they lead
                batch.schema.names  # noqa: B018 (names are decoded when they are asked for)
                yield batch
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise DataError(f"{self._path} is not a whole Arrow file: {error}") from None


def _survey(file: _File) -> tuple[list[int], bool]:
    """The number of rows of each batch, and whether batches are the file's own bytes, not copies."""
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    return found if isinstance(found, dict) else {}
