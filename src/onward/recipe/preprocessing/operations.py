"""Preprocessing by name. Each operation turns a picture into another; `before` says which form it takes to get one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import RecipeError
from onward.recipe.preprocessing.picture import Form, Picture, check_picture, is_number
from onward.recipe.preprocessing.text import tokenize
from onward.recipe.spec import lookup

PRESETS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
"""Means and standard deviations of red, green and blue, from 0 to 1, that many models were trained with."""


@dataclasses.dataclass(frozen=True)
class Operation:
    build: Callable[..., Any]
    before: Callable[[Form], Form] = lambda form: form


# ---- values ----------------------------------------------------------------------------------------------------------


def scale(picture: Picture, max: float = 255.0) -> Picture:
    """Values from 0 to `max` become 0 to 1."""
    if not is_number(max) or max <= 0:
        raise RecipeError(f"`scale` divides by `max`, which is `{max}`", hint="such as `scale:max=255`")
    limit = picture.limit / max if picture.limit is not None else None
    return picture.changed(picture.x / float(max), limit=limit)


def normalize(picture: Picture, mean: Any = 0.0, std: Any = 1.0, preset: str | None = None) -> Picture:
    """Subtracts a mean and divides by a standard deviation: numbers, or lists with one per channel; or `imagenet`."""
    if isinstance(mean, str):
        preset = mean
    if preset is not None:
        mean, std = lookup("preset", preset, PRESETS)
        if picture.limit is not None and picture.limit > 1:
            raise RecipeError(
                f"`normalize:preset={preset}` is for values from 0 to 1, and these go to {picture.limit:g}",
                hint="put `scale` before it",
            )
    means, stds = (_per_channel(picture.form, name, given) for name, given in (("mean", mean), ("std", std)))
    if not (stds > 0).all():
        raise RecipeError("`normalize` divides by `std`, which must be positive")
    return picture.changed((picture.x - means) / stds, limit=None)


def _per_channel(form: Form, name: str, given: Any) -> np.ndarray:
    """Numbers for each channel, in a shape that goes with a batch."""
    numbers = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not numbers or not all(is_number(number) for number in numbers):
        raise RecipeError(f"`{name}` of `normalize` is `{given}`, not a number or a list of numbers")
    count = form.dims[form.channels] if form.dims else None
    if len(numbers) > 1 and count not in (None, len(numbers)):
        raise RecipeError(f"`{name}` of `normalize` has {len(numbers)} numbers for {count} channels of {form}")
    axis = form.channels if len(numbers) > 1 else max(len(form.dims) - 1, 0)
    return np.asarray(numbers, np.float32).reshape(-1, *[1] * (len(form.dims) - 1 - axis))


# ---- files -----------------------------------------------------------------------------------------------------------


def decode(picture: Picture, format: str = "RGB") -> Picture:
    """The bytes of an image file as a picture: `RGB`, `BGR` or `Grayscale`. For a pipeline that stands alone."""
    count = lookup("format of pictures", format, {"RGB": 3, "BGR": 3, "Grayscale": 1})
    op = picture.op
    made = op.Unsqueeze(op.ImageDecoder(picture.x, pixel_format=format), [0])
    made = op.Cast(made, to=ir.DataType.FLOAT)
    made.value.shape = ir.Shape([1, None, None, count])
    return Picture(made, Form((None, None, count), 2), 255.0)


def _of_file(form: Form) -> Form:
    raise RecipeError(
        "`decode` is for a pipeline that stands alone: pictures that are data are decoded as they are read",
        hint="leave it out here; `onward pipeline 'decode ...'` makes one that begins with it",
    )


# ---- pictures --------------------------------------------------------------------------------------------------------


def resize(picture: Picture, size: Any, keep: bool = False) -> Picture:
    """To a height and width, such as `size=32` or `size=32x48`: bilinear, and smooth where it becomes smaller.

    `keep`: the shorter side becomes `size`, and the other what keeps the proportions.
    """
    picture.check("resize")
    height, width = size_of("resize", size)
    op, sizes = picture.op, np.asarray([height, width], np.int64)
    if keep:
        if height != width:
            raise RecipeError(f"`resize:size={size}` has two sizes, and `keep` is for that of the shorter side")
        given = op.Gather(op.Shape(picture.x), np.asarray(picture.form.axes, np.int64))
        sizes = op.Div(given * height, op.ReduceMin(given, keepdims=0))  # rounded down, as torchvision does
    made = op.Resize(
        picture.x,
        None,
        None,
        sizes,
        mode="linear",
        antialias=1,
        exclude_outside=1,  # what is beyond the border has no weight, as everywhere else
        axes=list(picture.form.axes),
    )
    return _with_form(picture, made, picture.form.sized(None, None) if keep else picture.form.sized(height, width))


def center_crop(picture: Picture, size: Any) -> Picture:
    """The middle of a picture, such as `size=28` or `size=28x32`."""
    picture.check("center_crop")
    op, wanted, axes = picture.op, size_of("center_crop", size), picture.form.axes
    for axis, length in zip(axes, wanted, strict=True):
        if (known := picture.form.dims[axis - 1]) is not None and known < length:
            raise RecipeError(f"`center_crop:size={wanted[0]}x{wanted[1]}` is more than a picture of {picture.form}")
    lengths = np.asarray(wanted, np.int64)
    given = op.Gather(op.Shape(picture.x), np.asarray(axes, np.int64))
    start = op.Div(given - lengths, np.int64(2))
    made = op.Slice(picture.x, start, start + lengths, np.asarray(axes, np.int64))
    return _with_form(picture, made, picture.form.sized(*wanted))


def to_rgb(picture: Picture) -> Picture:
    """Grey pictures get three equal channels."""
    picture.check("to_rgb")
    made = picture.op.Concat(picture.x, picture.x, picture.x, axis=picture.form.channels + 1)
    return _with_form(picture, made, picture.form.with_channels(3))


def channels_first(picture: Picture) -> Picture:
    """From height, width, channels to channels, height, width."""
    return _with_form(picture, picture.op.Transpose(picture.x, perm=[0, 3, 1, 2]), picture.form.turned())


def channels_last(picture: Picture) -> Picture:
    """From channels, height, width to height, width, channels."""
    return _with_form(picture, picture.op.Transpose(picture.x, perm=[0, 2, 3, 1]), picture.form.turned())


def _of_any_size(name: str) -> Callable[[Form], Form]:
    def before(form: Form) -> Form:
        check_picture(name, form)
        return form.sized(None, None)

    return before


def _of_grey(form: Form) -> Form:
    check_picture("to_rgb", form)
    if form.dims[form.channels] not in (None, 3):
        raise RecipeError(f"`to_rgb` gives three channels, and what comes next takes {form}")
    return form.with_channels(1)


def _swap_axes(name: str, axis: int) -> Callable[[Form], Form]:
    def before(form: Form) -> Form:
        check_picture(name, form)
        if form.channels != axis:
            raise RecipeError(f"`{name}` does not give {form}, which comes next", hint="leave it out")
        return form.turned()

    return before


OPERATIONS: Mapping[str, Operation] = {
    "scale": Operation(scale),
    "normalize": Operation(normalize),
    "resize": Operation(resize, _of_any_size("resize")),
    "center_crop": Operation(center_crop, _of_any_size("center_crop")),
    "to_rgb": Operation(to_rgb, _of_grey),
    "channels_first": Operation(channels_first, _swap_axes("channels_first", 0)),
    "channels_last": Operation(channels_last, _swap_axes("channels_last", 2)),
    "decode": Operation(decode, _of_file),
    "tokenize": Operation(tokenize),
}


SIZES = ("resize", "center_crop")
"""Operations that give images of different sizes one size."""


def size_of(name: str, given: Any) -> tuple[int, int]:
    """Height and width of `32`, `32x48` or `[32, 48]`."""
    parts = given.split("x") if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given] * 2
    try:
        height, width = (int(part) if isinstance(part, str) else part for part in parts)
    except ValueError:
        height = width = None
    if not all(is_number(length) and isinstance(length, int) and 0 < length < 2**31 for length in (height, width)):
        raise RecipeError(f"`{name}` has the size `{given}`", hint=f"write `{name}:size=32` or `{name}:size=32x48`")
    assert height is not None and width is not None
    return height, width


def _with_form(picture: Picture, x: Any, form: Form) -> Picture:
    batch = next(iter(picture.x.value.shape or ()), None)
    x.value.shape = ir.Shape([batch, *form.dims])
    return picture.changed(x, form=form)
