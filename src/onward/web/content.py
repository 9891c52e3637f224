"""What a page trains: the lowered parts of a training model, its state, data, and a description of all of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward import describe
from onward.engines import Engine
from onward.errors import DataError, RecipeError, UnsupportedError
from onward.inspect.render import step_rows
from onward.lowering import lower
from onward.lowering.contract import contract_of
from onward.model import Model
from onward.model.state import all_states
from onward.recipe.metrics import Labels, labels_of, objectives
from onward.training.config import Config
from onward.training.data import Batch, Batches, Dataset, Stream
from onward.training.feed import open_feed
from onward.transform.declare import check_batch_axis
from onward.web.places import File, averages, trained_file, training_file

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_TYPES = {"float32", "float64", "float16", *_INTEGERS, "bool"}
"""What onnxruntime-web takes."""

_PARTS = ("step", "evaluation", "gradients", "apply")

_ROWS = {"loss", "optimizer", "schedule", "clipping", "accumulate", "average", "loss scale"}
"""What of a step the page tells, of what `onward describe` does."""

Files = dict[str, bytes]


class Content:
    """The files of a page, by name, and what `page.json` says about them."""

    def __init__(
        self,
        original: Model,
        training: Model,
        engine: Engine,
        config: Config,
        opened: Dataset | Stream | None = None,
        picture: str | None = None,
    ):
        if len(training.steps) != 1:
            raise UnsupportedError(
                "a page trains models with one step, and this one has several that take turns",
                hint="train it with `onward train`",
            )
        self.training, self.engine, self.config = training, engine, config
        self.files: Files = {}
        self.notes: list[str] = []
        self._classes: tuple[str, ...] | None = None
        rows = self._rows(opened)
        trained, whole = trained_file(original, training), training_file(training)
        self.files |= {"model.onnx": trained.data, "training.onnx": whole.data}
        labels = labels_of(training)
        self.description = {
            "format": 1,
            "about": self._about(),
            "order": self._order(),
            "parts": {name: self._part(name) for name in _PARTS},
            "state": self._state(whole),
            "trained": [{"state": name, "offset": begin} for name, (begin, _) in trained.places],
            "averages": averages(training),
            "data": self._pack(rows),
            "inputs": self._inputs(rows),
            "labels": self._labels(labels),
            "picture": self._picture(labels, rows[0], picture),
        }
        digest = hashlib.sha256(json.dumps(self.description["order"]).encode())
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + content)
        self.description["fingerprint"] = digest.hexdigest()[:32]

    # ---- the model ----

    def _part(self, name: str) -> dict[str, Any]:
        made = lower(self.training, part=name)
        if contract_of(made).loss is None and name in ("step", "evaluation"):
            raise UnsupportedError(
                "a page shows the loss, and that of this model is not known or cannot be computed without training",
                hint="train it with `onward train`",
            )
        self.files[f"{name}.onnx"] = made.to_proto().SerializeToString()
        return contract_of(made).to_json()

    def _state(self, file: File) -> list[dict[str, Any]]:
        where = dict(file.places)
        return [
            {
                "name": state.name,
                "type": _type(state.name, state.value.dtype),
                "shape": list(state.array.shape),
                "offset": where[state.name][0],
            }
            for state in all_states(self.training)
        ]

    def _about(self) -> dict[str, Any]:
        summary = describe(self.training)
        step = summary.steps[0]
        told = [(label, text if isinstance(text, str) else ", ".join(text)) for label, text in step_rows(summary, step)]
        rows = [[label, text.partition("; differentiated")[0]] for label, text in told if label in _ROWS]
        return {"parameters": step.trained.numbers, "rows": rows}

    # ---- data ----

    def _rows(self, opened: Dataset | Stream | None) -> tuple[Batch | None, Batch | None]:
        """All rows to train on, and to validate with."""
        if self.config.data is None:
            return None, None
        in_order = dataclasses.replace(self.config, shuffle=False, last="pad")
        feed = open_feed(self.engine, in_order, opened)
        self.notes += feed.notes
        self._classes = feed.classes
        if not feed.training.is_padded:
            raise DataError("a stream of batches cannot go into a page", hint="give data that have an end, as a file")
        held_out = feed.validation
        return all_rows(feed.training), all_rows(held_out) if held_out is not None else None

    def _pack(self, rows: Sequence[Batch | None]) -> dict[str, Any]:
        packed, told = bytearray(), {}
        for part, found in zip(("training", "validation"), rows, strict=True):
            if found is not None:
                columns = [pack(packed, name, values) for name, values in found.items()]
                told[part] = {"rows": len(next(iter(found.values()))), "columns": columns}
        self.files["data.bin"] = bytes(packed)
        return told

    def _order(self) -> dict[str, Any]:
        config = self.config
        fixed = check_batch_axis(self.engine.of_a_batch, self.engine.model.inputs)
        last = "drop" if fixed is not None and config.last == "keep" else config.last
        return {
            "seed": str(config.seed or 0),  # which JSON of other languages would round
            "batch_size": config.batch_size,
            "fixed": fixed is not None,
            "last": last,
            "shuffle": config.shuffle,
        }

    def _inputs(self, rows: Sequence[Batch | None]) -> list[dict[str, Any]]:
        """What a sample is, input by input; sizes that the model leaves open are those of the data."""
        told: list[dict[str, Any]] = []
        own = {value.name for value in self.training.inputs}
        for name, value in self.engine.of_a_batch.items():
            found = rows[0][name].shape[1:] if rows[0] is not None else _sizes(value)
            what = {"name": name, "type": _type(name, value.dtype), "shape": list(found)}
            told.append({**what, "is_target": name not in own})
        return told

    def _labels(self, labels: Labels | None) -> dict[str, Any] | None:
        """Which input is the number of a class, and which output tells classes apart."""
        if labels is None:
            return None
        loss = next(one for one in objectives(self.training) if one.target == labels.name)
        names = self._classes or tuple(self.config.classes or ()) or tuple(map(str, range(labels.count)))
        return {
            "input": labels.name,
            "output": loss.output,
            "axis": loss.axis,
            "count": labels.count,
            "ignored": labels.ignored,
            "names": [*names, *map(str, range(len(names), labels.count))],
        }

    def _picture(self, labels: Labels | None, rows: Batch | None, said: str | None) -> dict[str, Any] | None:
        """How the one input that is no label is a picture."""
        others = [
            (name, value)
            for name, value in self.engine.of_a_batch.items()
            if labels is not None and name != labels.name and value.dtype in (ir.DataType.FLOAT, ir.DataType.UINT8)
        ]
        if len(others) != 1:
            return None
        name, value = others[0]
        found = rows[name] if rows is not None else None
        return picture_of(found.shape[1:] if found is not None else _sizes(value), found, said)


def _sizes(value: ir.Value) -> tuple[int, ...]:
    sizes = [] if value.shape is None else [size for size in value.shape[1:] if isinstance(size, int)]
    if value.shape is None or len(sizes) != len(value.shape) - 1:
        raise UnsupportedError(
            f"how large a sample of `{value.name}` is, the model leaves open",
            hint="give data with `--data`, which say it",
        )
    return tuple(sizes)


def _type(name: str, dtype: ir.DataType | None) -> str:
    found = "" if dtype is None else dtype.name.lower()
    found = {"float": "float32", "double": "float64"}.get(found, found)
    if found not in _TYPES:
        raise UnsupportedError(
            f"`{name}` is {found or 'of an unknown type'}, which onnxruntime-web does not take",
            hint="export the model in float32",
        )
    return found


# ---- columns ---------------------------------------------------------------------------------------------------------


_DIVISORS = (1.0, 2.0, 4.0, 8.0, 10.0, 15.0, 16.0, 32.0, 64.0, 100.0, 127.0, 128.0, 255.0, 256.0)
"""What bytes are often divided by to become fractions."""
_NARROW = (np.uint8, np.int8, np.uint16, np.int16, np.int32)


def all_rows(batches: Batches) -> Batch:
    """All rows of data, in their order; `batches` are padded, and not shuffled."""
    parts: list[Batch] = []
    for number, batch in enumerate(batches.epoch(0)):
        count = batches.samples(number)
        parts.append({name: array[:count] for name, array in batch.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def pack(packed: bytearray, name: str, values: np.ndarray) -> dict[str, Any]:
    """Add a column to a file, and return what is needed to read it again."""
    stored, divisor = _narrow(values)
    packed += bytes(-len(packed) % 8)  # typed arrays begin at multiples of their size
    offset = len(packed)
    packed += np.ascontiguousarray(stored).astype(stored.dtype.newbyteorder("<"), copy=False).tobytes()
    return {
        "name": name,
        "type": values.dtype.name,
        "shape": list(values.shape[1:]),
        "stored": stored.dtype.name,
        "divisor": divisor,
        "offset": offset,
    }


def _narrow(values: np.ndarray) -> tuple[np.ndarray, float]:
    """The same numbers in a narrower type, and what they are divided by after that. Every bit comes back."""
    if values.dtype.kind in "iu":
        for kind in _NARROW:
            if values.size and np.iinfo(kind).min <= values.min() and values.max() <= np.iinfo(kind).max:
                return values.astype(kind), 1.0
    if values.dtype == np.float32 and values.size and values.min() >= 0 and not np.signbit(values).any():
        for divisor in _DIVISORS:
            narrow = np.rint(values * np.float32(divisor))
            if narrow.max() <= 255 and (narrow.astype(np.float32) / np.float32(divisor) == values).all():
                return narrow.astype(np.uint8), divisor
    return values, 1.0


# ---- pictures --------------------------------------------------------------------------------------------------------


_SMALLEST = 8
"""Pixels on a side that make a picture of numbers in a row, unless it is said."""
_RANGES = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
"""In which pictures usually are."""
_SAMPLE = 2000
"""Rows that are looked at."""
_PLAIN = 0.1
"""How far, as a part of the range, the border of pictures is from one end of it where it is their background."""


def picture_of(shape: Sequence[int], rows: np.ndarray | None, said: str | None) -> dict[str, Any] | None:
    """How samples of a shape are pictures, and what the data say about them; None if they are none."""
    if said == "none":
        return None
    form = _form(tuple(shape), rows, said)
    if form is None:
        return None
    layout, height, width, channels = form
    channel_last = _channels_last(rows[:_SAMPLE], form) if rows is not None and len(rows) else None
    low, high = _range(channel_last, channels, None if rows is None else rows.dtype)
    made = {"layout": layout, "height": height, "width": width, "channels": channels, "low": low, "high": high}
    return {**made, **_strokes(channel_last, low, high)}


def _form(shape: tuple[int, ...], rows: np.ndarray | None, said: str | None) -> tuple[str, int, int, int] | None:
    if said is not None:
        return _said_form(shape, said)
    if len(shape) == 3 and shape[0] in (1, 3):
        return "channels_first", shape[1], shape[2], shape[0]
    if len(shape) == 3 and shape[2] in (1, 3):
        return "channels_last", shape[0], shape[1], shape[2]
    if len(shape) == 2 and min(shape) >= _SMALLEST:
        return "channels_last", shape[0], shape[1], 1
    side = math.isqrt(shape[0]) if len(shape) == 1 else 0
    may_be = side >= _SMALLEST and side * side == shape[0] and rows is not None and rows.size and rows.min() >= 0
    return ("channels_last", side, side, 1) if may_be else None


def _said_form(shape: tuple[int, ...], said: str) -> tuple[str, int, int, int]:
    sizes = re.fullmatch(r"(\d+)x(\d+)", said)
    if sizes is None:
        raise RecipeError(
            f"`{said}` is no size of a picture", hint="write height and width: `--picture 8x8`, or `none`"
        )
    height, width = map(int, sizes.groups())
    count = math.prod(shape)
    if height * width == 0 or count % (height * width) or (channels := count // (height * width)) not in (1, 3):
        raise RecipeError(
            f"{height} x {width} pixels, in grey or colour, are not the {count:,} numbers of a sample",
            hint="the shape of a sample is " + " x ".join(map(str, shape)),
        )
    is_first = len(shape) == 3 and shape[0] == channels
    return "channels_first" if is_first else "channels_last", height, width, channels


def _channels_last(rows: np.ndarray, form: tuple[str, int, int, int]) -> np.ndarray:
    layout, height, width, channels = form
    if layout == "channels_first":
        return rows.reshape(-1, channels, height, width).transpose(0, 2, 3, 1).astype(np.float64)
    return rows.reshape(-1, height, width, channels).astype(np.float64)


def _range(pictures: np.ndarray | None, channels: int, dtype: np.dtype | None) -> tuple[list[float], list[float]]:
    """What the darkest and the lightest are, channel by channel."""
    if dtype is not None and dtype == np.uint8:
        return [0.0] * channels, [255.0] * channels
    if pictures is None:
        return [0.0] * channels, [1.0] * channels
    found = [_usual(*ends) for ends in zip(pictures.min((0, 1, 2)), pictures.max((0, 1, 2)), strict=True)]
    return [low for low, _ in found], [high for _, high in found]


def _usual(least: float, most: float) -> tuple[float, float]:
    """The range that numbers are of: a usual one, if they fill half of it; few pictures have the darkest of all."""
    for low, high in _RANGES:
        if low <= least and most <= high and most - least >= (high - low) / 2:
            return low, high
    return float(least), float(most)


def _strokes(pictures: np.ndarray | None, low: Sequence[float], high: Sequence[float]) -> dict[str, Any]:
    """For strokes on an even background: which end of the range that is, and how much of the picture they fill."""
    nothing = {"background": None, "extent": None}
    if pictures is None or pictures.shape[3] != 1 or high[0] <= low[0]:
        return nothing
    grey = (pictures[..., 0] - low[0]) / (high[0] - low[0])
    border = np.concatenate([grey[:, 0], grey[:, -1], grey[:, :, 0], grey[:, :, -1]], axis=1)
    level = float(np.median(border))
    if min(level, 1 - level) > _PLAIN:
        return nothing
    ink = grey > 0.5 if level < 0.5 else grey < 0.5
    sides = [max(_reach(one.any(1)), _reach(one.any(0))) for one in ink if one.any()]
    if not sides:
        return nothing
    return {"background": "low" if level < 0.5 else "high", "extent": float(np.mean(sides)) / max(grey.shape[1:])}


def _reach(lines: np.ndarray) -> int:
    """How many lines there are from the first that has something to the last."""
    return int(np.ptp(np.flatnonzero(lines))) + 1
