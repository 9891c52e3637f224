"""Data frames of pandas, which is not needed for it: a frame brings its own methods.

Columns are what they would be in a CSV file: numbers, or text, which becomes the numbers of its classes. Categories
keep their order. Cells that hold arrays are stacked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from onward.training.data.dataset import MOST_CLASSES, Columns, check_names, to_array


def is_frame(source: Any) -> bool:
    kind = type(source)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def open_frame(frame: Any) -> Columns:
    check_names(map(str, frame.columns), "the data frame")
    arrays: dict[str, np.ndarray] = {}
    described: dict[str, dict[str, Any]] = {}
    for position, label in enumerate(frame.columns):
        series, name = frame.iloc[:, position], str(label)
        array, remarks = _column(series, name)
        arrays[name], described[name] = array, remarks
    data = Columns(arrays, "the data frame")
    data.columns = {name: dataclasses.replace(data.columns[name], **remarks) for name, remarks in described.items()}
    return data


def _column(series: Any, name: str) -> tuple[np.ndarray, dict[str, Any]]:
    """The values of a column, and what is to be said about it as a `Column`."""
    kind = getattr(series.dtype, "kind", "O")
    if kind == "f":
        return series.to_numpy(np.dtype(f"f{series.dtype.itemsize}"), na_value=np.nan), {}
    if (missing := series.isna().to_numpy()).any():
        return _text(series), {"remark": f"no value in row {int(missing.argmax()):,}"}
    if series.dtype.name == "category":
        codes, categories = series.cat.codes.to_numpy().astype(np.int64), series.cat.categories
        return codes, {"classes": tuple(map(str, categories))}
    if kind in "iub":
        return series.to_numpy(np.dtype(bool if kind == "b" else f"{kind}{series.dtype.itemsize}")), {}
    cells = series.tolist()
    if all(isinstance(cell, str) for cell in cells):
        classes, codes = np.unique(np.asarray(cells, object), return_inverse=True)
        if len(classes) <= MOST_CLASSES:
            return codes.astype(np.int64), {"classes": tuple(classes.tolist())}
    elif all(isinstance(cell, np.ndarray | list) for cell in cells):
        return np.stack([to_array(cell, name, "the data frame") for cell in cells]), {}
    return _text(series), {"remark": str(series.dtype)}


def _text(series: Any) -> np.ndarray:
    """What cannot be trained on, and is only named."""
    return np.asarray(series.astype(str).tolist(), str)
