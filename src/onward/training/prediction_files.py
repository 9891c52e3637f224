"""Files of predictions: CSV, JSON lines, Parquet and NPZ, written batch by batch and atomically."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from onward.errors import DataError, Error, list_names
from onward.model.storage.transaction import Transaction, target_of
from onward.training.data.dataset import Batch, optional_package

Widths = Mapping[str, list[str] | None]
"""Names of the columns that an array of a batch becomes."""


class PredictionWriter(Protocol):
    """A file of predictions."""

    def __init__(self, file: IO[bytes], widths: Widths): ...

    def write(self, batch: Batch) -> None: ...

    def close(self) -> None: ...


def _columns(batch: Batch, widths: Widths) -> dict[str, np.ndarray]:
    """Return one array per column of a table. Cells of what has more axes are lists."""
    columns: dict[str, np.ndarray] = {}
    for name, array in batch.items():
        array = _storable(array)
        names = widths.get(name)
        if array.ndim == 2 and names is not None and len(names) == array.shape[1]:
            added = {column: array[:, i] for i, column in enumerate(names)}
        else:
            added = {name: array}
        for column in added:
            if column in columns:
                raise DataError(
                    f"two columns of the output are named `{column}`", hint="rename the kept column or the class"
                )
        columns |= added
    return columns


def _storable(array: np.ndarray) -> np.ndarray:
    """Return an array of a type that every reader knows: no half precision, no sparse strings."""
    if array.dtype.kind in "OU" or array.dtype in (np.float32, np.float64) or array.dtype.kind in "iub":
        return array
    return array.astype(np.float32)


class _Csv:
    """A table as text. Floats keep all their digits; cells of lists are JSON."""

    def __init__(self, file: IO[bytes], widths: Widths):
        self._file, self._widths, self._is_new = file, widths, True

    def write(self, batch: Batch) -> None:
        columns = _columns(batch, self._widths)
        if self._is_new:
            self._file.write((",".join(map(_quoted, columns)) + "\n").encode())
            self._is_new = False
        cells, formats = [], []
        for array in columns.values():
            is_float = array.dtype.kind == "f" and array.ndim == 1
            formats.append(("%.9g" if array.dtype == np.float32 else "%.17g") if is_float else "%s")
            cells.append(array.tolist() if array.dtype.kind in "iufb" and array.ndim == 1 else _texts(array))
        line = ",".join(formats) + "\n"
        rows = len(cells[0])
        flat = [cell for row in zip(*cells, strict=True) for cell in row]
        self._file.write((line * rows % tuple(flat)).encode())

    def close(self) -> None:
        self._file.flush()


def _texts(array: np.ndarray) -> list[str]:
    """Return cells that are texts or lists."""
    known: dict[str, str] = {}
    if array.ndim == 1 and array.dtype.kind == "U":
        return [known.get(text) or known.setdefault(text, _quoted(text)) for text in array.tolist()]
    return [_quoted(cell if isinstance(cell, str) else json.dumps(cell)) for cell in array.tolist()]


def _quoted(text: str) -> str:
    if not text or any(character in text for character in ',"\r\n'):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([text])
        return line.getvalue()
    return text


class _JsonLines:
    """An object per row. What has several axes is a list, probabilities are an object of names."""

    def __init__(self, file: IO[bytes], widths: Widths):
        self._file, self._widths = file, widths

    def write(self, batch: Batch) -> None:
        columns: dict[str, list[Any]] = {}
        for name, array in batch.items():
            cells = _storable(array).tolist()
            names = self._widths.get(name) if name == "probabilities" else None
            if names is not None:
                keys = [column.removeprefix("p_") for column in names]
                cells = [dict(zip(keys, cell, strict=True)) for cell in cells]
            columns[name] = cells
        rows = zip(*columns.values(), strict=True)
        lines = [json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) for row in rows]
        self._file.write(("\n".join(lines) + "\n").encode() if lines else b"")

    def close(self) -> None:
        self._file.flush()


class _Parquet:
    """A table of Parquet, one row group for some ten thousand rows."""

    _ROWS = 1 << 16

    def __init__(self, file: IO[bytes], widths: Widths):
        self._arrow = optional_package("pyarrow", "writing Parquet")
        self._parquet = optional_package("pyarrow.parquet", "writing Parquet")
        self._file, self._widths = file, widths
        self._writer: Any = None
        self._waiting: list[Any] = []

    def write(self, batch: Batch) -> None:
        columns = {n: _arrow_cells(array) for n, array in _columns(batch, self._widths).items()}
        self._waiting.append(self._arrow.table(columns))
        if sum(map(len, self._waiting)) >= self._ROWS:
            self._flush()

    def _flush(self) -> None:
        table = self._arrow.concat_tables(self._waiting)
        self._writer = self._writer or self._parquet.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table.cast(self._writer.schema))
        self._waiting = []

    def close(self) -> None:
        if self._waiting:
            self._flush()
        if self._writer is not None:
            self._writer.close()


def _arrow_cells(array: np.ndarray) -> Any:
    return array if array.ndim == 1 and array.dtype.kind != "U" else array.tolist()


class _Npz:
    """Arrays in one file, uncompressed. They grow in temporary files until their length is known."""

    def __init__(self, file: IO[bytes], widths: Widths):
        self._file, self._rows = file, 0
        self._arrays: dict[str, tuple[IO[bytes], np.dtype, tuple[int, ...]]] = {}
        self._texts: dict[str, list[np.ndarray]] = {}

    def write(self, batch: Batch) -> None:
        for name, array in batch.items():
            if array.dtype.kind == "O":
                texts = [text if isinstance(text, str) else json.dumps(text) for text in array.tolist()]
                self._texts.setdefault(name, []).append(np.asarray(texts, str))
                continue
            array = np.ascontiguousarray(_storable(array))
            if name not in self._arrays:
                self._arrays[name] = tempfile.TemporaryFile(), array.dtype, array.shape[1:]  # noqa: SIM115
            spool, dtype, shape = self._arrays[name]
            if (array.dtype, array.shape[1:]) != (dtype, shape):
                raise DataError(
                    f"rows of `{name}` have different shapes: {list(shape)} and {list(array.shape[1:])}",
                    hint="write .jsonl, or pad the data",
                )
            spool.write(array.data)
        self._rows += len(next(iter(batch.values())))

    def close(self) -> None:
        with zipfile.ZipFile(self._file, "w", allowZip64=True) as archive:
            for name, (spool, dtype, shape) in self._arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
                    np.lib.format.write_array_header_1_0(member, header | {"shape": (self._rows, *shape)})
                    spool.seek(0)
                    while chunk := spool.read(1 << 20):
                        member.write(chunk)
                spool.close()
            for name, texts in self._texts.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.concatenate(texts), allow_pickle=False)
        self._file.flush()


WRITERS: Mapping[str, type[PredictionWriter]] = {".csv": _Csv, ".jsonl": _JsonLines, ".parquet": _Parquet, ".npz": _Npz}


def writer_for(path: str | os.PathLike[str]) -> type[PredictionWriter]:
    """Return the writer for the ending of a path.

    Raises:
        DataError: if the ending is unknown.
    """
    ending = Path(path).suffix.lower()
    if str(path) != "-" and ending not in WRITERS:
        raise DataError(
            f"cannot write predictions to `{path}`", hint=f"use {list_names(list(WRITERS), 6)}, or `-` for CSV"
        )
    return WRITERS.get(ending, _Csv)


def write_predictions(batches: Iterable[Batch], path: str | os.PathLike[str], widths: Widths) -> None:
    """Write batches to a file as a whole, or raise and leave the old one. `-` is standard output."""
    writer_type, failure = writer_for(path), None
    if str(path) == "-":
        writer = writer_type(sys.stdout.buffer, widths)
        for batch in batches:
            writer.write(batch)
        writer.close()
        return
    with Transaction(target_of(path)) as transaction:
        assert transaction.file is not None
        try:
            writer = writer_type(transaction.file, widths)
            for batch in batches:
                writer.write(batch)
            writer.close()
            transaction.commit()
        except Error as error:  # of the data: not a failure to write
            failure = error
    if failure is not None:
        raise failure
