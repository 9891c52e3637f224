"""TensorBoard event files, written without TensorFlow: scalars and histograms.

A file is a sequence of records: length (8 bytes), its checksum, data, its checksum. The data are
protobuf messages of type `Event`. Only six of their fields are needed, so they are encoded without
its class.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from onward.model.storage.wire import crc32c, field, fixed_field, mask
from onward.training.callbacks import Callback, Status

_PATIENCE = 2.0
"""Longest time in seconds before an event is written."""


class EventWriter(Callback):
    """Writes events for TensorBoard into a folder, or continues an existing file."""

    def __init__(self, folder: Path):
        earlier = sorted(folder.glob("events.out.tfevents.*.onward"))
        path = earlier[-1] if earlier else folder / f"events.out.tfevents.{int(time.time())}.onward"
        self._file = open(path, "ab")  # noqa: SIM115 (open as long as the run lasts)
        if not self._file.tell():
            self._write(_event(0, field(3, b"brain.Event:2")))
        self.flush()

    def start(self, status: Status) -> None:
        self._plot(status, "validation", status.results)

    def step(self, status: Status) -> None:
        self._plot(status, "train", status.metrics)

    def epoch(self, status: Status) -> None:
        self._plot(status, "epoch", {"loss": status.loss})
        self._plot(status, "validation", status.results)

    def _plot(self, status: Status, section: str, values: Mapping[str, float]) -> None:
        if values:
            self.scalars(status.step, {f"{section}/{name}": value for name, value in values.items()})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers by name. A prefix such as `loss/` becomes a section of the page."""
        self._add(step, (field(1, tag.encode()) + fixed_field(2, "<f", value) for tag, value in values.items()))

    def histogram(self, step: int, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        """Write a histogram: counts between edges, one edge more than counts."""
        self._add(step, [field(1, tag.encode()) + field(5, _histogram(edges, counts))])

    def flush(self) -> None:
        self._file.flush()
        self._written = time.monotonic()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _add(self, step: int, values: Iterable[bytes]) -> None:
        self._write(_event(step, field(5, b"".join(field(1, value) for value in values))))
        if time.monotonic() - self._written > _PATIENCE:
            self.flush()

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        for chunk in (length, data):
            self._file.write(chunk + struct.pack("<I", mask(crc32c(chunk))))


# ---- messages --------------------------------------------------------------------------------------------------------


def _event(step: int, content: bytes) -> bytes:
    return fixed_field(1, "<d", time.time()) + field(2, step) + content


def _histogram(edges: Sequence[float], counts: Sequence[float]) -> bytes:
    """Return the message of a histogram. Its sums assume values in the middle of their bins."""
    edges, counts = [float(edge) for edge in edges], [float(count) for count in counts]
    centers = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    statistics = [
        edges[0],
        edges[-1],
        sum(counts),
        sum(count * center for count, center in zip(counts, centers, strict=True)),
        sum(count * center * center for count, center in zip(counts, centers, strict=True)),
    ]
    fields = [fixed_field(i, "<d", value) for i, value in enumerate(statistics, start=1)]
    return b"".join([*fields, field(6, _doubles(edges[1:])), field(7, _doubles(counts))])


def _doubles(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)
