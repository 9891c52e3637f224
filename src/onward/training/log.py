"""The log of a run: JSON lines, one event each, append-only.

`step` is the number of steps so far, in every event.

| event | when | content |
|---|---|---|
| `start` | once | `time`, `model`, `parameters`, `recipe`, `config`, `device`, `engine`, `steps_per_epoch`, `epochs` |
| `note` | after `start` and `resume` | `step`, `text`: a note about the model or the data |
| `step` | each step | `step`, `epoch`, `loss`, `lr`, other metrics; `samples` so far; `seconds` of the step |
| `gradients` | after the first step of an epoch, and every 500 | `step`, `norms` by parameter |
| `weights` | each epoch | `step`, `histograms` by parameter: `edges`, `counts` |
| `epoch` | each epoch | `step`, `epoch`, `loss`: the mean over the samples of the epoch |
| `validation` | each epoch | `step`, `epoch`, `loss`, other metrics |
| `save` | after saving | `step`, `best` |
| `resume` | on resuming | `step`, `time`, `epoch`, `batch` in the epoch, `steps_per_epoch` |
| `end` | last | `step`, `reason`, `seconds` since the start or resume; `loss` if it was not finite |

The lines are strict JSON. NaN and infinities, which JSON lacks, are strings ("NaN", "Infinity",
"-Infinity"). A killed run may leave a torn last line: readers skip it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

PathLike = str | os.PathLike[str]

_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PATIENCE = 1.0
"""Longest time in seconds before a step is written. A killed process loses these steps and repeats
them.
"""


class Log:
    """Writes or continues a log. Steps are flushed about once a second, other events at once."""

    def __init__(self, path: PathLike):
        self._file = open(path, "a+b", buffering=1 << 16)  # noqa: SIM115 (open as long as the run lasts)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # separate a torn line from the next one
                self._file.write(b"\n")
        self._written = time.monotonic()

    def write(self, event: str, /, **values: Any) -> None:
        """Append an event. Values may be NumPy numbers and arrays."""
        self._file.write(_line({"event": event, **values}))
        if event != "step" or time.monotonic() - self._written > _PATIENCE:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._written = time.monotonic()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_log(path: PathLike) -> Iterator[dict[str, Any]]:
    """Yield the events of a log. Torn or damaged lines are skipped."""
    with open(path, "rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # not JSON
                continue
            if isinstance(event, dict):
                yield _with_numbers(event) if b'NaN"' in line or b'Infinity"' in line else event


def _line(event: Mapping[str, Any]) -> bytes:
    try:
        text = _ENCODER.encode(event)
    except ValueError:  # NaN or infinity: rare, so only then is every value checked
        text = _ENCODER.encode(_with_names(event))
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return a number or array of NumPy, or of a library like it, as Python numbers."""
    if getattr(value, "dtype", None) == "float32" and value.ndim == 0:
        return float(str(value))  # prints shorter: as float64 it would need 17 digits
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a log cannot hold a {type(value).__name__}")


_ENCODER = json.JSONEncoder(default=_plain, allow_nan=False)


def _with_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_names(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_names(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, str | int | float | None) else _with_names(_plain(value))


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return _NAMES.get(value, value) if isinstance(value, str) else value
