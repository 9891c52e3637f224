"""Values of Arrow as arrays: numbers, lists of one length, and images in the bytes of their files."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Batch, Column, check_names, optional_package
from onward.training.data.images import Decoder, ImageFormat


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
