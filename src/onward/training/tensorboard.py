"""Event files for TensorBoard, written without TensorFlow: scalars and histograms.

A file is a sequence of records: length (8 bytes), its checksum, data, its checksum. The data of each is a message
`Event` of protobuf, of which we need six fields, so they are encoded without its class.
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
"""Seconds that an event may wait for being written."""


class EventWriter(Callback):
    """Writes what TensorBoard shows into a folder, or goes on with what is there."""

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
        """Numbers by name; a name before a slash becomes a section of the page: `loss/train`."""
        self._add(step, (field(1, tag.encode()) + fixed_field(2, "<f", value) for tag, value in values.items()))

    def histogram(self, step: int, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        """How often values lie between each two edges; there is one edge more than counts."""
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
        for part in (length, data):
            self._file.write(part + struct.pack("<I", mask(crc32c(part))))


# ---- messages --------------------------------------------------------------------------------------------------------


def _event(step: int, what: bytes) -> bytes:
    return fixed_field(1, "<d", time.time()) + field(2, step) + what


def _histogram(edges: Sequence[float], counts: Sequence[float]) -> bytes:
    """Its message. The sums are those of values in the middle of their intervals: others are not known."""
    edges, counts = [float(edge) for edge in edges], [float(count) for count in counts]
    centres = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    statistics = [
        edges[0],
        edges[-1],
        sum(counts),
        sum(count * centre for count, centre in zip(counts, centres, strict=True)),
        sum(count * centre * centre for count, centre in zip(counts, centres, strict=True)),
    ]
    fields = [fixed_field(i, "<d", value) for i, value in enumerate(statistics, start=1)]
    return b"".join([*fields, field(6, _doubles(edges[1:])), field(7, _doubles(counts))])


def _doubles(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)
