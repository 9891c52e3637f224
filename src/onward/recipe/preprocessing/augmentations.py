"""Augmentations by name: random variations of images, drawn for each sample.

Random numbers come from the generator in the file (random.py), so that a resumed run draws the
same. Types, shapes and axes of channels do not change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import RecipeError
from onward.recipe import random
from onward.recipe.preprocessing.operations import ImageBatch, is_number
from onward.recipe.spec import one_of

_LAST = np.iinfo(np.int64).min  # where a slice that goes backwards ends, so that it takes the first as well


class Draws:
    """Random numbers of one augmentation, one per sample, shared by all that move together."""

    def __init__(self, x: Expr, axes: int, key: Expr):
        """`axes` is the number of axes of a sample, over which its number is repeated."""
        self.key = key
        self._op, self._x, self._axes = x.op, x, axes
        self._numbers: dict[int, list[Expr]] = {}
        self._events: dict[float, Expr] = {}

    def per_sample(self, count: int = 1) -> list[Expr]:
        """Return float32 numbers from 0 to 1, in a shape that broadcasts with a batch."""
        if count not in self._numbers:
            op = self._op
            drawn = random.uniform(op, self.key, op.Concat([count], self._one_each(), axis=0))
            self._numbers[count] = [op.Gather(drawn, np.int64(at)) for at in range(count)]
        return self._numbers[count]

    def happens(self, p: float) -> Expr:
        """Return a mask of samples: an event of probability `p`."""
        _check_probability(p)
        if p not in self._events:
            self._events[p] = random.bernoulli_mask(self._op, self.key, self._one_each(), float(p))
        return self._events[p]

    def _one_each(self) -> Expr:
        op = self._op
        batch = op.Slice(op.Shape(self._x), [0], [1])
        return op.Concat(batch, [1] * self._axes, axis=0)


@dataclasses.dataclass(frozen=True)
class Chance(ImageBatch):
    """A batch of images or of companions, and the random numbers that change it."""

    draws: Draws = dataclasses.field(kw_only=True)
    fill: float = 0.0
    """Fill value of a move."""
    size: Sequence[Expr] | None = None
    """Height and width of the images that this batch moves along with."""

    def clipped(self, x: Expr) -> Expr:
        """Clip values to the range of images, if it is known."""
        if self.limit is None:
            return x
        return self.op.Clip(x, self.op.scalar(0.0, x), self.op.scalar(self.limit, x))


# ---- geometry --------------------------------------------------------------------------------------------------------


def flip(chance: Chance, p: float = 0.5, direction: Literal["horizontal", "vertical"] = "horizontal") -> Expr:
    """Mirror an image with probability `p`; `direction` is `horizontal` or `vertical`."""
    chance.check("flip")
    one_of("`direction` of `flip`", direction, "horizontal", "vertical")
    axis = chance.form.axes[direction == "horizontal"]
    mirrored = chance.op.Slice(chance.x, [-1], [_LAST], [axis], [-1])
    return chance.op.Where(chance.draws.happens(p), mirrored, chance.x)


def crop(chance: Chance, padding: int) -> Expr:
    """Move an image by up to `padding` pixels in each direction, with 0 at the edges."""
    chance.check("crop")
    is_count = is_number(padding) and isinstance(padding, int) and 0 < padding < 2**31
    _check("padding", padding, is_count, "a number of pixels")
    op, axes = chance.op, chance.form.axes
    around = [padding if axis in axes else 0 for axis in range(4)]
    fill = [op.scalar(chance.fill, chance.x)] if chance.fill else []
    # Pads of all axes: with an input for the axes, ONNX Runtime 1.31 fails between Transposes.
    padded = op.Pad(chance.x, around * 2, *fill)
    offsets = [op.Cast(op.Floor(u * (2 * padding + 1)), to=ir.DataType.INT64) for u in chance.draws.per_sample(2)]
    shape, wide = op.Shape(chance.x), op.Shape(padded)
    last = max(axes) + 1  # behind it are only channels, which move together
    indices: Expr | None = None
    for axis in range(last):
        count = op.Gather(shape, np.int64(axis))
        if chance.size is not None and axis in axes:
            count = chance.size[axes.index(axis)]
        along = _along(op, count, axis, last)
        if axis in axes:
            offset = offsets[axes.index(axis)]
            along = along + (offset if last == 4 else op.Squeeze(offset, [3]))
        if axis < last - 1:
            along = along * op.ReduceProd(op.Slice(wide, [axis + 1], [last]), keepdims=0)
        indices = along if indices is None else indices + along
    pixels = op.Reshape(padded, op.Concat([-1], op.Slice(shape, [last], [4]), axis=0))
    window: Expr = op.Gather(pixels, indices)
    # A mask must have as many pixels as the image, which symbolic dimensions do not guarantee.
    return window if chance.size is None else op.Reshape(window, shape)


def erase(chance: Chance, p: float = 0.5, area: Sequence[float] = (0.02, 0.33)) -> Expr:
    """Fill a rectangle with 0 with probability `p`; `area=[0.02,0.33]` bounds its share."""
    chance.check("erase")
    _check_probability(p)
    bounds = list(area) if isinstance(area, Sequence) and not isinstance(area, str) else []
    is_right = len(bounds) == 2 and all(map(is_number, bounds)) and 0 < bounds[0] <= bounds[1] < 1
    _check("area", area, is_right, "two numbers between 0 and 1, such as area=[0.02,0.33]")
    small, large = map(float, bounds)
    op = chance.op
    happens, share, ratio, *places = chance.draws.per_sample(5)
    counts = [op.Gather(op.Shape(chance.x), np.int64(axis)) for axis in chance.form.axes]
    lengths = [op.Cast(count, to=ir.DataType.FLOAT) for count in counts]
    root = op.Sqrt(lengths[0] * lengths[1] * (small + (large - small) * share))
    stretch = op.Exp((ratio - 0.5) * math.log(_LONGEST))  # height / width is its square
    covered = happens < float(p)
    for at, side in enumerate((root * stretch, root / stretch)):
        side = op.Min(op.Round(side), lengths[at])
        start = op.Floor(places[at] * (lengths[at] - side + 1.0))
        along = op.Cast(_along(op, counts[at], chance.form.axes[at], 4), to=ir.DataType.FLOAT)
        covered = op.And(covered, op.And(along >= start, along < start + side))
    return op.Where(covered, op.scalar(0.0, chance.x), chance.x)


_LONGEST = 3.3
"""Largest ratio of the sides of a rectangle, as in torchvision."""


def _along(op: Builder, count: Expr, axis: int, rank: int) -> Expr:
    numbers = op.Range(np.int64(0), count, np.int64(1))
    return op.Reshape(numbers, [-1 if other == axis else 1 for other in range(rank)])


# ---- values ----------------------------------------------------------------------------------------------------------


def brightness(chance: Chance, amount: float = 0.2) -> Expr:
    """Multiply an image by a number from 1 - `amount` to 1 + `amount`."""
    return chance.clipped(chance.x * _factor(chance, amount))


def contrast(chance: Chance, amount: float = 0.2) -> Expr:
    """Multiply differences from an image's mean by a number from 1 - `amount` to 1 + `amount`."""
    mean = chance.op.ReduceMean(chance.x, list(range(1, len(chance.form.dims) + 1)), keepdims=1)
    return chance.clipped(mean + (chance.x - mean) * _factor(chance, amount))


def noise(chance: Chance, std: float = 0.05) -> Expr:
    """Add normal noise with the standard deviation `std`, in the units of the values."""
    _check("std", std, is_number(std) and std > 0, "a positive number")
    numbers = random.normal(chance.op, chance.draws.key, chance.op.Shape(chance.x))
    return chance.clipped(chance.x + chance.op.CastLike(numbers, chance.x) * float(std))


def _factor(chance: Chance, amount: Any) -> Expr:
    _check("amount", amount, is_number(amount) and 0 < amount <= 1, "a number from 0 to 1")
    (number,) = chance.draws.per_sample()
    return chance.op.CastLike(number * (2.0 * amount) + (1.0 - amount), chance.x)


AUGMENTATIONS: Mapping[str, Callable[..., Expr]] = {
    function.__name__: function for function in (flip, crop, erase, brightness, contrast, noise)
}
MOVES = ("flip", "crop")
"""Augmentations that move pixels; masks must move with the images."""


def _check_probability(p: Any) -> None:
    _check("p", p, is_number(p) and 0 <= p <= 1, "a probability")


def _check(name: str, value: Any, is_right: bool, what: str) -> None:
    if not is_right:
        raise RecipeError(f"`{name}` is `{value}`, but must be {what}")
