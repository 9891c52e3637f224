"""What a page needs to know to make a sample of a picture: its size, and what black and white are in the data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from onward.errors import RecipeError

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
