"""Content of a page: the lowered parts of a training model, state, data, and their description."""

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
from onward.lowering import lower
from onward.lowering.contract import contract_of
from onward.model import Model
from onward.model.state import all_states
from onward.recipe.metrics import Labels, labels_of, objectives
from onward.training.config import Config
from onward.training.data import Batch, Batches, Dataset, Stream
from onward.training.feed import open_feed
from onward.training.report.history import recipe_rows
from onward.transform.declare import check_batch_axis
from onward.web.offsets import averages, trained_file, training_file

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_TYPES = {"float32", "float64", "float16", *_INTEGERS, "bool"}
"""Types of tensors that onnxruntime-web takes."""


class Content:
    """Files of a page by name, and their description, which becomes `page.json`."""

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
                f"a page trains models with one step; this one has {len(training.steps)}", hint=_TRAIN
            )
        self.training, self.engine, self.config = training, engine, config
        self.files: dict[str, bytes] = {}
        self.notes: list[str] = []
        self._classes: tuple[str, ...] | None = None
        rows = self._rows(opened)
        trained, trained_offsets = trained_file(original, training)
        whole, state_offsets = training_file(training)
        self.files |= {"model.onnx": trained, "training.onnx": whole}
        labels = labels_of(training)
        self.description = {
            "format": 1,
            "about": self._about(),
            "order": self._order(),
            "parts": {name: self._part(name) for name in ("step", "evaluation", "gradients", "apply")},
            "state": [
                {
                    "name": state.name,
                    "type": _type(state.name, state.value.dtype),
                    "shape": list(state.array.shape),
                    "offset": begin,
                }
                for state, (_, (begin, _)) in zip(all_states(training), state_offsets, strict=True)
            ],
            "trained": [{"state": name, "offset": begin} for name, (begin, _) in trained_offsets],
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
        lowered = lower(self.training, part=name)
        contract = contract_of(lowered)
        if contract.loss is None and name in ("step", "evaluation"):
            raise UnsupportedError(f"a page shows the loss, but part `{name}` of this model has none", hint=_TRAIN)
        self.files[f"{name}.onnx"] = lowered.to_proto().SerializeToString()
        return contract.to_json()

    def _about(self) -> dict[str, Any]:
        summary = describe(self.training)
        step = summary.steps[0]
        rows = [[label, text.partition("; differentiated")[0]] for label, text in recipe_rows(summary)]
        return {"parameters": step.trained.numbers, "rows": rows}

    # ---- data ----

    def _rows(self, opened: Dataset | Stream | None) -> tuple[Batch | None, Batch | None]:
        """Return all rows for training and for validation."""
        if self.config.data is None:
            return None, None
        in_order = dataclasses.replace(self.config, shuffle=False, last="pad")
        feed = open_feed(self.engine, in_order, opened)
        self.notes += feed.notes
        self._classes = feed.classes
        if not feed.training.is_padded:
            raise DataError("cannot write a stream of batches into a page", hint="pass data with an end, as a file")
        return all_rows(feed.training), None if feed.validation is None else all_rows(feed.validation)

    def _pack(self, rows: Sequence[Batch | None]) -> dict[str, Any]:
        packed, layout = bytearray(), {}
        for name, batch in zip(("training", "validation"), rows, strict=True):
            if batch is not None:
                columns = [pack(packed, column, values) for column, values in batch.items()]
                layout[name] = {"rows": len(next(iter(batch.values()))), "columns": columns}
        self.files["data.bin"] = bytes(packed)
        return layout

    def _order(self) -> dict[str, Any]:
        config = self.config
        fixed = check_batch_axis(self.engine.of_a_batch, self.engine.model.inputs)
        last = "drop" if fixed is not None and config.last == "keep" else config.last
        return {
            "seed": str(config.seed or 0),  # a string: JavaScript rounds integers from 2**53
            "batch_size": config.batch_size,
            "fixed": fixed is not None,
            "last": last,
            "shuffle": config.shuffle,
        }

    def _inputs(self, rows: Sequence[Batch | None]) -> list[dict[str, Any]]:
        """Return name, type and shape of each input, with dynamic sizes from the data."""
        own = {value.name for value in self.training.inputs}
        return [
            {
                "name": name,
                "type": _type(name, value.dtype),
                "shape": list(rows[0][name].shape[1:] if rows[0] is not None else _sizes(value)),
                "is_target": name not in own,
            }
            for name, value in self.engine.of_a_batch.items()
        ]

    def _labels(self, labels: Labels | None) -> dict[str, Any] | None:
        """Return the input of class labels and the output with a score per class, if any."""
        if labels is None:
            return None
        loss = next(loss for loss in objectives(self.training) if loss.target == labels.name)
        names = self._classes or tuple(self.config.classes or ()) or tuple(map(str, range(labels.count)))
        return {
            "input": labels.name,
            "output": loss.output,
            "axis": loss.axis,
            "count": labels.count,
            "ignored": labels.ignored,
            "names": [*names, *map(str, range(len(names), labels.count))],
        }

    def _picture(self, labels: Labels | None, rows: Batch | None, requested: str | None) -> dict[str, Any] | None:
        """Return the image layout of the input besides the labels, if there is exactly one."""
        others = [
            (name, value)
            for name, value in self.engine.of_a_batch.items()
            if labels is not None and name != labels.name and value.dtype in (ir.DataType.FLOAT, ir.DataType.UINT8)
        ]
        if len(others) != 1:
            return None
        name, value = others[0]
        array = rows[name] if rows is not None else None
        return picture_of(array.shape[1:] if array is not None else _sizes(value), array, requested)


_TRAIN = "train it with `onward train`"


def _sizes(value: ir.Value) -> tuple[int, ...]:
    sizes = [] if value.shape is None else [size for size in value.shape[1:] if isinstance(size, int)]
    if value.shape is None or len(sizes) != len(value.shape) - 1:
        raise UnsupportedError(
            f"the sample of `{value.name}` has dynamic sizes", hint="pass data, which have sizes: `--data FILE`"
        )
    return tuple(sizes)


def _type(name: str, dtype: ir.DataType | None) -> str:
    stored = "of an unknown type" if dtype is None else dtype.name.lower()
    type_name = {"float": "float32", "double": "float64"}.get(stored, stored)
    if type_name not in _TYPES:
        raise UnsupportedError(
            f"onnxruntime-web does not support `{name}`: it is {type_name}", hint="export the model in float32"
        )
    return type_name


# ---- columns ---------------------------------------------------------------------------------------------------------


_DIVISORS = (1.0, 2.0, 4.0, 8.0, 10.0, 15.0, 16.0, 32.0, 64.0, 100.0, 127.0, 128.0, 255.0, 256.0)
"""Usual divisors that make fractions of bytes, such as 255 for images and 16 for the digits of scikit-learn."""
_NARROW = (np.uint8, np.int8, np.uint16, np.int16, np.int32)


def all_rows(batches: Batches) -> Batch:
    """Return all rows in their order, from padded batches that are not shuffled."""
    unpadded = [
        {name: array[: batches.samples(number)] for name, array in batch.items()}
        for number, batch in enumerate(batches.epoch(0))
    ]
    return {name: np.concatenate([batch[name] for batch in unpadded]) for name in unpadded[0]}


def pack(packed: bytearray, name: str, values: np.ndarray) -> dict[str, Any]:
    """Add a column to a file, and return its layout."""
    stored, divisor = _narrow(values)
    packed += bytes(-len(packed) % 8)  # JavaScript: typed arrays begin at multiples of their size
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
    """Return the numbers in a narrower type and a divisor that restores them, bit for bit."""
    if values.dtype.kind in "iu":
        for dtype in _NARROW:
            if values.size and np.iinfo(dtype).min <= values.min() and values.max() <= np.iinfo(dtype).max:
                return values.astype(dtype), 1.0
    if values.dtype == np.float32 and values.size and values.min() >= 0 and not np.signbit(values).any():
        for divisor in _DIVISORS:
            narrow = np.rint(values * np.float32(divisor))
            if narrow.max() <= 255 and (narrow.astype(np.float32) / np.float32(divisor) == values).all():
                return narrow.astype(np.uint8), divisor
    return values, 1.0


# ---- pictures --------------------------------------------------------------------------------------------------------


_SMALLEST = 8
"""Least side, in pixels, of a flat input that counts as an image without `picture`."""
_RANGES = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
"""Usual ranges of pixels."""
_SAMPLE = 2000
"""Rows from which the range of pixels and the background are estimated."""
_PLAIN = 0.1
"""Most distance of border pixels from one end of the range, as a fraction of it, for an even background."""


def picture_of(shape: Sequence[int], rows: np.ndarray | None, requested: str | None) -> dict[str, Any] | None:
    """Return the image layout of samples, with the range of pixels from the data; None if they are not images."""
    if requested == "none":
        return None
    form = _form(tuple(shape), rows, requested)
    if form is None:
        return None
    layout, height, width, channels = form
    channel_last = _channels_last(rows[:_SAMPLE], form) if rows is not None and len(rows) else None
    low, high = _range(channel_last, channels, None if rows is None else rows.dtype)
    picture = {"layout": layout, "height": height, "width": width, "channels": channels, "low": low, "high": high}
    return {**picture, **_strokes(channel_last, low, high)}


def _form(shape: tuple[int, ...], rows: np.ndarray | None, requested: str | None) -> tuple[str, int, int, int] | None:
    if requested is not None:
        return _requested_form(shape, requested)
    if len(shape) == 3 and shape[0] in (1, 3):
        return "channels_first", shape[1], shape[2], shape[0]
    if len(shape) == 3 and shape[2] in (1, 3):
        return "channels_last", shape[0], shape[1], shape[2]
    if len(shape) == 2 and min(shape) >= _SMALLEST:
        return "channels_last", shape[0], shape[1], 1
    side = math.isqrt(shape[0]) if len(shape) == 1 else 0
    may_be = side >= _SMALLEST and side * side == shape[0] and rows is not None and rows.size and rows.min() >= 0
    return ("channels_last", side, side, 1) if may_be else None


def _requested_form(shape: tuple[int, ...], requested: str) -> tuple[str, int, int, int]:
    sizes = re.fullmatch(r"(\d+)x(\d+)", requested)
    if sizes is None:
        raise RecipeError(
            f"`{requested}` is not an image size", hint="write height and width: `--picture 8x8`, or `--picture none`"
        )
    height, width = map(int, sizes.groups())
    count = math.prod(shape)
    if height * width == 0 or count % (height * width) or (channels := count // (height * width)) not in (1, 3):
        raise RecipeError(
            f"{height} x {width} pixels, gray or RGB, do not match the {count:,} numbers of a sample",
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
    """Return the darkest and the lightest value of each channel."""
    if dtype is not None and dtype == np.uint8:
        return [0.0] * channels, [255.0] * channels
    if pictures is None:
        return [0.0] * channels, [1.0] * channels
    ranges = [_usual(*ends) for ends in zip(pictures.min((0, 1, 2)), pictures.max((0, 1, 2)), strict=True)]
    return [low for low, _ in ranges], [high for _, high in ranges]


def _usual(least: float, most: float) -> tuple[float, float]:
    """Return a usual range if the values fill half of it, since few images reach its ends; else their own."""
    for low, high in _RANGES:
        if low <= least and most <= high and most - least >= (high - low) / 2:
            return low, high
    return float(least), float(most)


def _strokes(pictures: np.ndarray | None, low: Sequence[float], high: Sequence[float]) -> dict[str, Any]:
    """Return which end of the range is an even background, and the fraction of a side that strokes on it fill."""
    nothing = {"background": None, "extent": None}
    if pictures is None or pictures.shape[3] != 1 or high[0] <= low[0]:
        return nothing
    gray = (pictures[..., 0] - low[0]) / (high[0] - low[0])
    border = np.concatenate([gray[:, 0], gray[:, -1], gray[:, :, 0], gray[:, :, -1]], axis=1)
    level = float(np.median(border))
    if min(level, 1 - level) > _PLAIN:
        return nothing
    ink = gray > 0.5 if level < 0.5 else gray < 0.5
    sides = [max(_extent(image.any(1)), _extent(image.any(0))) for image in ink if image.any()]
    if not sides:
        return nothing
    return {"background": "low" if level < 0.5 else "high", "extent": float(np.mean(sides)) / max(gray.shape[1:])}


def _extent(lines: np.ndarray) -> int:
    """Return the number of lines from the first with ink to the last."""
    return int(np.ptp(np.flatnonzero(lines))) + 1
