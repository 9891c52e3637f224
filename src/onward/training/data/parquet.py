"""Parquet. A row lies in a group of many that is decoded whole, so data are converted once, group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onward.errors import DataError
from onward.training.data.arrow_values import Reader, pyarrow
from onward.training.data.dataset import Batch, check_not_empty, optional_package
from onward.training.data.files import check_file
from onward.training.data.images import ImageFormat
from onward.training.data.records import Conversion, Records

_CHUNK = 4096  # rows


def open_parquet(path: Path, images: ImageFormat) -> Records:
    file = _open(path)
    check_not_empty(file.metadata.num_rows, str(path))
    first = next(_batches(path, None, rows=1), None)
    if first is None:
        raise DataError(f"{path} is not a whole Parquet file: it has no rows, and says that it has some")
    reader = Reader(first, images, path.name)

    def chunks(names: Sequence[str]) -> Iterator[Batch]:
        row = 0
        for batch in _batches(path, names):
            yield reader.batch(names, batch, row)
            row += batch.num_rows

    def row(index: int) -> str:
        return f"row {index:,} of {path.name}"

    return Records(Conversion(reader.columns, file.metadata.num_rows, chunks, row, path.name))


def _batches(path: Path, names: Sequence[str] | None, rows: int = _CHUNK) -> Iterator[Any]:
    try:
        for batch in _open(path).iter_batches(rows, columns=names, use_threads=False):
            if batch.num_rows:
                yield batch
    except (OSError, pyarrow().ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _open(path: Path) -> Any:
    parquet = optional_package("pyarrow.parquet", "reading Parquet files")
    check_file(path)
    try:
        return parquet.ParquetFile(path, memory_map=False, pre_buffer=False)
    except (OSError, pyarrow().ArrowException) as error:
        raise DataError(f"{path} is not a whole Parquet file: {error}") from None
