"""Facts by which a resumed run recognizes its data: rows, columns, types and checksums of values.

Values are compared, not files, so a file may move, be touched, or change its format. For
large data, and for rows that are expensive to make, evenly spaced rows are compared, and the sizes
of all files; different times are mentioned.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import Error
from onward.training.data.dataset import Column, Dataset, bytes_of_row
from onward.training.data.objects import Samples, Stream

Facts = Mapping[str, Any]
"""JSON values: `rows`, `columns`, `values`, `compared`, `sizes`, `times`."""

_MOST = 256 << 20
"""Bytes of values that are compared. CRC-32 takes a quarter of a second per GB; reading CSV or
Parquet takes more.
"""
_COSTLY = 64
"""Weight of a byte that is decoded from an image or made by Python code."""
_TEXT_BYTES = 64
_STRETCHES, _PIECES = 64, 4
"""Stretches of rows that are compared in large data; in pieces, reading one stretch reads a whole
piece.
"""
_AT_ONCE = 8 << 20
"""Bytes in memory at a time."""


def identify(data: Dataset | Stream, names: Sequence[str], files: Sequence[Path] = ()) -> Facts:
    """Return the facts of these columns of data, which came from these files, if any."""
    facts: dict[str, Any] = {"rows": None, "columns": {}}
    for name in names:
        column = data.columns[name]
        classes = f", {len(column.classes)} classes" if column.classes else ""
        facts["columns"][name] = f"{Column(column.dtype, column.shape)}{classes}"
    if isinstance(data, Stream):
        return facts | {"batches": None if data.is_divided else data.batches_per_epoch}
    facts["rows"] = len(data)
    if isinstance(data, Samples) and not data.is_plain:  # its code may return different values each time
        return facts
    compared = _rows_to_compare(data, names)
    facts["values"], facts["compared"] = _checksums(data, names, compared), sum(map(len, compared))
    if facts["compared"] < len(data) and files:
        stats = [file.stat() for file in files]
        facts["sizes"] = _checksum_of([stat.st_size for stat in stats])
        facts["times"] = _checksum_of([stat.st_mtime_ns for stat in stats])
    return facts


def differences(before: Facts, now: Facts) -> list[str]:
    """Return the differences in words; an empty list for the same data."""
    columns, others = _mapping(before.get("columns")), now["columns"]
    changes = []
    for key, noun in (("rows", "rows"), ("batches", "batches in an epoch")):
        if key in now and None not in (before.get(key), now[key]) and before[key] != now[key]:
            changes.append(f"{now[key]} {noun}, not {before[key]}")
    for name in {**columns, **others}:
        if name not in others:
            changes.append(f"no column `{name}`")
        elif name not in columns:
            changes.append(f"a new column `{name}`")
        elif columns[name] != others[name]:
            changes.append(f"`{name}` is {others[name]}, not {columns[name]}")
    if changes or before.get("compared") != now.get("compared") or "values" not in now:
        return changes
    values = _mapping(before.get("values"))
    changes = [f"other values in `{name}`" for name in others if values.get(name) != now["values"][name]]
    if not changes and None not in (before.get("sizes"), now.get("sizes")) and before["sizes"] != now["sizes"]:
        changes = ["other sizes of files"]
    return changes


def not_compared(before: Facts, now: Facts) -> str | None:
    """Return a note about values that were not compared; None if all were."""
    if "values" not in now or "values" not in before or before.get("compared") != now.get("compared"):
        return "the values were not compared, only columns and types"
    if now["compared"] == now["rows"] or (now.get("times") is not None and before.get("times") == now["times"]):
        return None
    return f"{now['compared']:,} of {now['rows']:,} rows were compared"


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a stored value if it is a mapping, else an empty one: files may hold anything."""
    return value if isinstance(value, Mapping) else {}


def _rows_to_compare(data: Dataset, names: Sequence[str]) -> list[range]:
    rows, size = len(data), _bytes_of_row(data.columns, names)
    most = min(rows, max(_MOST // size, 1))
    if most == rows:
        return [range(rows)]
    count = min(most, _STRETCHES if data.pieces is None else _PIECES)
    length = most // count
    starts = [index * (rows - length) // max(count - 1, 1) for index in range(count)]
    return [range(start, start + length) for start in starts]


def _bytes_of_row(columns: Mapping[str, Column], names: Sequence[str]) -> int:
    """Return the cost of comparing a row, in bytes of numbers in memory."""
    return max(
        sum(
            (_TEXT_BYTES if columns[name].dtype.hasobject else bytes_of_row(columns, [name]))
            * (_COSTLY if columns[name].is_costly else 1)
            for name in names
        ),
        1,
    )


def _checksums(data: Dataset, names: Sequence[str], stretches: Sequence[range]) -> dict[str, int]:
    checksums = dict.fromkeys(names, 0)
    most = max(_AT_ONCE // _bytes_of_row(data.columns, names), 1)
    for chunk in (stretch[at : at + most] for stretch in stretches for at in range(0, len(stretch), most)):
        try:
            batch = data.take(np.arange(chunk.start, chunk.stop), names)
        except (Error, OSError):  # training reports the error when it reads the row
            batch = {name: np.array(["unreadable"]) for name in names}
        for name in names:
            checksums[name] = zlib.crc32(_bytes(batch[name]), checksums[name])
    return checksums


def _bytes(values: np.ndarray) -> bytes | memoryview:
    if values.dtype.kind in "OUS":  # strings compare equal for any storage width
        return "\0".join(map(str, values.reshape(-1).tolist())).encode(errors="surrogatepass")
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _checksum_of(numbers: Sequence[int]) -> int:
    return zlib.crc32(",".join(map(str, numbers)).encode())
