"""The log of a run: JSON lines, one event each, added at the end only.

`step` is the number of steps made so far, in every event.

| event | when | what it holds |
|---|---|---|
| `start` | once | `time`, `model`, `parameters`, `recipe`, `config`, `device`, `engine`, `steps_per_epoch`, `epochs` |
| `note` | after these two | `step`, `text`: what was said about the model and the data |
| `step` | each step | `step`, `epoch`, `loss`, `lr`, other metrics; `samples` seen so far; `seconds` that it took |
| `gradients` | after the first step of an epoch, and every 500 | `step`, `norms` by parameter |
| `weights` | each epoch | `step`, `histograms` by parameter: `edges`, `counts` |
| `epoch` | each epoch | `step`, `epoch`, `loss`: the mean over the samples of the epoch |
| `validation` | each epoch | `step`, `epoch`, `loss`, other metrics |
| `save` | after saving | `step`, `best` |
| `resume` | on resuming | `step`, `time`, `epoch`, `batch` in the epoch, `steps_per_epoch` |
| `end` | last | `step`, `reason`, `seconds` since it was started or resumed; `loss` if that was not finite |

The lines are strict JSON that any program reads: NaN and infinities, which JSON does not have, are texts ("NaN",
"Infinity", "-Infinity"). A run may be killed at any moment, so the last line may be torn: readers skip it.
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
"""Seconds that a step may wait for being written: if the process is killed, what waits is lost, and done again."""


class NoLog:
    """The log of a process that is not the first of those that train together."""

    def write(self, event: str, /, **values: Any) -> None:
        """Leave it to the first."""


class Log:
    """Writes a log, or goes on with one. Steps are gathered and written about once a second, other events at once."""

    def __init__(self, path: PathLike):
        self._file = open(path, "a+b", buffering=1 << 16)  # noqa: SIM115 (open as long as the run lasts)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a line that is torn stays alone
                self._file.write(b"\n")
        self._written = time.monotonic()

    def write(self, event: str, /, **values: Any) -> None:
        """Add an event. Values may be numbers and arrays of numpy, too."""
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
    """The events of a log, one by one. A line that is torn or damaged is passed over; the others are not lost by it."""
    with open(path, "rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # not JSON, or not even text
                continue
            if isinstance(event, dict):
                yield _with_numbers(event) if b'NaN"' in line or b'Infinity"' in line else event


def _line(event: Mapping[str, Any]) -> bytes:
    try:
        text = _ENCODER.encode(event)
    except ValueError:  # there are such numbers: rare, so that only then each value is looked at
        text = _ENCODER.encode(_with_names(event))
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """A number or an array of numpy, or of a library like it, as Python has it."""
    if getattr(value, "dtype", None) == "float32" and value.ndim == 0:
        return float(str(value))  # the shortest text that is this number, where float64 would need 17 digits
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
