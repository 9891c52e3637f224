"""CSV files: a header and rows of cells. Columns are integers, floats, or text.

A first pass finds types and problems, a second converts. Text becomes class numbers, in the sorted
order of distinct strings, as for folders of images. A missing cell matters only if its column is
used.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import MOST_CLASSES, Batch, Column
from onward.training.data.files import Records, check_file

_CHUNK = 4096  # rows


@dataclass
class _ColumnType:
    """Type of a column, as far as its cells were read."""

    number: type[int] | type[float] | None = int  # None: text
    why_text: str = ""  # the first cell that is not a number
    missing: str = ""  # the first line without a value
    texts: set[str] = field(default_factory=set)
    has_all_texts: bool = True  # False if earlier cells were numbers, which are not collected


@dataclass
class _Chunk:
    first_row: int
    lines: list[int]  # the line on which each row ends: a quoted cell may hold several
    cells: list[tuple[str, ...]]  # by column


def open_csv(path: Path) -> Records:
    names, chunks = _read(path)
    types = [_ColumnType() for _ in names]
    length, lines_are_rows = 0, True
    for chunk in chunks:
        lines_are_rows &= chunk.lines == list(range(chunk.first_row + 2, chunk.first_row + 2 + len(chunk.lines)))
        length += len(chunk.lines)
        for column_type, cells in zip(types, chunk.cells, strict=True):
            _look(column_type, cells, chunk)
    if not all(column_type.has_all_texts for column_type in types):
        for chunk in _read(path)[1]:
            for column_type, cells in zip(types, chunk.cells, strict=True):
                _keep_texts(column_type, cells)
    columns = {name: _column(column_type) for name, column_type in zip(names, types, strict=True)}
    positions = {name: position for position, name in enumerate(names)}

    def convert(requested: Sequence[str]) -> Iterator[Batch]:
        for name in requested:
            if line := types[positions[name]].missing:
                hint = "fill in a value, remove the row, or use another column"
                raise DataError(f"{line} of {path} has no value in column `{name}`", hint=hint)
        for chunk in _read(path)[1]:
            yield {name: _values(columns[name], chunk.cells[positions[name]], path) for name in requested}

    def row(index: int) -> str:
        return f"line {index + 2:,} of {path.name}" if lines_are_rows else f"row {index:,} of {path.name}"

    return Records(columns, length, path.name, convert, row)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[list[str], Iterator[_Chunk]]:
    """Return the names in the header and the rows below."""
    rows = _rows(path)
    _, names = next(rows, (0, []))
    _check_header(names, path)
    return names, _chunks(rows, names, path)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the last line number and the cells of each row. Empty lines are skipped."""
    line = 0
    check_file(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t|", key=header.count), skipinitialspace=True, strict=True)
            for cells in reader:
                line = reader.line_num
                if cells:
                    yield line, cells
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start:,}") from None
    except csv.Error as error:
        raise DataError(f"{path} is not CSV after line {line:,}: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _check_header(names: list[str], path: Path) -> None:
    hint = "the first line must name the columns, such as length,width,label"
    if not names:
        raise DataError(f"{path} is empty", hint=hint)
    if all(_is_number(name) for name in names):
        raise DataError(f"{path} has no header: its first line holds numbers", hint=hint)
    for name, count in Counter(names).items():
        if not name.strip() or count > 1:
            raise DataError(f"the header of {path} has a duplicate or empty name: `{name}`", hint=hint)


def _chunks(rows: Iterator[tuple[int, list[str]]], names: list[str], path: Path) -> Iterator[_Chunk]:
    first_row = 0
    while rows_read := list(itertools.islice(rows, _CHUNK)):
        for line, cells in rows_read:
            if len(cells) != len(names):
                raise DataError(f"line {line:,} of {path} has {len(cells)} cells, but the header has {len(names)}")
        lines, cells_by_row = zip(*rows_read, strict=True)
        yield _Chunk(first_row, list(lines), list(zip(*cells_by_row, strict=True)))
        first_row += len(rows_read)


# ---- types -----------------------------------------------------------------------------------------------------------


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python reads 1_000 as a number, other readers do not


def _look(column_type: _ColumnType, cells: tuple[str, ...], chunk: _Chunk) -> None:
    if not column_type.missing and not all(cells):
        column_type.missing = f"line {chunk.lines[cells.index('')]:,}"
    if column_type.number is int and not _all_convert(int, cells):
        column_type.number = float
    if column_type.number is float and not _all_convert(float, cells):
        column_type.number = None
        index = next(index for index, cell in enumerate(cells) if cell and not _is_number(cell))
        column_type.why_text = f"`{cells[index][:20]}` on line {chunk.lines[index]:,}"
        column_type.has_all_texts = chunk.first_row == 0
    _keep_texts(column_type, cells)


def _keep_texts(column_type: _ColumnType, cells: tuple[str, ...]) -> None:
    if column_type.number is None and len(column_type.texts) <= MOST_CLASSES:
        column_type.texts.update(cells)


def _all_convert(number: type[int] | type[float], cells: tuple[str, ...]) -> bool:
    try:
        values = list(map(number, filter(None, cells)))
    except ValueError:
        return False
    fits = number is float or not values or (min(values) >= -(2**63) and max(values) < 2**63)
    return fits and "_" not in "".join(cells)


def _column(column_type: _ColumnType) -> Column:
    missing = f"no value on {column_type.missing}" if column_type.missing else ""
    if column_type.number is not None:
        return Column(np.dtype(np.int64 if column_type.number is int else np.float64), remark=missing)
    remark = ", ".join(filter(None, [f"text: {column_type.why_text}", missing]))
    if len(column_type.texts) > MOST_CLASSES:
        return Column(np.dtype(object), remark=remark)
    return Column(np.dtype(np.int64), classes=tuple(sorted(column_type.texts - {""})), remark=remark)


_READERS: dict[str, Callable[[str], Any]] = {"i": int, "f": float, "O": str}


def _values(column: Column, cells: tuple[str, ...], path: Path) -> np.ndarray:
    numbers: dict[str, int] = {text: number for number, text in enumerate(column.classes or ())}
    convert = numbers.__getitem__ if column.classes else _READERS[column.dtype.kind]
    try:
        return np.array(list(map(convert, cells)), column.dtype)
    except (ValueError, KeyError, OverflowError) as error:
        raise DataError(f"{path} has changed since it was opened: {error}") from None
